"""The ranks, their process group, and the packed collective in which they meet.

One `World` serves torchrun and plain `python` (a process group of one). At every boundary of a run (iteration,
auxiliary epoch, evaluation) all ranks call `World.gather`; it also shares stop requests and feeds the watchdog.
"""

from __future__ import annotations

import datetime
import gc
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from common.errors import BadInput, Fault, explained, peer_ended, require, require_divisible
from common.memory import SLOT, SharedMemory, share_memory
from common.watchdog import GRACE, Watchdog, end_with_parent


class World:
    """The ranks of this run, as the launcher's variables say (without them, one rank). Starts nothing.

    `rank` is global; `cores` are this rank's. `sharded`: whether --shards is set; `num_shards`: without it, the world
    size; `shards`: the numbers of this rank's. `uses_ddp`: whether losses need DDP; `nccl`: whether NCCL carries
    gradients. `stop`: 0, or the number of a signal that some rank had received by the last `gather`.
    Raises `BadInput` (--shards) unless `shards` and the world size are powers of two and `shards` is not less.
    """

    def __init__(self, cuda: bool = True, shards: int | None = None) -> None:
        missing = [x for x in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if x not in os.environ]
        if missing and ("RANK" in os.environ or "WORLD_SIZE" in os.environ):
            raise BadInput(f"RANK or WORLD_SIZE is set, but not {' and '.join(missing)}: unset it, or use torchrun.")
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        anywhere = set(range(os.cpu_count() or 1))
        self.affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else anywhere
        self.cores = max(1, len(self.affinity) // self.local_world_size)
        self.device = torch.device("cpu")
        if cuda and torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
        if shards is not None:
            power, size = 2 ** (shards.bit_length() - 1), self.world_size
            require(power == shards, "--shards", shards, f"a power of two, such as {power} or {2 * power}")
            require(size.bit_count() == 1, "--shards", shards, f"left out on {size} processes, no power of two")
            require_divisible("--shards", shards, size, "the number of processes")
        self.nccl = False
        self.sharded, self.num_shards = shards is not None, shards or self.world_size
        self.shards = range(self.num_shards)[self.local_slice(self.num_shards)]
        self.uses_ddp = self.world_size > 1
        self.stop, self.watchdog = 0, Watchdog(self.rank)
        self.memory: SharedMemory | None = None  # with the other ranks
        self.carrier = ""  # how ranks exchange numbers

    def local_slice(self, num: int) -> slice:
        """Which of `num` things over all ranks (environments, shards) this rank holds."""
        return slice(self.rank * num // self.world_size, (self.rank + 1) * num // self.world_size)

    @contextmanager
    def process_group(self, timeout: float, shared_memory: bool = True) -> Iterator[None]:
        """Open the process group; turn SIGINT and SIGTERM into requests (`stop`); start the watchdog.

        `timeout`: seconds between two boundaries after which this rank prints its stack and ends with code 1.
        `shared_memory`: whether ranks may exchange numbers through it (common/memory.py). Inside this block, use DDP
        only in a function, so that its modules are gone when the block ends: gloo may abort the process if a DDP
        reducer outlives its group.
        """
        destroys = True
        with self.watchdog.watching(timeout):
            if "TORCHELASTIC_RUN_ID" in os.environ:
                end_with_parent(signal.SIGTERM)  # no rank outlives a killed torchrun
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # even one that is gone already
                address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                try:
                    socket.create_connection(address, timeout).close()
                except ConnectionRefusedError as error:
                    raise Fault("torchrun, which started this, is gone.") from error
            try:
                self._init_process_group(timeout, shared_memory)
                self.watchdog.grace = GRACE
                yield
            except BaseException as error:
                destroys = not self.nccl or self.world_size == 1  # NCCL's waits for all, and one may be gone
                if not explained(error):
                    get_error_handler().record_exception(error)  # first failing rank first, for torchrun's report
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
            limit = 0.8 * timeout  # before the watchdog's
            deadline = time.monotonic() + limit
            try:
                store, *_ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=limit)))
                store = dist.PrefixStore(attempt_name(store, self.rank, self.world_size, deadline), store)
            except (dist.DistError, TimeoutError) as error:
                if peer_ended(error) or time.monotonic() < deadline - 1.0:
                    raise
                hint = "where nodes come and go, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
                raise Fault(f"the ranks did not meet within --timeout {timeout:g} seconds; {hint}.") from error
        # NCCL needs a GPU for each rank; gloo carries the small collectives of CPU tensors in any case
        on_gpu = self.device.type == "cuda"
        gpu = f"{socket.gethostname()}/{torch.cuda.get_device_properties(self.device).uuid}" if on_gpu else ""
        store.set(f"gpu/{self.rank}", gpu)
        gpus = [store.get(f"gpu/{rank}") for rank in range(self.world_size)]
        self.nccl = all(gpus) and len(set(gpus)) == self.world_size
        if self.nccl:  # sums in one order: those of NVLink switches have none
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        backend = "cpu:gloo,cuda:nccl" if self.nccl else "gloo"
        limit = datetime.timedelta(seconds=2 * timeout)  # the watchdog, which shows stacks, comes first
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=limit)
        refusal = "it is off" if not shared_memory else "there is a GPU" if on_gpu else ""
        if self.world_size > 1:
            self.memory, reason = share_memory(store, self.rank, self.world_size, self.affinity, refusal)
            self.carrier = "shared memory" if self.memory else f"sockets ({reason})"
        if on_gpu:
            torch.cuda.set_device(self.device)
            # graphs are not recorded on the default stream, and what DDP does stays on the stream that it is made on
            torch.cuda.set_stream(torch.cuda.Stream())
            torch.backends.cudnn.deterministic = True
            torch.set_float32_matmul_precision("highest")  # whatever the environment says; convolutions may take TF32
            torch.backends.cudnn.allow_tf32 = True
            from torch._inductor import config  # slow to import

            config.deterministic = True  # sums of --compile in one order

    def gather(self, values: np.ndarray | list[float]) -> np.ndarray:
        """Gather one packed vector from every rank: K numbers -> (world_size, K) float64, the same on all ranks.

        Sum over axis 0 for sums and counts, take the maximum for times. Also sets `stop`, and feeds the watchdog.
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
        """Gather K numbers of every shard: K for each of this rank's -> (num_shards, K) float64, in order."""
        return self.gather(values).reshape(self.num_shards, -1)  # collective

    def reduce(self, sums: list[dict[str, float]], maxima: dict[str, float]) -> dict[str, float]:
        """By name, in one collective: totals over all shards of `sums` (a dict for each shard here), and `maxima`."""
        parts = [x for part in sums for x in part.values()]
        table = self.gather([*parts, *maxima.values()])  # collective
        totals = table[:, : len(parts)].reshape(self.num_shards, -1).sum(0), table[:, len(parts) :].max(0)
        return dict(zip([*sums[0], *maxima], map(float, np.concatenate(totals)), strict=True))


def attempt_name(store: dist.Store, rank: int, world_size: int, deadline: float) -> str:
    """Meet the other ranks in a launcher's store -> a name that they share and no earlier attempt had.

    A launcher keeps its store over restarts, with the keys of attempts that died, and launchers of several nodes may
    count restarts differently. So each rank calls with a random word of its own, and rank 0 answers the latest call
    of each rank with its own word, the name, until all have taken it.
    Raises `TimeoutError` if they do not meet before `deadline`, a time of `time.monotonic`.
    """
    word = secrets.token_hex(8)

    def wait(key: str, until: float) -> None:  # the store's own prints complaints, and hangs at the end
        while not store.check([key]) and time.monotonic() < until:
            time.sleep(0.01)
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank}: no {key}")

    if rank != 0:
        store.set(f"call/{rank}", word)
        wait(f"answer/{word}", deadline)
        name = store.get(f"answer/{word}").decode()
        store.set(f"{name}/{rank}", "")
        return name
    for other in range(1, world_size):
        wait(f"call/{other}", deadline)
        while not store.check([f"{word}/{other}"]):
            store.set(f"answer/{store.get(f'call/{other}').decode()}", word)
            wait(f"{word}/{other}", time.monotonic() + 0.1)
    return word
