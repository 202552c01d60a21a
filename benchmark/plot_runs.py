"""Draws runs of your own: returns in training and in evaluations, and all losses, against transitions.

    python -m benchmark.plot_runs runs/a
    python -m benchmark.plot_runs runs/a runs/b --out curves.svg

Reads metrics.csv of each run directory, also while the run still writes it, and labels it by the directory's name.
A column without numbers gets no panel, and a curve connects the rows that have a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import tyro
from matplotlib.figure import Figure

from benchmark.compare import Curve, load
from benchmark.plot import COLOURS, OTHERS
from benchmark.run import or_say_why
from common.processes import BadInput

RETURNS = {
    "charts/episodic_return": "return of training episodes",
    "eval/episodic_return": "return of evaluations",
}
PANELS = 3  # in a row


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """run directories, or recorded curves"""
    out: Path | None = None
    """the picture: .png, .svg or .pdf (default: curves.png in the first run directory)"""


def points(run: Curve, column: str) -> tuple[list[int], list[float]]:
    """The transitions and the numbers of the rows in which a column is not blank."""
    rows = [row for row in run.rows if row.get(column)]
    return [int(row["global_step"]) for row in rows], [float(row[column]) for row in rows]


def draw(runs: dict[str, Curve]) -> Figure:
    """A panel for each column with numbers, and in it a curve for each run, by its label."""
    names = dict.fromkeys(name for run in runs.values() for name in run.rows[0])
    columns = [*RETURNS, *(name for name in names if name.startswith("losses/"))]
    columns = [name for name in columns if any(points(run, name)[0] for run in runs.values())]
    if not columns:
        raise BadInput(f"{', '.join(runs)}: no row has a return or a loss yet.")
    num_rows = -(-len(columns) // PANELS)
    figure = Figure(figsize=(11, 0.6 + 2.3 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, PANELS, squeeze=False, sharex=True).flat
    colours = dict(zip(runs, cycle([*COLOURS.values(), *OTHERS]), strict=False))
    for axis, column in zip(axes, columns, strict=False):
        for label, run in runs.items():
            steps, values = points(run, column)
            marker = "." if len(steps) < 50 else ""
            axis.plot(steps, values, label=label, color=colours[label], linewidth=1, marker=marker)
        axis.set_title(RETURNS.get(column, column))
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.tick_params(labelbottom=True)
    for axis in axes[len(columns) :]:
        axis.remove()
    figure.supxlabel("environment transitions", fontsize=9)
    figure.legend(axes[0].lines, runs, loc="outside upper left", frameon=False, ncols=2)
    return figure


def main(args: Args) -> None:
    if not args.runs:
        raise BadInput("RUNS: name at least one run directory, such as runs/a.")
    empty = [path for path in args.runs if path.is_dir() and not (path / "metrics.csv").exists()]
    if len(empty) < len(args.runs):
        args.runs = tuple(path for path in args.runs if path not in empty)
        for path in empty:
            print(f"{path}: left out, since it has no metrics.csv")
    first = args.runs[0]
    names = [path.resolve().name for path in args.runs]
    labels = names if len({*names}) == len(names) else [str(path) for path in args.runs]
    figure = draw({label: load(path) for label, path in zip(labels, args.runs, strict=True)})
    out = args.out or (first if first.is_dir() else first.parent) / "curves.png"
    try:
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise BadInput(f"--out {out}: cannot be written ({error}).") from error
    print(f"drew {', '.join(labels)} in {out}")


if __name__ == "__main__":
    or_say_why(lambda: main(tyro.cli(Args)))
