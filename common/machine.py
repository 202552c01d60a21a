"""What this machine has, and whether that is enough."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from threadpoolctl import threadpool_limits

from common.distributed import World
from common.errors import BadInput


def free_memory() -> float:
    """Bytes of main memory that can be had; infinite where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def require_memory(flag: str, value: object, nbytes: float, world: World, smaller: str = "a smaller one") -> None:
    """Raise `BadInput` unless `nbytes` in each rank of this machine fit its free memory."""
    needed, free = nbytes * world.local_world_size / 1e9, free_memory() / 1e9
    if needed > free:
        fault = f"needs {needed:.1f} GB on this machine, of which {free:.1f} GB are free"
        raise BadInput(f"{flag} {value}: {fault}; {smaller} fits.")


def set_threads(threads: int, parallel: bool, world: World) -> None:
    """Set how many threads torch takes; 0: as many as there are cores where work is `parallel`, otherwise one.

    With `--shards` the default is one: convolutions round otherwise where they are split over more threads, and so do
    numpy's products, whose BLAS always takes one.
    """
    torch.set_num_threads(threads or (world.cores if parallel and not world.sharded else 1))
    threadpool_limits(1, "blas")


def require_compiler(world: World) -> None:
    """Raise `BadInput` (--compile) where torch would not find its C++ compiler; its own answer is 80 lines long."""
    if world.device.type != "cpu":
        return
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    try:
        subprocess.run([compiler, "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        needed = f"a C++ compiler that runs: install {compiler}, or leave it off (--no-compile)"
        raise BadInput(f"--compile: needs {needed}.") from error
