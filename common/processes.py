"""The processes of a run: who they are, how they exchange numbers, how they stop and end.

A process is called a *rank*. torchrun starts several; plain `python` is a run of one.
"""

import ctypes
import datetime
import faulthandler
import gc
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from threadpoolctl import threadpool_limits
from torch.distributed.rendezvous import rendezvous

from common.memory import SLOT, SharedMemory, share_memory

GRACE = 10.0  # seconds from a stop request to the next boundary; after them the process ends at once


class BadInput(ValueError):
    """A setting that cannot work. `launch` prints it in one line and ends with code 2."""


class Stopped(SystemExit):
    """The end of a run by a signal."""


def one_line(text: object) -> str:
    """A text, or an error's, on one line of at most 300 characters."""
    return " ".join(str(text).split())[:300]


def container_limit(name: str) -> float:
    """What a container's `cpu.max` (cores) or `memory.max` (bytes) says; infinity without a limit."""
    with suppress(OSError, ValueError), open(f"/sys/fs/cgroup/{name}") as file:
        limit, *period = file.read().split()
        return int(limit) / int(*period or [1])
    return math.inf


class World:
    """This rank among the ranks of a run.

    There are `num_shards` groups of environments, one for each rank without --shards; `shards`: this rank's.
    `cores`: of this rank. `stop`: 0, or the signal that some rank had received by the last `gather`.
    Raises `BadInput` for a number of shards that cannot be shared out.
    """

    def __init__(self, cuda: bool = True, shards: int | None = None) -> None:
        launched = os.environ if os.environ.get("RANK") and os.environ.get("WORLD_SIZE") else {}
        self.rank = int(launched.get("RANK", 0))
        self.world_size = int(launched.get("WORLD_SIZE", 1))
        self.local_world_size = int(launched.get("LOCAL_WORLD_SIZE", 1))
        self.sharded = shards is not None
        self.num_shards = shards or self.world_size
        powers = self.num_shards.bit_count() == 1 and self.world_size.bit_count() == 1
        if self.sharded and not (powers and self.num_shards >= self.world_size):
            needed = f"a power of two, such as {2 ** (max(shards, self.world_size) - 1).bit_length()}"
            raise BadInput(f"--shards {shards}: must be {needed}; so must the number of processes, at most that.")
        self.shards = range(self.num_shards)[self.local_slice(self.num_shards)]
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self.cores = max(1, int(min(cores, container_limit("cpu.max"))) // self.local_world_size)
        self.device = torch.device("cpu")
        self.nccl = False  # it needs a GPU for each rank
        if cuda and torch.cuda.is_available():
            self.device = torch.device("cuda", int(launched.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
            self.nccl = self.local_world_size <= torch.cuda.device_count()
        # on GPUs gradients stay out of DDP's buckets: kernels may round by address
        self.ddp_options = {"gradient_as_bucket_view": self.device.type == "cpu"}
        self.memory: SharedMemory | None = None  # with the other ranks
        self.pid = os.getpid()
        self.signum = 0  # the first signal that this rank received
        self.stop = 0
        self.store: dist.Store | None = None
        self.progress = 0  # of this rank, in no unit
        self.closing = threading.Event()

    def local_slice(self, num: int) -> slice:
        """Which of `num` things over all ranks (environments, shards) this rank holds."""
        return slice(self.rank * num // self.world_size, (self.rank + 1) * num // self.world_size)

    @contextmanager
    def open(self, timeout: float) -> Iterator[None]:
        """Open the process group; make SIGINT and SIGTERM requests (`stop`); end the run if nothing moves.

        `timeout`: seconds without progress on any rank after which all print their stacks and end with code 1.
        DDP modules must be gone when the block ends: gloo may abort the process if they outlive their group.
        """
        faulthandler.dump_traceback_later(timeout, exit=True, file=2)
        watch = threading.Thread(target=self._watch, args=(timeout,), daemon=True)
        watch.start()
        before = {}
        if threading.current_thread() is threading.main_thread():  # Python takes signals nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, self._request)
        failed = True
        try:
            self._init_process_group(timeout)  # collective
            yield
            failed = False
        finally:
            traceback.clear_frames(sys.exc_info()[2])  # they hold DDP modules
            ends = failed and self.world_size > 1  # then torchrun's SIGTERM is not to cut its end short
            for number, handler in before.items() if not ends else ():
                signal.signal(number, handler)
            self.closing.set()
            watch.join(timeout=2.0)
            faulthandler.cancel_dump_traceback_later()
            gc.collect()
            # NCCL's end waits for all ranks, and after a failure one may be gone
            if dist.is_initialized() and not (failed and self.nccl):
                dist.destroy_process_group()
        if self.stop:
            raise Stopped(128 + self.stop)

    def _init_process_group(self, timeout: float) -> None:
        store = dist.HashStore()
        if self.world_size > 1:
            # torch says who is missing before the watchdog does
            store, *_ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=0.8 * timeout)))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # earlier attempts' keys are there
                store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.deterministic = True
            torch.set_float32_matmul_precision("highest")  # whatever the environment says
            torch.backends.cudnn.allow_tf32 = True
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # the sums of NVLink switches have no fixed order
        backend = "cpu:gloo,cuda:nccl" if self.nccl else "gloo"
        limit = datetime.timedelta(days=1)  # the watchdog, which shows stacks, comes first
        dist.init_process_group(backend, store=store, timeout=limit, rank=self.rank, world_size=self.world_size)
        if self.world_size > 1 and self.device.type == "cpu":
            self.memory = share_memory(self.rank, self.gather_objects)  # collective
        self.store = store

    def _watch(self, timeout: float) -> None:
        """Tell other ranks of this one's progress; after any rank's, give all `timeout` seconds more.

        So a rank may wait for long for another that goes on. `faulthandler` ends a process whatever it hangs in,
        also where this thread cannot run.
        """
        told = known = 0
        while not self.closing.wait(min(1.0, timeout / 10)):
            if self.signum and time.monotonic() > self.signal_time + GRACE:
                end_now(128 + self.signum)
            news = self.progress - told
            told += news
            with suppress(RuntimeError):  # the store's process has ended, and this one will
                total = self.store.add("progress", news) if self.store else 0
                if total > known:
                    faulthandler.dump_traceback_later(timeout, exit=True, file=2)
                known = total

    def _request(self, signum: int, _: Any) -> None:
        """Note the first signal; end at a second one, or if no boundary is reached."""
        if os.getpid() != self.pid:  # an environment's process, forked from this one
            end_now(128 + signum)
        if not self.signum:
            self.signal_time = time.monotonic()
            self.signum = signum
        elif time.monotonic() > self.signal_time + 0.5:  # launchers may deliver one request twice
            end_now(128 + signum)

    def feed(self) -> None:
        """Say that this rank makes progress."""
        self.progress += 1

    def gather(self, values: np.ndarray | list[float]) -> np.ndarray:
        """K numbers of every rank -> (world_size, K) float64, equal on all ranks. Shares stop requests too."""
        local = np.append(np.asarray(values, dtype=np.float64), self.signum)
        table = self.rows(torch.from_numpy(local)).numpy().copy()  # collective
        self.feed()
        self.stop = int(table[:, -1].max())
        return table[:, :-1]

    def rows(self, own: torch.Tensor) -> torch.Tensor:
        """own (n,) of every rank -> (world_size, n), valid until the next call."""
        if self.world_size == 1:
            return own[None]
        if self.memory and own.nbytes <= SLOT:
            table = self.memory.gather(own.view(torch.uint8).numpy())  # collective
            return torch.from_numpy(table).view(own.dtype)
        sent = own if self.nccl else own.cpu()  # gloo takes no others
        table = sent.new_empty(self.world_size, len(sent))
        dist.all_gather(list(table), sent)  # collective
        return table.to(own.device)

    def gather_shards(self, values: list[np.ndarray] | list[list[float]]) -> np.ndarray:
        """K numbers for each of this rank's shards -> (num_shards, K) float64, in the order of shards."""
        return self.gather(values).reshape(self.num_shards, -1)  # collective

    def gather_objects(self, value: Any) -> list[Any]:
        """A small Python object of every rank, in the order of ranks."""
        table = [None] * self.world_size
        dist.all_gather_object(table, value)  # collective
        self.feed()
        return table


def end_now(code: int) -> None:
    """End this process and its children without unwinding. Rows are flushed: nothing is lost."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(code)  # no finalisation, in which a thread of torch's that calls Python may abort


def end_with_parent() -> None:
    """Let this process be killed once its parent is gone, however that ended (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the generators of `random` and `numpy.random` as they were."""
    states = (random.getstate(), np.random.get_state())
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def process_kept() -> Iterator[None]:
    """Set up this process for a run; afterwards its generators, threads and number formats are as before."""
    with suppress(AttributeError, OSError, TypeError):  # glibc keeps freed blocks: new pages cost time
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(-3, 2**30):  # M_MMAP_THRESHOLD
            mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    # Adam's averages of dead units come below 1e-38, where processors are slow
    torch.set_flush_denormal(True)
    # one thread for numpy's BLAS: products split over threads round differently
    with generators_kept(), torch.random.fork_rng(devices=[]), threadpool_limits(1, "blas"):
        try:
            yield
        finally:
            torch.set_flush_denormal(False)
            torch.set_float32_matmul_precision(precision)
            torch.set_num_threads(threads)
