"""Steps per second against the number of processes, for a small network and for convolutions: a table and a figure.

    python -m benchmark.scaling
    python -m benchmark.scaling --ranks 1 2 4 8 --repetitions 5
    python -m benchmark.scaling --no-measure --results benchmark/results/scaling.csv     # redraws what is recorded

Each process adds as many environments, so the ideal is a straight line. Writes the measurements, and from them a figure
and a table. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import csv
import os
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import tyro
from matplotlib.figure import Figure

from benchmark.plot import save, with_table
from benchmark.run import or_say_why
from benchmark.speed import ours
from common.logger import processor
from common.processes import BadInput, World

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
CARTPOLE, BREAKOUT = "--env-id CartPole-v1 --num-steps 128", "--env-id ALE/Breakout-v5 --clip-coef 0.1"
WORKS = {  # script, environments per process, flags, transitions per process
    "PPO CartPole-v1, 4 environments each": ("ppo_ddp.py", 4, CARTPOLE, 50_000),
    "PPO CartPole-v1, 64 environments each": ("ppo_ddp.py", 64, CARTPOLE, 400_000),
    "PPO ALE/Breakout-v5, 8 environments each": ("ppo_ddp.py", 8, BREAKOUT, 10_240),
}


@dataclass
class Args:
    ranks: tuple[int, ...] = field(default_factory=lambda: tuple(range(1, World(cuda=False).cores + 1)))
    """numbers of processes, the first of them 1"""
    repetitions: int = 3
    """interleaved repetitions"""
    measure: bool = True
    """no: only draw what is recorded"""
    results: Path = Path("runs/scaling.csv")
    """the measurements"""
    figure: Path = Path("runs/scaling.svg")
    """the figure"""
    readme: Path | None = None
    """a file whose lines between <!-- scaling --> and <!-- end scaling --> become the table and the figure"""

    def __post_init__(self) -> None:
        if not self.ranks or self.ranks[0] != 1 or list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"--ranks {' '.join(map(str, self.ranks))}: must start with 1 and rise, such as 1 2 4.")
        if self.repetitions < 1:
            raise ValueError(f"--repetitions {self.repetitions}: must be at least 1.")


def measure(args: Args) -> None:
    """Write a row per work, number of processes and repetition."""
    world = World(cuda=False)
    device = f"{world.cores} cores of {processor()}"
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text("work,processes,steps_per_second,device\n")
    for name, (script, num_envs, flags, steps) in WORKS.items():
        for _ in range(args.repetitions):
            for ranks in args.ranks:
                sizes = f"--num-envs {num_envs * ranks} --total-timesteps {steps * ranks}"
                row = [name, ranks, round(ours(script, f"{flags} {sizes}", ranks, 1).sps), device]
                print(*row, sep=", ", flush=True)
                with open(args.results, "a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerow(row)


def draw(args: Args) -> None:
    """The figure and a page's table, of what is recorded."""
    speeds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with open(args.results, newline="") as file:
        for row in csv.DictReader(file):
            speeds[row["work"]][int(row["processes"])].append(float(row["steps_per_second"]))
            device = row["device"]
    cores = int(device.split()[0])
    text = "| work | processes | steps per second, median [lowest, highest] | efficiency |\n| --- | --- | --- | --- |\n"
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, by_ranks), colour in zip(speeds.items(), COLOURS[: len(speeds)], strict=True):
        medians = {ranks: statistics.median(values) for ranks, values in by_ranks.items()}
        efficiency = {ranks: median / ranks / medians[1] for ranks, median in medians.items()}
        for ranks, values in by_ranks.items():
            spread = f"{medians[ranks]:,.0f} [{min(values):,.0f}, {max(values):,.0f}]"
            number = f"{ranks} (more than cores)" if ranks > cores else f"{ranks}"
            text += f"| {name} | {number} | {spread} | {efficiency[ranks]:.2f} |\n"
        speedups = [x / medians[1] for x in medians.values()]
        left.plot(medians.keys(), speedups, "o--", color=colour, label=name)  # nothing is measured between points
        right.plot(efficiency.keys(), efficiency.values(), "o--", color=colour)
    ticks = list(medians)
    left.plot(ticks, ticks, color="grey", linestyle=":", label="ideal")
    right.axhline(1.0, color="grey", linestyle=":")
    if ticks[-1] > cores:
        left.axvspan(cores, ticks[-1], color="grey", alpha=0.15, label="more processes than cores")
        right.axvspan(cores, ticks[-1], color="grey", alpha=0.15)
    left.set(xlabel="processes", ylabel="steps/s (one process: 1)", xticks=ticks)
    right.set(xlabel="processes", ylabel="efficiency", xticks=ticks)
    right.set_ylim(0.0, 1.1 * right.get_ylim()[1])
    figure.suptitle(device, fontsize=9)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    save(figure, args.figure)
    text = f"On {device}, one torch thread per process:\n\n{text}"
    print(text)
    if args.readme is not None:
        text += f"\n![scaling]({os.path.relpath(args.figure, args.readme.parent)})\n"
        args.readme.write_text(with_table(args.readme, "scaling", text))


def main(args: Args) -> None:
    if args.readme is not None:
        with_table(args.readme, "scaling", "")  # before anything is measured
    if not args.measure and not args.results.exists():
        raise BadInput(f"--results {args.results}: is not there; leave out --no-measure.")
    if args.measure:
        measure(args)
    draw(args)


if __name__ == "__main__":
    or_say_why(lambda: main(tyro.cli(Args)))
