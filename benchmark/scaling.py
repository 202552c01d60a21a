"""Steps per second against the number of processes, for a small network and for convolutions: a table and a figure.

    python -m benchmark.scaling
    python -m benchmark.scaling --ranks 1 2 4 8 --repetitions 5

Each process adds as many environments, so the ideal is a straight line. Writes benchmark/results/scaling.csv and
benchmark/figures/scaling.svg. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from benchmark.plot import save
from benchmark.speed import ours
from common.distributed import World

WORKS = {  # environments per process, flags
    "PPO CartPole-v1, 4 environments each": (4, "--env-id CartPole-v1 --num-steps 128", 50_000),
    "PPO CartPole-v1, 64 environments each": (64, "--env-id CartPole-v1 --num-steps 128", 400_000),
    "PPO ALE/Breakout-v5, 8 environments each": (8, "--env-id ALE/Breakout-v5 --clip-coef 0.1", 10_240),
}


@dataclass
class Args:
    ranks: tuple[int, ...] = field(default_factory=lambda: tuple(range(1, World(cuda=False).cores + 1)))
    """numbers of processes, the first of them 1"""
    repetitions: int = 3
    """interleaved repetitions"""
    results: Path = Path("benchmark/results/scaling.csv")
    """the table as data"""
    figure: Path = Path("benchmark/figures/scaling.svg")
    """the figure"""

    def __post_init__(self) -> None:
        if self.ranks[0] != 1 or list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"--ranks {self.ranks}: must start with 1 and rise, such as 1 2 4.")


def main(args: Args) -> None:
    from matplotlib.figure import Figure

    rows = []
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, (num_envs, flags, steps)), colour in zip(WORKS.items(), ("#0072B2", "#D55E00", "#009E73"), strict=True):
        speeds = {ranks: [] for ranks in args.ranks}
        for _ in range(args.repetitions):
            for ranks in args.ranks:
                sizes = f"--num-envs {num_envs * ranks} --total-timesteps {steps * ranks}"
                speeds[ranks].append(ours("ppo_ddp.py", f"{flags} {sizes}", ranks, 1).sps)
        medians = {ranks: statistics.median(values) for ranks, values in speeds.items()}
        print(f"\n{name}", flush=True)
        for ranks, median in medians.items():
            efficiency = median / (ranks * medians[1])
            spread = f"[{min(speeds[ranks]):.0f}, {max(speeds[ranks]):.0f}]"
            print(f"  {ranks:3} processes {median:9.0f} steps/s {spread:18} efficiency {efficiency:.2f}", flush=True)
            rows.append([name, ranks, round(median), round(min(speeds[ranks])), round(max(speeds[ranks])), efficiency])
        left.plot(args.ranks, [medians[ranks] / medians[1] for ranks in args.ranks], "o-", color=colour, label=name)
        right.plot(args.ranks, [medians[ranks] / ranks / medians[1] for ranks in args.ranks], "o-", color=colour)
    left.plot(args.ranks, args.ranks, color="grey", linestyle=":", label="ideal")
    right.axhline(1.0, color="grey", linestyle=":")
    left.set(xlabel="processes", ylabel="steps/s over those of one process", xticks=args.ranks)
    right.set(xlabel="processes", ylabel="efficiency", xticks=args.ranks, ylim=(0, 1.1))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    save(figure, args.figure)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with open(args.results, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["work", "processes", "steps_per_second", "lowest", "highest", "efficiency"])
        writer.writerows(rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
