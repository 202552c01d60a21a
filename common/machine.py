"""How the machine is set: threads, and what becomes of freed memory."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch
from threadpoolctl import threadpool_limits

from common.distributed import World

M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
M_MMAP_THRESHOLD = -3


def set_threads(threads: int, parallel: bool, world: World) -> None:
    """Set torch's number of threads. 0: one for each core if the work is `parallel`, otherwise one.

    With `--shards`, 0 is one thread: convolutions that are split over threads round differently. So do
    the products of numpy's BLAS, which always gets one thread.
    """
    torch.set_num_threads(threads or (world.cores if parallel and not world.sharded else 1))
    threadpool_limits(1, "blas")


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks of up to 1 GB: new pages cost a tenth of an update on images."""
    with suppress(AttributeError, OSError, TypeError):  # there is no glibc
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(M_MMAP_THRESHOLD, 2**30):  # before glibc 2.35 this is too much
            mallopt(M_TRIM_THRESHOLD, 2**30)
