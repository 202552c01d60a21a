"""Draws the recorded curves of a suite, and prints the table of its results.

    python -m benchmark.plot classic --readme docs/results.md
    python -m benchmark.plot my_suite.py

Reads `benchmark/results/SUITE`; writes `benchmark/figures/SUITE/*.svg` and, where it is named, a page's table. Of a
suite of your own, these are `runs/results` and `runs/figures`.
A curve is the interquartile mean over seeds of the evaluations, its band the 95 % interval of a stratified bootstrap
(arXiv:2108.13264); of fewer than five seeds that is no more than their range. A final return is the mean of a run's
last three evaluations. Procgen's are of training episodes, as its paper has them: means over tenths of a run.
With `--against ppo_ddp` a second table says by how much the others' final returns are above that script's or variant's.
"""

from __future__ import annotations

import csv
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure

from benchmark.compare import AGREE, gap
from benchmark.run import Run, or_say_why, recorded, runs_of
from benchmark.suites import Suite, suite_of
from common.processes import BadInput

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
OTHERS = ("#56B4E9", "#000000", "#8C564B", "#7F7F7F", "#BCBD22", "#E377C2", *COLOURS.values())  # of other variants
LINES = 6  # on one axes
BOTTOM = -0.1  # of scaled returns that are shown
RESAMPLES = 2000


@dataclass
class Args:
    suite: tyro.conf.Positional[str]
    """which suite: a name, or a file of your own, such as my_suite.py"""
    results: Path | None = None
    """where curves are recorded (default: benchmark/results; of a suite of your own, runs/results)"""
    figures: Path | None = None
    """where figures go (default: benchmark/figures; of a suite of your own, runs/figures)"""
    readme: Path | None = None
    """a file whose lines between <!-- SUITE --> and <!-- end SUITE --> become the table and the figures"""
    against: str | None = None
    """also the differences of the others' final returns to this script's or variant's, such as ppo_ddp"""


@dataclass
class Curve:
    """Evaluations, or tenths of training, of the k seeds of one work, at one world size or several of equal bytes."""

    steps: np.ndarray  # (t,)
    returns: np.ndarray  # (k, t)
    minutes: np.ndarray  # (k, t)
    rows: list[list[dict]]  # as recorded, of each run
    seeds: list[int]
    world_sizes: tuple[int, ...]
    training: bool = False

    @property
    def final(self) -> np.ndarray:
        return self.returns[:, self.steps > 0][:, -3:].mean(1)  # without the one before learning

    @property
    def processes(self) -> str:
        """Such as "1 process", or "1 and 2 processes, the same bytes"."""
        sizes = " and ".join(map(str, self.world_sizes))
        same = ", the same bytes" if len(self.world_sizes) > 1 else ""
        return f"{sizes} process{'es' if sizes != '1' else ''}{same}"


def load(suite: Suite, results: Path) -> dict[tuple[str, str, int], Curve]:
    """Recorded curves by (environment, script and variant, world size), the smallest of those of the same bytes.

    `start.csv` beside them holds scores before learning, of curves that were recorded without.
    """
    groups: dict[tuple[str, str, int], list[Run]] = defaultdict(list)
    for run in runs_of(suite):
        if recorded(run, results):
            groups[(run.env_id, run.label, run.world_size)].append(run)
    starts, path = {}, results / suite.name / "start.csv"
    if path.exists():
        with open(path, newline="") as file:
            starts = {row["name"]: float(row["eval/episodic_return"]) for row in csv.DictReader(file)}
    curves = {}
    for key, runs in sorted(groups.items()):
        tables, all_rows = [], []
        for run in runs:
            with open(results / suite.name / f"{run.name}.csv", newline="") as file:
                rows = list(csv.DictReader(file))
            kept = [row for row in rows if row["eval/episodic_return"]]
            cells = [[float(row[c]) for c in ("global_step", "eval/episodic_return", "time/wall")] for row in kept]
            if run.training:
                cells = tenths(rows)
            elif kept and kept[0]["global_step"] != "0" and run.name in starts:
                cells.insert(0, [0.0, starts[run.name], 0.0])
            tables.append(cells)
            all_rows.append(rows)
        steps = {tuple(row[0] for row in cells) for cells in tables}
        if len(steps) > 1 or not tables[0]:
            raise BadInput(f"{key[0]}, {key[1]}: its seeds were not evaluated at the same steps, or never")
        table = np.array(tables)  # (k, t, 3)
        seeds = [run.seed for run in runs]
        curve = Curve(table[0, :, 0], table[:, :, 1], table[:, :, 2] / 60, all_rows, seeds, (key[2],), runs[0].training)
        one = next((c for (*work, _), c in curves.items() if tuple(work) == key[:2] and same_bytes(c, curve)), None)
        if one is None:
            curves[key] = curve
        else:
            one.world_sizes += (key[2],)
    return curves


def tenths(rows: list[dict[str, str]]) -> list[tuple[float, float, float]]:
    """The last step of each tenth of a run, the mean return of training episodes that ended in it, and its time."""
    last, found = int(rows[-1]["global_step"]), []
    for k in range(10):
        part = [row for row in rows if last * k / 10 < int(row["global_step"]) <= last * (k + 1) / 10]
        ended = [row for row in part if row["charts/episodic_return"]]
        if not ended:
            raise BadInput(f"no training episode ended in tenth {k + 1} of a run of {last} transitions")
        returns, episodes = ([float(row[f"charts/{x}"]) for row in ended] for x in ("episodic_return", "episodes"))
        found.append(
            (float(part[-1]["global_step"]), np.average(returns, weights=episodes), float(part[-1]["time/wall"]))
        )
    return found


def same_bytes(one: Curve, other: Curve) -> bool:
    """Whether all seeds' rows are the same, `time/` aside."""

    def content(curve: Curve) -> list:
        return [[[x for n, x in row.items() if not n.startswith("time/")] for row in rows] for rows in curve.rows]

    return one.seeds == other.seeds and content(one) == content(other)


def interquartile_mean(x: np.ndarray, axis: int) -> np.ndarray:
    """Mean of the middle half, the runs at its edges counted in part (so that of two or three all count)."""
    x = np.moveaxis(np.sort(x, axis), axis, 0)
    n = len(x)
    edges = np.arange(n + 1)
    weights = np.clip(np.minimum(edges[1:], 0.75 * n) - np.maximum(edges[:-1], 0.25 * n), 0, 1)
    return np.tensordot(weights / weights.sum(), x, 1)


def bootstrap(groups: list[np.ndarray], seed: int = 0) -> np.ndarray:
    """Interquartile means over all of `groups`, (k, ...) each, seeds resampled within a group: (resamples, ...)."""
    sizes = np.array([len(group) for group in groups])
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)  # of each seed's group
    drawn = np.random.default_rng(seed).integers(np.repeat(sizes, sizes), size=(RESAMPLES, sizes.sum()))
    return interquartile_mean(np.concatenate(groups)[starts + drawn], 1)


def interval(groups: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of the interquartile mean over all of `groups`, (k, ...) each."""
    low, high = np.percentile(bootstrap(groups), [2.5, 97.5], axis=0)
    return low, high


def difference(ones: list[np.ndarray], others: list[np.ndarray]) -> tuple[float, float, float]:
    """Interquartile mean over all of `ones` less that of `others`, (k,) each, and its 95 % interval."""
    middle = interquartile_mean(np.concatenate(ones), 0) - interquartile_mean(np.concatenate(others), 0)
    low, high = np.percentile(bootstrap(ones) - bootstrap(others, seed=1), [2.5, 97.5])
    return middle, low, high


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each script and variant, whichever of them are there."""
    others = iter(OTHERS * len(COLOURS))
    return {name: COLOURS.get(name) or next(others) for name in sorted(names)}


def panels(curves: dict[tuple[str, int], Curve]) -> list[list[tuple[str, Curve]]]:
    """Curves by (script, world size) -> what is drawn together: one world size, and no more lines than can be told."""
    found = []
    for size in sorted({size for _, size in curves}):
        chosen = [(script, curve) for (script, n), curve in sorted(curves.items()) if n == size]
        found += [chosen[at : at + LINES] for at in range(0, len(chosen), LINES)]
    return found


def limits(curves: Collection[Curve], low: float | None, references: list[float]) -> tuple[float, float]:
    """The returns that an axis shows: from a random agent's, where it is known, or from not far below, to the highest.

    Otherwise from the lowest hundredth on: a curve may come from far below.
    """
    middles = np.concatenate([interquartile_mean(curve.returns, 0) for curve in curves])
    top = max([*references, *(interval([curve.returns])[1].max() for curve in curves)])
    bottom = np.percentile(middles, 1) if low is None or low > top else low
    if low is not None and low > middles.min() > low - (top - low) / 2:
        bottom = middles.min()
    margin = 0.04 * (top - bottom) or 1.0
    return bottom - margin, top + margin


def draw_environment(env_id: str, curves: dict[tuple[str, int], Curve], suite: Suite, path: Path) -> None:
    """Returns against transitions, and against wall time; a row of axes for each number of processes."""
    rows, colour = panels(curves), colours({script for script, _ in curves})
    figure = Figure(figsize=(10, 0.4 + 2.6 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), 2, squeeze=False, sharex="col")
    known = {script: suite.references.get((f"{script}.py", env_id)) for script in colour}
    known = {script: reference for script, reference in known.items() if reference}
    bottom, top = limits(curves.values(), suite.scales.get(env_id, (None,))[0], [x[0] for x in known.values()])
    for row, chosen in zip(axes, rows, strict=True):
        processes = min((curve.processes for _, curve in chosen), key=len)  # in the title; others stand in the legend
        for script, curve in chosen:
            middle, (low, high) = interquartile_mean(curve.returns, 0), interval([curve.returns])
            seeds = len(curve.returns)
            label = f"{script} ({seeds} seed{'s' * (seeds > 1)}, {curve.steps[-1] / 1e6:.2g} M)"
            label += f",\n{curve.processes}" if curve.processes != processes else ""
            for axis, x in zip(row, (curve.steps / 1000, curve.minutes.mean(0)), strict=True):
                axis.plot(x, middle, label=label, color=colour[script], linewidth=1.5)
                axis.fill_between(x, low, high, color=colour[script], alpha=0.15, linewidth=0)
        references = sorted((known[script][0], known[script][2:], script) for script, _ in chosen if script in known)
        while references:  # those that would be printed over each other share a line
            near = [x for x in references if x[0] - references[0][0] < 0.02 * (top - bottom)]
            references = references[len(near) :]
            shown = colour[near[0][2]] if len(near) == 1 else "grey"
            label = "\n".join(
                f"{script}: {value:g} at {steps / 1e6:g} M,\n{source}" for value, (steps, source), script in near
            )
            row[0].axhline(np.mean([x[0] for x in near]), color=shown, linestyle="--", linewidth=1, label=label)
        below = [script for script, curve in chosen if interquartile_mean(curve.returns, 0).min() < bottom]
        kind = "training" if chosen[0][1].training else "evaluation"
        row[0].set(ylabel=f"return of {kind} episodes", title=f"{env_id}, {processes}", ylim=(bottom, top))
        row[1].set(title="the same against time", ylim=(bottom, top))
        if below:
            place = {"xy": (0.99, 0.02), "xycoords": "axes fraction", "ha": "right"}
            row[0].annotate(f"from below the axis: {', '.join(below)}", **place, fontsize=7)
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}  # beside the axes
        row[1].legend(*row[0].get_legend_handles_labels(), **place, frameon=False, fontsize=7)
    axes[-1][0].set(xlabel="environment transitions (thousands)")
    axes[-1][1].set(xlabel="wall time (minutes), other runs beside it")
    make_room(figure, axes, 2.6)
    for axis in axes.flat:
        axis.grid(alpha=0.3, linewidth=0.5)
    save(figure, path)


def by_script(curves: dict[tuple[str, str, int], Curve]) -> dict[str, dict[str, Curve]]:
    """Script and variant -> environment -> the curve of its fewest processes."""
    found: dict[str, dict[str, Curve]] = defaultdict(dict)
    for (env_id, script, _), curve in sorted(curves.items(), reverse=True):
        found[script][env_id] = curve
    return dict(sorted(found.items()))


def aggregates(curves: dict[tuple[str, str, int], Curve], suite: Suite) -> dict[tuple[str, ...], dict]:
    """Sets of at least two environments with a scale -> script -> environment -> the curve of its fewest processes."""
    sets: dict[tuple[str, ...], dict] = defaultdict(dict)
    for script, by_env in by_script(curves).items():
        with_scale = {env_id: curve for env_id, curve in by_env.items() if env_id in suite.scales}
        if len(with_scale) > 1:
            sets[tuple(sorted(with_scale))][script] = with_scale
    return sets


def draw_aggregate(sets: dict[tuple[str, ...], dict], suite: Suite, path: Path) -> None:
    """Scaled returns along the budget, and their profile at its end: a row of axes for each set of environments."""
    figure = Figure(figsize=(10.5, 0.4 + 2.8 * len(sets)), layout="constrained")
    axes = figure.subplots(len(sets), 2, squeeze=False, sharex="col")
    colour, levels = colours({script for scripts in sets.values() for script in scripts}), np.linspace(0, 1.2, 121)
    for row, (environments, scripts) in zip(axes, sets.items(), strict=True):
        for script, by_env in scripts.items():
            scaled, final = [], []
            part = np.linspace(max(curve.steps[0] / curve.steps[-1] for curve in by_env.values()), 1, 51)
            for env_id, curve in by_env.items():
                x = suite.scaled(env_id, curve.returns)
                final.append(suite.scaled(env_id, curve.final))
                scaled.append(np.array([np.interp(part * curve.steps[-1], curve.steps, run) for run in x]))
            middle, (low, high) = interquartile_mean(np.concatenate(scaled), 0), interval(scaled)
            budgets = "\n".join(f" {name}: {by_env[name].steps[-1] / 1e6:.2g} M" for name in environments)
            below = ", from below the axis" if middle.min() < BOTTOM else ""
            row[0].plot(100 * part, middle, color=colour[script], label=f"{script}{below}, budgets:\n{budgets}")
            row[0].fill_between(100 * part, low, high, color=colour[script], alpha=0.15, linewidth=0)
            row[1].plot(levels, [np.mean([(runs > x).mean() for runs in final]) for x in levels], color=colour[script])
        row[0].set(ylabel="scaled return, interquartile mean", ylim=(BOTTOM, 1.2))
        row[1].set(ylabel="runs above it (part)", ylim=(-0.03, 1.03))
        ends = [f"{name}: {suite.scales[name][0]:g} and {suite.scales[name][1]:g}" for name in environments]
        handles, labels = row[0].get_legend_handles_labels()
        title = "0 and 1 are returns of\n" + "\n".join(ends)
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "alignment": "left"}  # beside the axes
        row[1].legend(handles, labels, title=title, **place, frameon=False, fontsize=7, title_fontsize=7)
    axes[-1][0].set(xlabel="part of the budget (%)")
    axes[-1][1].set(xlabel="scaled final return")
    make_room(figure, axes, 2.8)
    for axis in axes.flat:
        axis.grid(alpha=0.3, linewidth=0.5)
    figure.suptitle(f"suite {suite.name}", fontsize=9)
    save(figure, path)


def make_room(figure: Figure, axes: np.ndarray, least: float) -> None:
    """Give all rows the height, of at least so many inches, that the longest legend beside them needs."""
    legends = [row[1].get_legend() for row in axes]
    lines = [
        sum(text.get_text().count("\n") + 1 for text in [*legend.get_texts(), legend.get_title()]) for legend in legends
    ]
    figure.set_figheight(0.4 + len(axes) * max(least, 0.6 + 0.14 * max(lines)))


def save(figure: matplotlib.figure.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def agreement(one: Curve, many: Curve) -> str:
    """Of two world sizes: whether runs of equal seeds are the same bytes, `time/` aside.

    If not, up to which transition what is recorded of them agrees to 1e-3, and whether intervals overlap.
    """

    def by_step(rows: list[dict]) -> dict[tuple[int, bool], dict]:
        """Rows by their step, of which one may have two: with an evaluation, and without."""
        return {(int(x["global_step"]), x["eval/episodic_return"] == ""): x for x in rows}

    agreed, exact = [], True
    for seed, rows in zip(many.seeds, many.rows, strict=True):
        if seed in one.seeds:
            last, rows, of_one = 0, by_step(rows), by_step(one.rows[one.seeds.index(seed)])
            exact = exact and not any(step for step, _ in rows.keys() ^ of_one.keys())  # 0: the score before learning
            for place in (place for place in of_one if place in rows):  # either may have ended before the other
                cells = [(x, rows[place][name]) for name, x in of_one[place].items() if not name.startswith("time/")]
                exact = exact and all(x == y for x, y in cells)
                if not all(gap(x, y) <= AGREE for x, y in cells):
                    break
                last = place[0]
            agreed.append(f"{last:,}")
    if agreed and exact:
        return "the same bytes"
    until = " and ".join(agreed)
    if min(len(one.seeds), len(many.seeds)) == 1:  # an interval of one run is a point
        return until
    (low1, high1), (low2, high2) = interval([one.final]), interval([many.final])
    return f"{until}; {'overlap' if low1 <= high2 and low2 <= high1 else 'apart'}"


def table(curves: dict[tuple[str, str, int], Curve], suite: Suite) -> str:
    """The suite's results in Markdown."""
    head = "| environment | script | processes | final return | 95 % interval | reference | transitions | minutes |"
    lines = [f"{head} as one process up to; intervals |", "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for (env_id, script, world_size), curve in sorted(curves.items()):
        final, (low, high) = curve.final, interval([curve.final])
        several = len(final) > 1
        digits = 2 if abs(final).max() <= 1 else 1
        deviation = f" ± {final.std(ddof=1):.{digits}f}" if several else ""
        reference = suite.references.get((f"{script}.py", env_id))  # none for a variant
        cells = [env_id, script.replace("_ddp", ""), " and ".join(map(str, curve.world_sizes))]
        cells += [f"{final.mean():.{digits}f}{deviation} ({len(final)})"]
        cells += [f"{low:.{digits}f} to {high:.{digits}f}" if several else ""]
        cells.append(
            "{} ± {} at {:.2f} M, {}".format(*reference[:2], reference[2] / 1e6, reference[3]) if reference else ""
        )
        cells += [f"{curve.steps[-1] / 1e6:.2f} M", f"{curve.minutes[:, -1].mean():.1f}"]
        one = curves.get((env_id, script, 1))
        if len(curve.world_sizes) > 1:
            cells.append("the same bytes")
        else:
            cells.append(agreement(one, curve) if world_size > 1 and one else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def differences(curves: dict[tuple[str, str, int], Curve], suite: Suite, against: str) -> str:
    """The others' final returns less those of `against` in Markdown: on each task, and over the tasks with a scale."""
    recorded_of = by_script(curves)
    if against not in recorded_of:
        raise BadInput(f"--against {against}: nothing of it is recorded; name one of {', '.join(recorded_of)}.")
    base = recorded_of.pop(against)
    if not recorded_of:
        return f"No other script or variant is recorded to compare with {against}.\n"
    head = f"| script | environment | final return (interquartile mean) less {against.replace('_ddp', '')}'s |"
    lines = [f"{head} 95 % interval |", "| --- | --- | --- | --- |"]
    for script, by_env in recorded_of.items():
        shared = sorted(by_env.keys() & base)
        rows = [(env_id, [by_env[env_id].final], [base[env_id].final]) for env_id in shared]
        with_scale = [env_id for env_id in shared if env_id in suite.scales]
        if len(with_scale) > 1:
            ones = [suite.scaled(env_id, by_env[env_id].final) for env_id in with_scale]
            others = [suite.scaled(env_id, base[env_id].final) for env_id in with_scale]
            rows.append((f"all {len(with_scale)}, scaled", ones, others))
        for name, ones, others in rows:
            middle, low, high = difference(ones, others)
            digits = 2 if max(abs(low), abs(high)) <= 1 else 1
            middle, low, high = (f"{x:+.{digits}f}" for x in (middle, low, high))
            lines.append(f"| {script.replace('_ddp', '')} | {name} | {middle} | {low} to {high} |")
    return "\n".join(lines) + "\n"


def with_table(readme: Path, name: str, text: str) -> str:
    """A file's text with what is between the two markers of `name` replaced; `BadInput` where it has none."""
    start, end = f"<!-- {name} -->\n", f"<!-- end {name} -->\n"
    try:
        before, rest = readme.read_text().split(start)
        return before + start + text + end + rest.split(end)[1]
    except (OSError, ValueError, IndexError) as error:
        needed = f"a file with a line <!-- {name} --> and, after it, a line <!-- end {name} -->"
        raise BadInput(f"--readme {readme}: must be {needed}.") from error


def main(args: Args) -> None:
    suite = suite_of(args.suite)
    results, figures = args.results or suite.home / "results", args.figures or suite.home / "figures"
    curves = load(suite, results)
    if not curves:
        raise BadInput(f"--results {results}: nothing of {suite.name} is there; python -m benchmark.run {args.suite}")
    if args.readme is not None:
        with_table(args.readme, suite.name, "")  # before anything is drawn
    text = table(curves, suite)
    if args.against is not None:
        text += "\n" + differences(curves, suite, args.against)
    names, folder = [], figures / suite.name
    for env_id in sorted({env_id for env_id, _, _ in curves}):
        chosen = {(script, size): curve for (env, script, size), curve in curves.items() if env == env_id}
        names.append(env_id.replace("/", "-").replace(":", "-"))
        draw_environment(env_id, chosen, suite, folder / f"{names[-1]}.svg")
    if sets := aggregates(curves, suite):
        names.append("all")
        draw_aggregate(sets, suite, folder / "all.svg")
    records = {run: recorded(run, results) for run in runs_of(suite)}
    commits = Counter(str(about["commit"])[:7] for about in records.values() if about)
    listed = ", ".join(f"{commit} ({n})" for commit, n in sorted(commits.items()))
    text += f"\nCommits whose code recorded these curves (how many): {listed}.\n"
    begun = {run.work for run, about in records.items() if about}
    if missing := [run.name for run, about in records.items() if not about and run.work in begun]:
        text += f"\nWithout these seeds, which are not recorded: {', '.join(missing)}.\n"
    print(text)
    print(f"drew {len(curves)} curves of {suite.name} in {folder}")
    if args.readme is not None:
        base = os.path.relpath(folder, args.readme.parent)
        text += "".join(f"\n![{name}]({base}/{name}.svg)\n" for name in names)
        args.readme.write_text(with_table(args.readme, suite.name, text))
        print(f"renewed its table in {args.readme}")


if __name__ == "__main__":
    or_say_why(lambda: main(tyro.cli(Args)))
