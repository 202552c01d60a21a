"""Starts scripts as a user does, in processes of their own, and reads what they leave."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).parent.parent


@dataclass
class Run:
    code: int
    out: str
    err: str
    dir: Path

    @property
    def rows(self) -> list[dict[str, str]]:
        """The rows of metrics.csv without the timing columns."""
        with open(self.dir / "metrics.csv", newline="") as file:
            return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]

    def column(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.rows if row[name]]

    @property
    def model(self) -> dict:
        return torch.load(self.dir / "model.pt", weights_only=True)


def command(script: str, world_size: int, flags: str, launcher: bool = False) -> list[str]:
    python = [sys.executable]
    if world_size > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    program = [str(ROOT / "tests" / "launcher.py"), script] if launcher else [str(ROOT / script)]
    return [*python, *program, *flags.split()]


def start(
    script: str, world_size: int, flags: str, launcher: bool = False, cwd: Path | None = None, **env: str
) -> subprocess.Popen:
    base = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command(script, world_size, flags, launcher),
        env={k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP")} | base | env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, run_dir: Path, timeout: float = 240) -> Run:
    """Wait; on a timeout end what is left, by its id, and raise."""
    family = descendants(process)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for member in [*family, *descendants(process)]:
            if member.is_running():
                member.send_signal(signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{out}\n{err}") from None
    return Run(process.returncode, out, err, run_dir)


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        me = psutil.Process(process.pid)
        return [me, *me.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def run(
    script: str, world_size: int, flags: str, run_dir: Path, dtype: str = "float64", within: float = 240, **env: str
) -> Run:
    """Run to the end through the launcher and expect success."""
    flags = f"{flags} --timeout 60 --run-dir {run_dir}"
    process = start(script, world_size, flags, True, LOCKSTEP_DTYPE=dtype, **env)
    result = finish(process, run_dir, within)
    assert result.code == 0, result.err
    return result


def assert_close(a: Run, b: Run, relative: float = 1e-9, absolute: float = 1e-11) -> None:
    """Every metric column and every parameter within |a - b| <= relative max(|a|, |b|) + absolute."""
    assert len(a.rows) == len(b.rows)
    for number, (row_a, row_b) in enumerate(zip(a.rows, b.rows, strict=True)):
        for name, x in row_a.items():
            y = row_b[name]
            assert (x == "") == (y == ""), f"row {number}: {name}: {x!r} against {y!r}"
            if x:
                x, y = float(x), float(y)
                assert abs(x - y) <= relative * max(abs(x), abs(y)) + absolute, f"row {number}: {name}: {x} against {y}"
    tensors_a, tensors_b = dict(flat(a.model)), dict(flat(b.model))
    assert tensors_a.keys() == tensors_b.keys() and tensors_a
    for name, x in tensors_a.items():
        y = tensors_b[name]
        gap = (x - y).abs() - relative * torch.maximum(x.abs(), y.abs())
        assert (gap <= absolute).all(), f"{name}: off by {gap.max()}"


def flat(tree: dict, prefix: str = ""):
    for name, value in tree.items():
        if isinstance(value, dict) and name != "args":
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
