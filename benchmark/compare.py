"""Says whether two runs are the same bytes; if not, where they part, by how much, and what differs in their records.

    python -m benchmark.compare runs/a runs/b
    python -m benchmark.compare runs/a benchmark/results/classic/CartPole-v1__ppo_ddp__w1__s1.csv

Compared are the columns of metrics.csv that both have, `time/` aside, and the tensors of model.pt where both have one.
A first row at step 0 that only one has, the score before learning, is left out. Ends with code 0 for the same bytes, 1
for others, 2 where there is nothing to compare.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmark.run import or_say_why
from common.arguments import MAY_CHANGE_ON_RESUME, parse
from common.logger import DECIDES_BYTES
from common.processes import BadInput

# in records, what no number depends on
UNLIKE = {"command", "seconds", *(f"args.{name}" for name in MAY_CHANGE_ON_RESUME)}
AGREE = 1e-3  # relative


@dataclass
class Curve:
    path: Path
    rows: list[dict[str, str]]
    torn: bool  # whether its last line is cut off
    record: dict[str, Any]
    model: Path | None


def load(path: Path) -> Curve:
    """A run directory, or a recorded curve. Raises `BadInput` with the path where it is neither, or damaged."""
    if path.is_dir():
        table, record, model = path / "metrics.csv", path / "config.json", path / "model.pt"
    else:
        table = path if path.suffix == ".csv" else path.with_name(f"{path.name}.csv")
        record, model = table.with_suffix(".json"), None
    try:
        text = table.read_text()
        about = json.loads(record.read_text()) if record.exists() else {}
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: is no run directory and no recorded curve ({error}).") from error
    whole, newline, rest = text.rpartition("\n")
    rows = list(csv.DictReader(io.StringIO(whole + newline)))
    if not rows or "global_step" not in rows[0]:
        raise BadInput(f"{table}: holds no whole row.")
    model = model if model is not None and model.exists() else None
    return Curve(path, rows, bool(rest), with_arguments(about, table), model)


def with_arguments(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """A record with all arguments: a recorded curve's are read from its command, by the script of that name."""
    if "args" in record or "command" not in record:
        return record
    words = shlex.split(record["command"])
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    try:
        args = parse(importlib.import_module(words[at].removesuffix(".py")).Args, words[at + 1 :])
    except (ImportError, SystemExit, BadInput) as error:
        print(f"{path}: its arguments cannot be read ({error})")
        return record
    return record | {"script": words[at].removesuffix(".py"), "args": json.loads(json.dumps(vars(args)))}


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, by dotted names."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def gap(a: str, b: str) -> float:
    """How far two cells are apart, relative to the larger; infinite where only one is blank."""
    if a == b:
        return 0.0
    if "" in (a, b):
        return float("inf")
    x, y = float(a), float(b)
    return abs(x - y) / max(abs(x), abs(y), 1e-300)


def compare_rows(a: Curve, b: Curve) -> Iterator[str]:
    """What is not the same, in lines."""
    rows = [a.rows, b.rows]
    starts = [part[0]["global_step"] == "0" for part in rows]
    if starts[0] != starts[1]:
        rows = [part[start:] for part, start in zip(rows, starts, strict=True)]
    if not all(rows):
        yield "one of them holds no row after step 0"
        return
    names = [name for name in rows[0][0] if name in rows[1][0] and not name.startswith("time/")]
    parted, agreed, step = False, True, "0"
    for number, (x, y) in enumerate(zip(*rows, strict=False), 1):
        different = [name for name in names if x[name] != y[name]]
        if different and not parted:
            parted, name = True, different[0]
            cells = " against ".join(row[name] or "nothing" for row in (x, y))
            by = "" if "" in (x[name], y[name]) else f", {gap(x[name], y[name]):.1e} of it"
            rest = f", and {len(different) - 1} more columns" if different[1:] else ""
            yield f"they part in row {number}, step {int(x['global_step']):,}: {name} is {cells}{by}{rest}"
        if agreed and any(not gap(x[name], y[name]) <= AGREE for name in different):  # NaN agrees with nothing
            agreed = False
            where = f"up to step {int(step):,}" if number > 1 else "in no row"
            yield f"all columns agree to {AGREE:g} {where}"
        step = x["global_step"]
    if parted and agreed:
        yield f"all columns agree to {AGREE:g} as far as both go"
    if len(rows[0]) != len(rows[1]):
        ends = [f"{c.path} ends at step {int(part[-1]['global_step']):,}" for c, part in zip((a, b), rows, strict=True)]
        yield ", ".join(ends) + f" ({len(rows[0])} rows against {len(rows[1])})"
    for curve in (a, b):
        if curve.torn:
            yield f"{curve.path}: its last line is cut off"


def compare_models(a: Path, b: Path) -> Iterator[str]:
    """What is not the same, in lines."""
    tensors = [
        {name: x for name, x in flat(torch.load(path, map_location="cpu", weights_only=True)) if torch.is_tensor(x)}
        for path in (a, b)
    ]
    names, off = dict.fromkeys([*tensors[0], *tensors[1]]), {}
    for name in names:
        x, y = (part.get(name) for part in tensors)
        kinds = [None if t is None else (str(t.dtype), *t.shape) for t in (x, y)]
        if kinds[0] != kinds[1]:
            yield f"model.pt: {name} is {kinds[0]} against {kinds[1]}"
        elif x.numpy().tobytes() != y.numpy().tobytes():
            off[name] = ((x.double() - y.double()).abs().max() / y.double().abs().max()).item()
    if off:
        most = max(off, key=off.get)
        by = f"by {off[most]:.1e} of its largest number"
        yield f"model.pt: {len(off)} tensors of {len(names)} differ, most {most}, {by}"


def compare_records(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """What differs, in lines, of what both say."""
    both = a.keys() & b.keys()
    x, y = (dict(flat({name: value for name, value in record.items() if name in both})) for record in (a, b))
    for name in dict.fromkeys([*x, *y]):
        if name not in UNLIKE and x.get(name) != y.get(name):
            yield f"{name}: {x.get(name)} against {y.get(name)}"


def why_not_the_same(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What of processor, versions, threads and processes differs, of what both records say, so that bytes differ."""
    names = [name for name in DECIDES_BYTES if name not in ("sources", "versions")]  # not code: that need not
    x, y = ({name: r[name] for name in names if name in r} | r.get("versions", {}) for r in (a, b))
    found = [f"{name} {x[name]} against {y[name]}" for name in x if name in y and x[name] != y[name]]
    sizes = [r.get("world_size") for r in (a, b)]
    shards = [r.get("args", {}).get("shards") for r in (a, b)]
    if shards[0] != shards[1]:
        found.append(f"--shards {shards[0]} against {shards[1]}")
    elif None not in sizes and sizes[0] != sizes[1] and a.get("args", {}).get("shards") is None:
        found.append(f"{sizes[0]} against {sizes[1]} processes without --shards")
    return found


@dataclass
class Args:
    run: tyro.conf.Positional[Path]
    """a run directory, or a recorded curve"""
    other: tyro.conf.Positional[Path]
    """the one to compare it with"""


def main(args: Args) -> int:
    a, b = load(args.run), load(args.other)
    found = list(compare_rows(a, b))
    models = a.model is not None and b.model is not None
    if models:
        found += compare_models(a.model, b.model)
    for curve in (a, b):
        if curve.path.is_dir() and curve.model is None and curve.record.get("args", {}).get("save_model"):
            found.append(f"{curve.path}: has no model.pt, so the run has not ended")
    if not found:
        rows = f"{len(b.rows):,} rows, to step {int(b.rows[-1]['global_step']):,}"
        print(f"the same bytes: {rows}{', and the tensors of model.pt' if models else ''}")
    elif reasons := why_not_the_same(a.record, b.record):
        print(f"not to be expected to have the same bytes: {', '.join(reasons)}")
    if alone := sorted(a.rows[0].keys() ^ b.rows[0].keys()):
        print(f"not compared, since only one has it: {', '.join(alone)}")
    print(*found, sep="\n", end="\n" if found else "")
    differences = list(compare_records(a.record, b.record))
    if differences:
        recorded = not (args.run.is_dir() and args.other.is_dir())
        defaults = " (flags that a recorded curve's command does not name: today's defaults)" if recorded else ""
        print(f"their records differ{defaults}:", *differences, sep="\n    ")
    elif a.record and b.record:
        print("their records do not differ in what numbers depend on")
    return 1 if found else 0


if __name__ == "__main__":
    or_say_why(lambda: main(tyro.cli(Args)))
