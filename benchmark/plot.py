"""Draws the recorded curves of a suite, and writes the table of its results into the README.

    python -m benchmark.plot classic

Reads only `benchmark/results/SUITE`; writes `benchmark/figures/SUITE/*.svg` and the README's table between its markers.
A curve is the interquartile mean over seeds of the evaluations, its band the 95 % interval of a stratified bootstrap
(arXiv:2108.13264); of two seeds that is no more than their range. A final return is the mean of a run's last three
evaluations.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure

from benchmark.run import Run, recorded, runs_of
from benchmark.suites import REFERENCES, SCALES, SUITES

matplotlib.rcParams |= {
    "svg.hashsalt": "lockstep",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLOURS = {  # Okabe and Ito's, told apart by the colour-blind
    "ppo_ddp": "#0072B2",
    "ppg_ddp": "#D55E00",
    "dqn_ddp": "#009E73",
    "dqn_ddp-prioritized": "#E69F00",
    "sac_ddp": "#CC79A7",
}
DASHES = {1: "-", 2: "-."}  # by world size; references are dashed
RESAMPLES = 2000


@dataclass
class Args:
    suite: tyro.conf.Positional[Literal[tuple(SUITES)]]
    """which suite"""
    results: Path = Path("benchmark/results")
    """where curves are recorded"""
    figures: Path = Path("benchmark/figures")
    """where figures go"""
    readme: Path = Path("README.md")
    """whose table is renewed"""


@dataclass
class Curve:
    """Evaluations of the k seeds of one work at one world size."""

    steps: np.ndarray  # (t,)
    returns: np.ndarray  # (k, t)
    minutes: np.ndarray  # (k, t)
    rows: list[list[dict]]  # as recorded, of each run
    seeds: list[int]

    @property
    def final(self) -> np.ndarray:
        return self.returns[:, -3:].mean(1)


def load(suite: str, results: Path) -> dict[tuple[str, str, int], Curve]:
    """Recorded curves by (environment, script and variant, world size)."""
    groups: dict[tuple[str, str, int], list[Run]] = defaultdict(list)
    for run in runs_of(suite):
        if recorded(run, results):
            groups[(run.env_id, run.name.split("__")[1], run.world_size)].append(run)
    curves = {}
    for key, runs in groups.items():
        tables, all_rows = [], []
        for run in runs:
            with open(results / suite / f"{run.name}.csv", newline="") as file:
                rows = list(csv.DictReader(file))
            kept = [row for row in rows if row["eval/episodic_return"]]
            tables.append(
                [[float(row[c]) for c in ("global_step", "eval/episodic_return", "time/wall")] for row in kept]
            )
            all_rows.append(rows)
        assert len({len(rows) for rows in tables}) == 1, f"{key}: seeds were evaluated at other steps"
        table = np.array(tables)  # (k, t, 3)
        assert (table[:, :, 0] == table[0, :, 0]).all(), f"{key}: seeds were evaluated at other steps"
        curves[key] = Curve(table[0, :, 0], table[:, :, 1], table[:, :, 2] / 60, all_rows, [run.seed for run in runs])
    return curves


def interquartile_mean(x: np.ndarray, axis: int) -> np.ndarray:
    """Mean of the middle half, the runs at its edges counted in part (so that of two or three all count)."""
    x = np.moveaxis(np.sort(x, axis), axis, 0)
    n = len(x)
    edges = np.arange(n + 1)
    weights = np.clip(np.minimum(edges[1:], 0.75 * n) - np.maximum(edges[:-1], 0.25 * n), 0, 1)
    return np.tensordot(weights / weights.sum(), x, 1)


def interval(groups: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of the interquartile mean over all of `groups`, (k, ...) each, seeds resampled within a group."""
    rng = np.random.default_rng(0)
    samples = [
        np.concatenate([group[rng.integers(len(group), size=len(group))] for group in groups]) for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(interquartile_mean(np.array(samples), 1), [2.5, 97.5], axis=0)
    return low, high


def draw_environment(env_id: str, curves: dict[tuple[str, int], Curve], path: Path) -> None:
    """Returns against transitions, and against wall time."""
    lines = len(curves) + len({script for script, _ in curves})
    figure = Figure(figsize=(8, 2.7 + 0.09 * lines), layout="constrained")  # the legend has two columns
    left, right = figure.subplots(1, 2, sharey=True)
    for (script, world_size), curve in sorted(curves.items()):
        style = {"color": COLOURS[script], "linestyle": DASHES[world_size], "linewidth": 1.5}
        middle, (low, high) = interquartile_mean(curve.returns, 0), interval([curve.returns])
        seeds = len(curve.returns)
        label = f"{script}, {world_size} process{'es' * (world_size > 1)} ({seeds} seed{'s' * (seeds > 1)})"
        for axis, x in ((left, curve.steps / 1000), (right, curve.minutes.mean(0))):
            axis.plot(x, middle, label=label, **style)
            axis.fill_between(x, low, high, color=COLOURS[script], alpha=0.15, linewidth=0)
    for script in sorted({script for script, _ in curves}):
        reference = REFERENCES.get((f"{script}.py", env_id))
        if reference:
            value, _, steps, source = reference
            label = f"{script}: {source}, at {steps // 1000} k"
            left.axhline(value, color=COLOURS[script], linestyle="--", linewidth=1, label=label)
    left.set(xlabel="environment transitions (thousands)", ylabel="return of evaluation episodes", title=env_id)
    right.set(xlabel="wall time (minutes), other runs beside it", title="the same against time")
    for axis in (left, right):
        axis.grid(alpha=0.3, linewidth=0.5)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    save(figure, path)


def draw_aggregate(suite: str, curves: dict[tuple[str, str, int], Curve], path: Path) -> None:
    """Scaled returns over all environments of the suite: along the budget, and their profile at its end."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    first = max(curve.steps[0] / curve.steps[-1] for curve in curves.values())
    part, levels = np.linspace(first, 1, 50), np.linspace(0, 1.2, 121)
    for script in sorted({script for _, script, _ in curves}):
        scaled, final = [], []
        for (env_id, name, world_size), curve in curves.items():
            if (name, world_size) == (script, 1):
                low, high = SCALES[env_id]
                x = (curve.returns - low) / (high - low)
                final.append((curve.final - low) / (high - low))
                scaled.append(np.array([np.interp(part * curve.steps[-1], curve.steps, row) for row in x]))
        if not scaled:
            continue
        middle, (low, high) = interquartile_mean(np.concatenate(scaled), 0), interval(scaled)
        label = f"{script}, {len(scaled)} environment{'s' if len(scaled) > 1 else ''}"
        left.plot(100 * part, middle, color=COLOURS[script], label=label)
        left.fill_between(100 * part, low, high, color=COLOURS[script], alpha=0.15, linewidth=0)
        profile = [np.mean([(runs > level).mean() for runs in final]) for level in levels]
        right.plot(levels, profile, color=COLOURS[script])
    left.set(xlabel="part of the budget (%)", ylabel="scaled return, interquartile mean", title=f"suite {suite}")
    right.set(
        xlabel="scaled final return (0 random, 1 good)", ylabel="runs above it (part)", title="performance profile"
    )
    for axis in (left, right):
        axis.grid(alpha=0.3, linewidth=0.5)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    save(figure, path)


def save(figure: matplotlib.figure.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def agreement(one: Curve, many: Curve) -> str:
    """Of two world sizes: whether runs of equal seeds are the same bytes, `time/` aside.

    If not, up to which transition all that they logged agrees to 1e-3, and whether the intervals overlap.
    """

    def equal(a: str, b: str) -> bool:
        return a == b or (a != "" and b != "" and abs(float(a) - float(b)) <= 1e-3 * max(abs(float(a)), abs(float(b))))

    agreed, exact = [], True
    for seed, rows in zip(many.seeds, many.rows, strict=True):
        if seed in one.seeds:
            step = 0
            for a, b in zip(one.rows[one.seeds.index(seed)], rows, strict=True):
                cells = [(a[name], b[name]) for name in a if not name.startswith("time/")]
                exact = exact and all(x == y for x, y in cells)
                if not all(equal(x, y) for x, y in cells):
                    break
                step = int(a["global_step"])
            agreed.append(f"{step:,}")
    if agreed and exact:
        return "the same bytes"
    (low1, high1), (low2, high2) = interval([one.final]), interval([many.final])
    return f"{' and '.join(agreed)}; {'overlap' if low1 <= high2 and low2 <= high1 else 'apart'}"


def table(curves: dict[tuple[str, str, int], Curve]) -> str:
    """The suite's results in Markdown."""
    head = "| environment | script | processes | final return | 95 % interval | reference | transitions | minutes |"
    lines = [f"{head} as one process up to; intervals |", "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for (env_id, script, world_size), curve in sorted(curves.items()):
        final, (low, high) = curve.final, interval([curve.final])
        several = len(final) > 1
        deviation = f" ± {final.std(ddof=1):.1f}" if several else ""
        reference = REFERENCES.get((f"{script}.py", env_id))  # none for a variant
        cells = [env_id, script.replace("_ddp", ""), str(world_size)]
        cells += [f"{final.mean():.1f}{deviation} ({len(final)})", f"{low:.1f} to {high:.1f}" if several else ""]
        cells.append(
            "{} ± {} at {:.2f} M, {}".format(*reference[:2], reference[2] / 1e6, reference[3]) if reference else ""
        )
        cells += [f"{curve.steps[-1] / 1e6:.2f} M", f"{curve.minutes[:, -1].mean():.1f}"]
        one = curves.get((env_id, script, 1))
        cells.append(agreement(one, curve) if world_size > 1 and one else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(readme: str, suite: str, text: str) -> str:
    """The README with the text between the suite's two markers replaced."""
    start, end = f"<!-- {suite} -->\n", f"<!-- end {suite} -->\n"
    before, rest = readme.split(start)
    return before + start + text + end + rest.split(end)[1]


def main(args: Args) -> None:
    curves = load(args.suite, args.results)
    if not curves:
        print(f"nothing is recorded of {args.suite}: python -m benchmark.run {args.suite}")
        return
    names = []
    for env_id in sorted({env_id for env_id, _, _ in curves}):
        chosen = {(script, size): curve for (env, script, size), curve in curves.items() if env == env_id}
        names.append(env_id.replace("/", "-"))
        draw_environment(env_id, chosen, args.figures / args.suite / f"{names[-1]}.svg")
    draw_aggregate(args.suite, curves, args.figures / args.suite / "all.svg")
    images = "".join(f"\n![{name}](benchmark/figures/{args.suite}/{name}.svg)\n" for name in [*names, "all"])
    args.readme.write_text(with_table(args.readme.read_text(), args.suite, table(curves) + images))
    print(f"drew {len(curves)} curves of {args.suite}; renewed its table in {args.readme}")


if __name__ == "__main__":
    main(tyro.cli(Args))
