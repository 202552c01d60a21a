"""The ranks, their process group, and the packed collective in which they meet.

One `World` serves torchrun and plain `python` (a process group of one). At every boundary of a run (iteration,
evaluation, row) all ranks call `World.gather`; it also shares stop requests and feeds the watchdog.
"""

from __future__ import annotations

import datetime
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from common.errors import Fault, require, require_divisible
from common.memory import SLOT, SharedMemory, share_memory
from common.watchdog import GRACE, Watchdog, end_with_parent


class World:
    """The ranks of this run, as the launcher's variables say (without them, one rank). Starts nothing.

    `rank` is global; `cores` are this rank's. `sharded`: whether --shards is set; `num_shards`: without it, the
    world size; `shards`: the numbers of this rank's. `uses_ddp`: whether losses need DDP (with `ddp_options`);
    `nccl`: whether NCCL carries gradients. `stop`: 0, or the number of a signal that some rank had received by
    the last `gather`.
    Raises `BadInput` (--shards) unless `shards` and the world size are powers of two and `shards` is not less.
    """

    def __init__(self, cuda: bool = True, shards: int | None = None) -> None:
        launched = os.environ if "RANK" in os.environ else {}
        self.rank = int(launched.get("RANK", 0))
        self.local_rank = int(launched.get("LOCAL_RANK", 0))
        self.world_size = int(launched.get("WORLD_SIZE", 1))
        self.local_world_size = int(launched.get("LOCAL_WORLD_SIZE", 1))
        self.affinity = os.sched_getaffinity(0) if sys.platform == "linux" else set(range(os.cpu_count()))
        self.cores = max(1, len(self.affinity) // self.local_world_size)
        self.device = torch.device("cpu")
        self.nccl = False  # it needs a GPU for each rank
        if cuda and torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            self.nccl = self.local_world_size <= torch.cuda.device_count()
        if shards is not None:
            power = 2 ** (shards.bit_length() - 1)
            size = self.world_size
            require(power == shards, "--shards", shards, f"a power of two, such as {power} or {2 * power}")
            require(size.bit_count() == 1, "--shards", shards, f"left out on {size} processes, no power of two")
            require_divisible("--shards", shards, size, "the number of processes")
        self.sharded = shards is not None
        self.num_shards = shards or self.world_size
        self.shards = range(self.num_shards)[self.local_slice(self.num_shards)]
        self.uses_ddp = self.world_size > 1
        # on GPUs gradients stay out of DDP's buckets: kernels may round sums otherwise at another address
        self.ddp_options = {"gradient_as_bucket_view": self.device.type == "cpu"}
        self.stop = 0
        self.watchdog = Watchdog(self.rank)
        self.memory: SharedMemory | None = None  # with the other ranks
        self.carrier = ""  # how ranks exchange numbers

    def local_slice(self, num: int) -> slice:
        """Which of `num` things over all ranks (environments, shards) this rank holds."""
        return slice(self.rank * num // self.world_size, (self.rank + 1) * num // self.world_size)

    @contextmanager
    def process_group(self, timeout: float, shared_memory: bool = True) -> Iterator[None]:
        """Open the process group; turn SIGINT and SIGTERM into requests (`stop`); start the watchdog.

        `timeout`: seconds without progress after which this rank prints its stacks and ends with code 1.
        `shared_memory`: whether ranks may exchange numbers through it (common/memory.py). Inside this block, use
        DDP only in a function, so that its modules are gone when the block ends: gloo may abort the process if
        a DDP reducer outlives its group.
        """
        destroys = True
        with self.watchdog.watching(timeout):
            if "TORCHELASTIC_RUN_ID" in os.environ:
                end_with_parent(signal.SIGTERM)  # no rank outlives a killed torchrun
            try:
                self._init_process_group(timeout, shared_memory)  # collective
                self.watchdog.grace = GRACE
                yield
            except BaseException as error:
                destroys = not self.nccl or self.world_size == 1  # NCCL's waits for all, and one may be gone
                traceback.clear_frames(error.__traceback__)  # they hold the DDP modules
                raise
            finally:
                gc.collect()
                if self.memory:
                    self.memory.leave()
                if dist.is_initialized() and destroys:
                    dist.destroy_process_group()
        if self.stop:
            sys.exit(128 + self.stop)

    def _init_process_group(self, timeout: float, shared_memory: bool) -> None:
        store = dist.HashStore()
        if "RANK" in os.environ:
            launcher_stores = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            if launcher_stores:
                require_launcher(timeout)
            limit = datetime.timedelta(seconds=0.8 * timeout)  # torch says who is missing before the watchdog
            store, *_ = next(rendezvous("env://", timeout=limit))
            if launcher_stores:  # it holds the keys of earlier attempts
                store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.deterministic = True
            torch.set_float32_matmul_precision("highest")  # whatever the environment says; convolutions may take TF32
            torch.backends.cudnn.allow_tf32 = True
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # the sums of NVLink switches have no fixed order
        backend = "cpu:gloo,cuda:nccl" if self.nccl else "gloo"
        limit = datetime.timedelta(seconds=2 * timeout)  # the watchdog, which shows stacks, comes first
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=limit)
        if self.world_size > 1:
            fault = "it is off" if not shared_memory else "there is a GPU" if on_gpu else ""
            self.memory, reason = share_memory(self.rank, self.world_size, self.affinity, fault)  # collective
            self.carrier = "shared memory" if self.memory else f"sockets ({reason})"

    def gather(self, values: np.ndarray | list[float]) -> np.ndarray:
        """Gather K numbers from every rank -> (world_size, K) float64, the same on all ranks.

        Also sets `stop`, and feeds the watchdog.
        """
        local = np.append(np.asarray(values, dtype=np.float64), self.watchdog.signum)
        table = local[None]
        if self.memory and local.nbytes <= SLOT:
            table = self.memory.gather(local).copy()  # collective
        elif self.world_size > 1:
            packed = torch.empty(self.world_size, len(local), dtype=torch.float64)
            dist.all_gather(list(packed), torch.from_numpy(local))  # collective
            table = packed.numpy()
        self.watchdog.feed()
        self.stop = int(table[:, -1].max())
        return table[:, :-1]

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather a small Python object from every rank, in the order of ranks. Also feeds the watchdog."""
        table = [None] * self.world_size
        dist.all_gather_object(table, value)  # collective
        self.watchdog.feed()
        return table

    def gather_shards(self, values: list[np.ndarray] | list[list[float]]) -> np.ndarray:
        """Gather K numbers for each of this rank's shards -> (num_shards, K) float64, in order."""
        return self.gather(values).reshape(self.num_shards, -1)  # collective

    def reduce(self, sums: list[dict[str, float]], maxima: dict[str, float]) -> dict[str, float]:
        """In one collective, by name: totals over all shards (`sums`: a dict for each here), and `maxima`."""
        parts = [x for part in sums for x in part.values()]
        table = self.gather([*parts, *maxima.values()])  # collective
        totals = table[:, : len(parts)].reshape(self.num_shards, -1).sum(0), table[:, len(parts) :].max(0)
        return dict(zip([*sums[0], *maxima], map(float, np.concatenate(totals)), strict=True))


def require_launcher(timeout: float) -> None:
    """Raise `Fault` if the torchrun that started this process is gone: its signal can then not come."""
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout).close()
    except ConnectionRefusedError as error:
        raise Fault("torchrun, which started this, is gone.") from error
