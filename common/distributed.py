"""The ranks, their process group, the packed collective, the check that they are equal, and a clean end.

One `World` serves torchrun and plain `python` (a process group of one). Every boundary of a run (iteration, auxiliary
epoch, evaluation) goes through `World.gather`, which also carries stop requests and feeds the watchdog.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import hashlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from common.arguments import BadInput, Fault

GRACE = 10.0  # seconds from a stop request to the next boundary, after which the process ends at once


class Desync(Fault):
    """The ranks hold different numbers where they must be bit-identical."""


class Diverged(Fault):
    """A number that all ranks share is not finite."""


class World:
    """The ranks of this run, read from the launcher's variables (a world of one without them); starts nothing.

    Attributes: `rank` (global), `local_rank`, `world_size`, `device`, and `stop`: 0, or the signal number that some
    rank had received by the last `gather`, equal on all ranks.
    """

    def __init__(self, cuda: bool = True) -> None:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing and not set(names[:2]) <= set(missing):
            raise BadInput(f"RANK or WORLD_SIZE is set, but not {' and '.join(missing)}: unset it, or use torchrun.")
        self.rank = int(os.environ.get("RANK", 0))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.cores = max(1, cores // self.local_world_size)  # of this rank
        self.device = torch.device("cpu")
        if cuda and torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
        self.stop = 0

    def here(self, num: int) -> slice:
        """The contiguous part of `num` global places (environments) that this rank holds."""
        return slice(self.rank * num // self.world_size, (self.rank + 1) * num // self.world_size)

    @contextmanager
    def process_group(self, timeout: float) -> Iterator[None]:
        """Open the process group; make SIGINT and SIGTERM requests (`stop`); watch that boundaries are reached.

        `timeout`: seconds between two boundaries after which this rank prints its stack and ends with code 1.
        What uses DDP must run in a function called inside this block, so that its modules are gone when the block ends:
        gloo may abort the process if a DDP reducer outlives its group.
        """
        self._timeout, self._signum, self._alive, self._armed = timeout, 0, time.monotonic(), -math.inf
        self._grace = 1.0  # until the ranks have met, a request ends the process almost at once
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        previous = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        # a thread, because a main thread that waits inside a collective runs no Python signal handler
        watch = threading.Thread(target=self._watch, args=(wake_read,), daemon=True)
        watch.start()
        if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: no rank outlives a killed torchrun
        try:
            self._init_process_group(timeout)
            self._grace = GRACE
            yield
        except BaseException as error:
            if not isinstance(error, BadInput | Fault) and not out_of_memory(error) and not peer_ended(error):
                get_error_handler().record_exception(error)  # first failing rank first, for torchrun's report
            traceback.clear_frames(error.__traceback__)  # they hold the DDP modules
            raise
        finally:
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous)
            faulthandler.cancel_dump_traceback_later()
            os.close(wake_write)  # ends the thread
            watch.join()
        if self.stop:
            sys.exit(128 + self.stop)

    def _init_process_group(self, timeout: float) -> None:
        if "RANK" in os.environ:
            store, rank, world_size = next(rendezvous("env://"))
            # the launcher keeps one store over `--max-restarts`: the keys of an attempt that died must not be met again
            store = dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        else:
            store, rank, world_size = dist.HashStore(), 0, 1
        # NCCL needs a GPU for each rank; gloo carries the small collectives of CPU tensors in any case
        uuid = torch.cuda.get_device_properties(self.device).uuid if self.device.type == "cuda" else "none"
        store.set(f"gpu/{rank}", f"{socket.gethostname()}/{uuid}")
        gpus = [store.get(f"gpu/{r}").decode() for r in range(world_size)]
        everywhere = len(set(gpus)) == world_size and not any(gpu.endswith("/none") for gpu in gpus)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if everywhere else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=2 * timeout),  # the watchdog, which shows stacks, comes first
        )
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.deterministic = True

    def _watch(self, wake_read: int) -> None:
        """Thread: note the first signal; end the process on a second one, after `GRACE`, or after `timeout`."""
        asked = None
        while True:
            deadline = self._alive + self._timeout if asked is None else asked + self._grace
            if connection.wait([wake_read], max(0.0, deadline - time.monotonic())):
                received = os.read(wake_read, 1)
                if not received:
                    os.close(wake_read)
                    return
                if received[0] not in (signal.SIGINT, signal.SIGTERM):
                    continue
                if asked is None:
                    self._signum, asked = received[0], time.monotonic()
                elif time.monotonic() - asked > 0.5:  # launchers may deliver one request twice
                    end_now(128 + self._signum)
            elif asked is not None and time.monotonic() > asked + self._grace:
                end_now(128 + self._signum)
            elif asked is None and time.monotonic() > self._alive + self._timeout:
                note = f"rank {self.rank}: no boundary reached for --timeout {self._timeout:g} seconds; it stands at"
                print(note, file=sys.stderr, flush=True)
                faulthandler.dump_traceback()
                end_now(1)

    def gather(self, values: np.ndarray | torch.Tensor | list[float]) -> np.ndarray:
        """Gather one packed vector from every rank: K numbers -> (world_size, K) float64, the same on all ranks.

        Sum over axis 0 for sums and counts, take the maximum for times. Also agrees on `stop` and feeds the watchdog.
        """
        values = values.cpu() if isinstance(values, torch.Tensor) else values
        local = np.append(np.asarray(values, dtype=np.float64), self._signum)
        table = local[None]
        if self.world_size > 1:
            packed = torch.empty(self.world_size, len(local), dtype=torch.float64)
            dist.all_gather(list(packed), torch.from_numpy(local))  # collective
            table = packed.numpy()
        self._alive = time.monotonic()
        if self._alive > self._armed + 1.0:  # in C, for the case that a library hangs while it holds the interpreter
            self._armed = self._alive
            faulthandler.dump_traceback_later(self._timeout + GRACE, exit=True)
        self.stop = int(table[:, -1].max())
        return table[:, :-1]

    def reduce(self, sums: dict[str, float], maxima: dict[str, float]) -> dict[str, float]:
        """One packed collective: the sum over ranks of each of `sums`, the largest of each of `maxima`, by name."""
        table = self.gather([*sums.values(), *maxima.values()])  # collective
        totals = [*table[:, : len(sums)].sum(0), *table[:, len(sums) :].max(0)]
        return dict(zip([*sums, *maxima], map(float, totals), strict=True))

    def check_equal(self, step: int, **state: object) -> None:
        """Raise `Desync` naming the first tensor, rank and step where `state` is not bit-identical to rank 0's.

        `state`: modules, optimisers, generators, nests of tensors, arrays and numbers.
        """
        digests = {
            n: hashlib.blake2b(b, digest_size=8).digest() for name, v in state.items() for n, b in leaves(name, v)
        }
        table: list[dict[str, bytes]] = [{} for _ in range(self.world_size)]
        dist.all_gather_object(table, digests)  # collective
        for rank, others in enumerate(table):
            for name in table[0] | others:
                if others.get(name) != table[0].get(name):
                    raise Desync(f"step {step}: {name} on rank {rank} differs from rank 0's.")


def leaves(name: str, value: object) -> Iterator[tuple[str, bytes]]:
    """The (dotted name, bytes) pairs of a nest of modules, optimisers, generators, tensors, arrays and numbers."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    elif isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(f"{name}.{index}", item)
    elif isinstance(value, torch.Tensor):
        yield name, value.detach().cpu().contiguous().numpy().tobytes()
    else:
        yield name, value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()


def peer_ended(error: BaseException) -> bool:
    """True for the error of a collective whose other end is gone: the fault is another rank's."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    return several and isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def out_of_memory(error: BaseException) -> bool:
    """True for numpy's error, and torch's on a GPU and on the CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def end_now(code: int) -> None:
    """End this process and its children without unwinding. Rows already written are flushed, so nothing is lost."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it
            stream.flush()
    os._exit(code)


def launch(main: Callable[[Any], None], parse: Callable[[], Any]) -> None:
    """Run `main(parse())` and end with its exit code: 0 done, 2 bad input, 1 a fault, 128 + signal.

    Parsing speaks on rank 0 alone; a traceback comes from the rank that failed.
    """
    rank = int(os.environ.get("RANK", 0))
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed
            setattr(sys, name, open(os.devnull, "w"))
    try:
        with ExitStack() as stack:
            if rank != 0:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect_stdout(nowhere))
                stack.enter_context(redirect_stderr(nowhere))
            args = parse()
        gc.freeze()  # what the imports made stays: not walking it at each collection starts a tenth of a second earlier
        main(args)
        return
    except (BadInput, Fault) as error:  # mostly raised alike by all ranks: one of them says it
        code, agreed = 2 if isinstance(error, BadInput) else 1, f"rank {rank}: {error}"
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
    except SystemExit as error:  # tyro's, or the end after a signal
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        agreed = f"rank {rank}: ended with code {code}"
    except BaseException as error:
        code, agreed = 130 if isinstance(error, KeyboardInterrupt) else 1, ""
        if out_of_memory(error):
            reason = " ".join(str(error).split())
            print(f"error: rank {rank} is out of memory ({reason}); lower the sizes.", file=sys.stderr, flush=True)
        elif peer_ended(error):
            print(f"rank {rank}: stopped, because another rank ended.", file=sys.stderr, flush=True)
            time.sleep(5)  # torchrun calls the first rank to end the cause: leave that to the other
        elif code == 1:
            traceback.print_exc()
    if agreed and code in (1, 2) and rank != 0:
        time.sleep(3)  # torchrun ends all ranks after the first to end: leave that to rank 0, which says why
        print(f"error: {agreed}", file=sys.stderr, flush=True)  # still here: this rank is alone with it
    end_now(code)
