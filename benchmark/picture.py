"""Draws README's picture: what `--shards` promises, and what it looks like without.

    python -m benchmark.run promise --cores 4
    python -m benchmark.plot promise --readme docs/results.md
    python -m benchmark.picture --record
    python -m benchmark.picture

The third line runs the same command once more, kills it six times at random moments, and goes on each time with
another number of processes. It is recorded only if its rows are those of the run that was left alone.
"""

from __future__ import annotations

import csv
import json
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmark.plot import save
from benchmark.run import RECORDED, Run, or_say_why, progress, record, runs_of
from benchmark.suites import suite_of
from common.processes import BadInput

KILLS = 6
COLOURS = {1: "#000000", 2: "#E69F00", 4: "#56B4E9"}  # by processes; Okabe and Ito's
WIDTHS = {1: 1.0, 2: 3.0, 4: 6.0}  # so that lines of the same returns are all seen


@dataclass
class Args:
    record: bool = False
    """run, kill and record the run that is killed, instead of drawing"""
    results: Path = Path("benchmark/results")
    """where curves are recorded"""
    figure: Path = Path("benchmark/figures/promise.svg")
    """the picture"""
    work: Path = Path("runs/benchmark")
    """where the run's own directory goes"""


def works() -> dict[tuple[str, int], Run]:
    """The suite's runs by (variant, processes)."""
    return {(run.variant, run.world_size): run for run in runs_of(suite_of("promise"))}


def untimed(path: Path, columns: tuple[str, ...] = RECORDED) -> list[list[str]]:
    """The rows of a csv file, of these columns, without `time/`. Raises `BadInput` where it is missing."""
    if not path.exists():
        command = "benchmark.picture --record" if "killed" in path.name else "benchmark.run promise --cores 4"
        raise BadInput(f"--results: {path} is not there; python -m {command}")
    with open(path, newline="") as file:
        return [[row[x] for x in columns if not x.startswith("time/")] for row in csv.DictReader(file)]


def record_killed(args: Args) -> None:
    """Run, kill and go on; record the curve, and the last row and the number of processes before each kill."""
    alone = works()["shards", 1]
    undisturbed = untimed(args.results / alone.suite / f"{alone.name}.csv")
    run, total, chance, kills = replace(alone, variant="killed"), int(undisturbed[-1][0]), random.Random(1), []
    run_dir, start = run.folder(args.work), time.monotonic()
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    at = sorted(chance.uniform(0.05, 0.95) for _ in range(KILLS))
    for part, size in zip([*at, None], cycle([1, 4, 2]), strict=False):
        words = replace(run, world_size=size).command(run_dir)
        process = subprocess.Popen([sys.executable, *words[1:]], stdout=subprocess.DEVNULL)
        while process.poll() is None and (part is None or progress(run_dir) < part):
            time.sleep(0.05)
        time.sleep(0 if part is None else chance.uniform(0, 2))
        if (part is None) != (process.poll() is not None) or process.returncode:
            raise BadInput(f"{run.name}: {size} process(es) ended with code {process.returncode}.")
        if part is not None:
            kills.append((int((run_dir / "metrics.csv").read_text().splitlines()[-1].split(",")[0]), size))
            for member in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()
            print(f"killed {size} process(es) after row {kills[-1][0]:,} of {total:,}", flush=True)
    if untimed(run_dir / "metrics.csv") != undisturbed:
        raise BadInput(f"{run.name}: not the rows of {alone.name}; python -m benchmark.compare tells where they part.")
    record(run, run_dir, args.results, time.monotonic() - start)
    path = args.results / run.suite / f"{run.name}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kills": kills}, indent=2) + "\n")
    print(f"recorded {path}: the same rows as undisturbed")


def draw(args: Args) -> None:
    """Three panels of the returns of evaluations: shards, killed, and without shards."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    runs = works()

    def plot(axis: Axes, run: Run, **style: Any) -> None:
        rows = untimed(args.results / run.suite / f"{run.name}.csv", ("global_step", "eval/episodic_return"))
        points = [(int(step) / 1000, float(value)) for step, value in rows if value]
        axis.plot(*zip(*points, strict=True), **style)

    for axis, variant in ((axes[0], "shards"), (axes[2], "")):
        for size in (4, 2, 1):  # the thinnest last
            width = WIDTHS[size] if variant else 1.5
            name = f"{size} process{'es' if size > 1 else ''}"
            plot(axis, runs[variant, size], color=COLOURS[size], linewidth=width, label=name)
    killed = replace(runs["shards", 1], variant="killed")
    plot(axes[1], killed, color=COLOURS[1], linewidth=1.5)
    for step, size in json.loads((args.results / "promise" / f"{killed.name}.json").read_text())["kills"]:
        axes[1].axvline(step / 1000, color=COLOURS[size], linewidth=1.5, linestyle="--")
    axes[1].plot([], [], color="grey", linestyle="--", label="killed (colour: processes)")
    axes[0].set(title="--shards 4: three runs, the same bytes", ylabel="return of evaluations")
    axes[0].set(ylim=(-250, 300))  # of all three; first evaluations are below
    axes[1].set(title="the same, killed and resumed", xlabel="environment transitions (thousands)")
    axes[2].set(title="without --shards: roundings part them")
    for axis in axes:
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.legend(loc="lower right", framealpha=1.0, edgecolor="none", fontsize=8)
    save(figure, args.figure)
    print(f"drew {args.figure}")


if __name__ == "__main__":

    def main() -> None:
        args = tyro.cli(Args)
        (record_killed if args.record else draw)(args)

    or_say_why(main)
