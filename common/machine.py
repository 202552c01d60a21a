"""What this machine has, whether that is enough, and how it is set."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from contextlib import suppress

import torch
from threadpoolctl import threadpool_limits

from common.distributed import World
from common.errors import BadInput

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def free_memory() -> float:
    """Bytes of main memory that are free; infinite if the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def require_memory(flag: str, value: object, nbytes: float, world: World, smaller: str = "a smaller one") -> None:
    """Raise `BadInput` unless `nbytes` for each rank of this machine fit into its free memory."""
    needed, free = nbytes * world.local_world_size / 1e9, free_memory() / 1e9
    if needed > free:
        fault = f"needs {needed:.1f} GB on this machine, of which {free:.1f} GB are free"
        raise BadInput(f"{flag} {value}: {fault}; {smaller} fits.")


def set_threads(threads: int, parallel: bool, world: World) -> None:
    """Set torch's number of threads. 0: one for each core if the work is `parallel`, otherwise one.

    With `--shards`, 0 is one thread: convolutions that are split over threads round differently. So do the products of
    numpy's BLAS, which always gets one thread.
    """
    torch.set_num_threads(threads or (world.cores if parallel and not world.sharded else 1))
    threadpool_limits(1, "blas")


def keep_freed_memory() -> None:
    """Have the C library keep blocks of up to 1 GB that are freed, for the next ones. Only glibc can.

    Otherwise they come from the system page by page each time: a tenth of the time of an update on images.
    """
    with suppress(AttributeError, OSError, TypeError):  # there is no glibc
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(M_MMAP_THRESHOLD, 2**30):  # before glibc 2.35 this is too much
            mallopt(M_TRIM_THRESHOLD, 2**30)


def flush_denormals(wanted: bool) -> None:
    """Have this thread, and threads that it starts later, take numbers nearer to 0 than 1e-38 (float64: 1e-308) as 0.

    Processors take some twenty times as long to compute with them. Where a unit is dead, Adam's averages of its
    gradients shrink to such numbers and stay there: on Pong, those of most weights. What is learned stays the same.
    """
    torch.set_flush_denormal(wanted)


def require_compiler(world: World) -> None:
    """Raise `BadInput` (--compile) if torch would not find its compiler; its own error is 80 lines long.

    On a CPU that is one of C++, on a GPU Triton's, of C.
    """
    if world.device.type == "cpu":
        compilers = [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")]
    else:
        compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    for compiler in compilers:
        with suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([compiler, "--version"], capture_output=True, check=True)
            return
    needed = f"a compiler that runs: install {' or '.join(compilers)}, or leave it off (--no-compile)"
    raise BadInput(f"--compile: needs {needed}.")
