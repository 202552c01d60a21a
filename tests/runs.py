"""Starts scripts as a user does, in processes of their own, and reads what they leave."""

import contextlib
import csv
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

ROOT = Path(__file__).parent.parent
PATIENCE = 240.0  # seconds for what takes a few on a quiet machine: a test waits for events, and this is what a hang is
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["preload"])


@dataclass
class Run:
    code: int
    out: str
    err: str
    dir: Path

    @property
    def timed_rows(self) -> list[dict[str, str]]:
        """The rows of metrics.csv."""
        with open(self.dir / "metrics.csv", newline="") as file:
            return [*csv.DictReader(file)]

    @property
    def rows(self) -> list[dict[str, str]]:
        """The same without the timing columns."""
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in self.timed_rows]

    def column(self, name: str) -> list[float]:
        return [float(row[name]) for row in self.rows if row[name]]

    @property
    def model(self) -> dict:
        return torch.load(self.dir / "model.pt", weights_only=True)


def command(script: str, world_size: int, flags: str, launched: bool = False) -> list[str]:
    python = [sys.executable]
    if world_size > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    program = [str(ROOT / "tests" / "launcher.py"), script] if launched else [str(ROOT / script)]
    return [*python, *program, *flags.split()]


def start(
    script: str, world_size: int, flags: str, launched: bool = False, cwd: Path | None = None, **env: str
) -> subprocess.Popen:
    base = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    base["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # tests marked gpu have one
    return subprocess.Popen(
        command(script, world_size, flags, launched),
        env={k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP")} | base | env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, run_dir: Path, timeout: float = PATIENCE) -> Run:
    """Wait; on a timeout end what is left, by its id, and raise."""
    family = descendants(process)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        send([*family, *descendants(process)], signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{out}\n{err}") from None
    return Run(process.returncode, out, err, run_dir)


def wait_until(happened, process: subprocess.Popen) -> None:
    """Wait for an event while `process` runs; on none, end it and raise with what it printed."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        if time.monotonic() > deadline or process.poll() is not None:
            process.kill()
            raise AssertionError(f"it did not happen: {process.communicate()}")
        time.sleep(0.02)


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    """The process, first, and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        me = psutil.Process(process.pid)
        return [me, *me.children(recursive=True)]
    return []


def send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def run(script: str, world_size: int, flags: str, run_dir: Path, dtype: str = "float64", code: int = 0, **env):
    """Run to the end, through the launcher, each rank with one thread: tests share the cores. Forked with imports done.

    `code`: with which all ranks are to end; where one dies of SIGKILL, the others are then ended by it.
    """
    import launcher  # here, because programs that only start and finish runs have no path to it

    words, run_dir = [script, *f"--timeout 200 --num-threads 1 {flags} --run-dir {run_dir}".split()], Path(run_dir)
    env, output = {"LOCKSTEP_DTYPE": dtype} | env, Path(f"{run_dir}.out")
    text = fork(launcher.main, (words,), world_size, output, env, code)
    return Run(code, text, text, run_dir)


def train(module, run_dir: Path, **flags) -> Run:
    """Run a script in this process, on the CPU and, unless flags say otherwise, in one thread, without evaluations."""
    module.main(module.Args(**{"cuda": False, "eval_every": 0, "num_threads": 1} | flags, run_dir=str(run_dir)))
    return Run(0, "", "", run_dir)


def fork(
    target: Callable, arguments: tuple, world_size: int, output: Path, env: Mapping[str, str], code: int = 0
) -> str:
    """Call `target(*arguments)` on some ranks, which end with `code` -> what they printed, also in `output`."""
    ranks = [FORKS.Process(target=forked, args=(target, arguments, env | x, output)) for x in places(world_size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + PATIENCE
    if code == -signal.SIGKILL:
        multiprocessing.connection.wait([process.sentinel for process in ranks], PATIENCE)
        for process in ranks:
            process.kill()
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in late:
        ranks[rank].kill()
    text = output.read_text()
    assert not late, f"ranks {late} still running after {PATIENCE} s:\n{text}"
    assert [process.exitcode for process in ranks] == [code] * world_size, text
    return text


def places(world_size: int) -> list[dict[str, str]]:
    if world_size == 1:
        return [{}]
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def forked(target: Callable, arguments: tuple, env: Mapping[str, str], output: Path) -> None:
    """In a process of its own, with what is printed appended to a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= env
    np.random.seed()  # as in a process that nobody forked, as the next line
    multiprocessing.set_start_method("fork", force=True)
    target(*arguments)


def edited(name: str, text: str, *edits: tuple[str, str]) -> str:
    """The text of a file after (old, new) replacements; raises where one of them changes nothing."""
    for old, new in edits:
        before, text = text, text.replace(old, new)
        if text == before:
            raise LookupError(f"{name}: there is no {old!r} to replace with {new!r}.")
    return text


def block_of(page: str, part: str) -> str:
    """The indented block of a page of docs/ that has `part`, as it would stand in a file."""
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    (block,) = (block for block in blocks if part in block)
    return textwrap.dedent(block).strip() + "\n"


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


def same_run(a: Run, b: Run) -> str:
    """Where metrics.csv (timing aside) or a tensor of model.pt has other bytes; empty where none has."""
    for number, (row, other) in enumerate(zip(a.rows, b.rows, strict=False)):
        if names := [name for name in row if row[name] != other.get(name)]:
            return f"part in row {number}, {names[0]}: {row[names[0]]} against {other.get(names[0])}"
    if len(a.rows) != len(b.rows):
        return f"part: {len(a.rows)} rows against {len(b.rows)}"
    tensors, others = dict(flat(a.model)), dict(flat(b.model))
    if tensors.keys() != others.keys():
        return f"part in the names of tensors: {tensors.keys() ^ others.keys()}"
    unequal = [name for name, x in tensors.items() if x.numpy().tobytes() != others[name].numpy().tobytes()]
    return f"part in {unequal[0]}" if unequal else ""


def flat(tree: dict, prefix: str = ""):
    for name, value in tree.items():
        if isinstance(value, dict) and name != "args":
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
