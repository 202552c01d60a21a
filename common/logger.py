"""The run directory, the console line and wandb: rank 0 writes, elsewhere the same calls do nothing."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import gymnasium
import numpy as np
import torch

from common.arguments import BadInput
from common.distributed import World


class Logger:
    """Writes `config.json` and `metrics.csv`, prints progress, and sends the same rows to wandb if `args.track`.

    `file`: the script; `columns`: the header of metrics.csv after `global_step`. Raises `BadInput` for a directory
    that holds a run or cannot be written (--run-dir), and where wandb is missing or not logged in (--track).
    """

    def __init__(self, args: Any, file: str, columns: tuple[str, ...], world: World) -> None:
        self.enabled = world.rank == 0
        if not self.enabled:
            return
        self.columns = ("global_step", *columns)
        self.total, self.start, self.last_line = args.total_timesteps, time.perf_counter(), 0.0
        self.latest: dict[str, float] = {}
        script = Path(file).stem
        env_id = args.env_id.replace("/", "-").replace(":", "-")
        default = f"runs/{env_id}__{script}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        self.dir = Path(args.run_dir or default)
        if (self.dir / "metrics.csv").exists() or (self.dir / "config.json").exists():
            raise BadInput(f"--run-dir {self.dir}: holds a run already; name a new directory.")
        config = {"script": script, "args": dataclasses.asdict(args)} | environment_record(world)
        existed = self.dir.exists()
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self.file = open(self.dir / "metrics.csv", "x", newline="")
        except OSError as error:
            raise BadInput(f"--run-dir {self.dir}: cannot be written ({error.strerror}); name another.") from error
        try:
            self.wandb = self._start_wandb(args, config) if args.track else None
        except BaseException:
            os.remove(self.file.name)
            if not existed:
                self.dir.rmdir()
            raise
        (self.dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        print(f"writing to {self.dir}", flush=True)
        self.writer = csv.writer(self.file, lineterminator="\n")
        self.writer.writerow(self.columns)
        self.file.flush()

    def _start_wandb(self, args: Any, config: dict) -> Any:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise BadInput("--track: needs wandb: pip install wandb") from error
        try:
            run = wandb.init(
                project=args.wandb_project_name, entity=args.wandb_entity, name=self.dir.name, config=config
            )
        except wandb.errors.UsageError as error:
            raise BadInput("--track: not logged in to wandb; run `wandb login`, or set WANDB_MODE=offline.") from error
        run.define_metric("*", step_metric="global_step")
        return run

    def log(self, row: dict[str, float | int]) -> None:
        """Write one row, flushed; `row` maps columns to numbers, `global_step` among them; the rest stays blank."""
        if not self.enabled:
            return
        unknown = row.keys() - set(self.columns)
        assert not unknown, f"columns that the header lacks: {unknown}"
        self.writer.writerow([repr(plain(row[column])) if column in row else "" for column in self.columns])
        self.file.flush()
        if self.wandb is not None:
            sps = {"charts/SPS": row["time/SPS"]} if "time/SPS" in row else {}
            self.wandb.log({name: plain(value) for name, value in row.items()} | sps)
        self.latest |= row
        self._print("eval/episodic_return" in row)

    def _print(self, evaluation: bool) -> None:
        terminal, now = sys.stdout.isatty(), time.perf_counter()
        if not evaluation and now - self.last_line < (0.2 if terminal else 10.0):
            return
        step, sps = self.latest["global_step"], self.latest.get("time/SPS", 0.0)
        parts = [f"{step:,} of {self.total:,} ({step / self.total:.0%})", f"{sps:,.0f} SPS"]
        if "charts/episodic_return" in self.latest:
            parts.append(f"return {self.latest['charts/episodic_return']:.1f}")
        if "eval/episodic_return" in self.latest:
            parts.append(f"evaluation {self.latest['eval/episodic_return']:.1f}")
        if sps:
            left = max(0, int((self.total - step) / sps))
            parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        line = "  ".join(parts)
        print(f"\r{line:<100}" if terminal else line, end="" if terminal else "\n", flush=True)
        self.last_line = now

    def note(self, text: str) -> None:
        """Print one plain line."""
        if self.enabled:
            print(text, flush=True)

    def save(self, model: dict[str, Any]) -> None:
        """Write `model`, tensors (moved to the CPU), numbers and strings, to model.pt; `weights_only=True` loads it."""
        if self.enabled:
            torch.save(on_cpu(model), self.dir / "model.pt")

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.enabled:
            return
        self.file.close()
        if sys.stdout.isatty():
            print()
        if self.wandb is not None:
            self.wandb.finish(exit_code=0 if kind is None else 1)


def on_cpu(tree: Any) -> Any:
    """A nest of dicts with its tensors on the CPU."""
    if isinstance(tree, dict):
        return {name: on_cpu(value) for name, value in tree.items()}
    return tree.cpu() if isinstance(tree, torch.Tensor) else tree


def plain(value: Any) -> int | float:
    """A numpy or torch scalar as Python's own, so that `repr` gives the shortest digits that read back equal."""
    return value.item() if hasattr(value, "item") else value


def environment_record(world: World) -> dict[str, Any]:
    """What a rerun would have to know: world size, command, versions, processor, and the commit if there is one."""
    try:
        git = ["git", "-C", os.path.dirname(os.path.abspath(sys.argv[0])), "rev-parse", "HEAD"]
        answer = subprocess.run(git, capture_output=True, text=True)
        commit = answer.stdout.strip() if answer.returncode == 0 else None
    except OSError:
        commit = None
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        models = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        cpu = models[0] if models else cpu
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions["gymnasium"] = gymnasium.__version__
    for simulator in ("ale-py", "box2d", "minatar", "mujoco"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[simulator] = metadata.version(simulator)
    return {
        "world_size": world.world_size,
        "command": shlex.join(sys.argv),
        "versions": versions,
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else cpu,
        "commit": commit,
    }
