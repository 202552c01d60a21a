"""Memory that the ranks of one machine share: small arrays are exchanged through it faster than through sockets.

Waking a process that waits on a socket takes about as long as a small network's gradient. Here each rank writes into
a slot of its own and counts, and watches the others' counts. That needs Linux on x86-64, where writes are seen in their
order, CPU tensors, and a core for each rank. The memory has no name: however the ranks end, nothing of it is left.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import select
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

SLOT = 2**25  # bytes of a slot
LINE = 8  # numbers of 8 bytes in a line of a processor's cache; a rank has one line
COUNT, LEFT, KINDS = 0, 1, 2  # in a rank's line: its calls so far, whether it left, what its two slots hold
SPIN = 0.001  # seconds of a wait in which a rank burns its core
YIELD = 0.02  # seconds of a wait until which it offers its core to others; then it sleeps


class SharedMemory:
    """Slots of all ranks in the memory behind `descriptor`; `pids` are their processes, `rank` is this one's number."""

    def __init__(self, descriptor: int, rank: int, pids: list[int]) -> None:
        self.rank = rank
        self.count = 0
        size = 8 * LINE * len(pids)
        memory = mmap.mmap(descriptor, size + 2 * SLOT * len(pids))
        numbers = memoryview(memory)[:size].cast("q")
        self.lines = [numbers[start : start + LINE] for start in range(0, len(numbers), LINE)]
        self.slots = np.frombuffer(memory, np.uint8, offset=size).reshape(2, len(pids), SLOT)
        self.exits = select.poll()
        for pid in pids:
            self.exits.register(os.pidfd_open(pid), select.POLLIN)

    def gather(self, own: np.ndarray) -> np.ndarray:
        """own (n,), of at most `SLOT` bytes -> (number of ranks, n), valid until the next call.

        Every rank must call. Raises `RuntimeError`, as gloo does, where another rank has ended, or calls with another
        size or type.
        """
        self.count += 1
        half = self.count % 2  # another rank may still read the other
        kind = 64 * own.nbytes + own.dtype.num
        slots = self.slots[half].view(own.dtype)[:, : len(own)]
        slots[self.rank] = own
        self.lines[self.rank][KINDS + half] = kind
        self.lines[self.rank][COUNT] = self.count
        for rank, line in enumerate(self.lines):
            if line[COUNT] < self.count:
                self._wait(line)
            if line[KINDS + half] != kind:
                fault = f"rank {self.rank} exchanges {own.nbytes} bytes of {own.dtype}, rank {rank} others"
                raise RuntimeError(f"{fault}: every process must make the same collective calls in the same order")
        return slots

    def _wait(self, line: memoryview) -> None:
        start = time.perf_counter()
        while line[COUNT] < self.count:
            waited = time.perf_counter() - start
            if waited > YIELD:
                ended = line[LEFT] or self.exits.poll(0)
                if ended and line[COUNT] < self.count:
                    raise RuntimeError(f"rank {self.rank}: remote process exited")
                time.sleep(0.001)
            elif waited > SPIN:
                os.sched_yield()

    def leave(self) -> None:
        """Say that this rank calls no more: others that wait for it end at once."""
        self.lines[self.rank][LEFT] = 1


def share_memory(
    store: dist.Store, rank: int, world_size: int, cores: set[int], refusal: str
) -> tuple[SharedMemory | None, str]:
    """Memory for all ranks, or None and why there is none. Every rank must call.

    `cores`: the numbers of those on which this rank may run; `refusal`: why it wants none, if so.
    """

    def gather_texts(key: str, text: str) -> list[str]:
        store.set(f"{key}/{rank}", text)
        return [store.get(f"{key}/{other}").decode() for other in range(world_size)]

    calls = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")  # which some builds of Python lack
    if not calls or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        refusal = refusal or "it needs Linux on x86-64, and a Python with os.memfd_create and os.pidfd_open"
    about = {"pid": os.getpid(), "cores": [*cores], "machine": [], "descriptor": -1}
    try:
        about["machine"] = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
        if rank == 0 and not refusal:
            about["descriptor"] = os.memfd_create("lockstep")
    except OSError as error:
        refusal = refusal or f"it is not allowed: {error.strerror}"
    about["refusal"] = refusal
    ranks = [json.loads(text) for text in gather_texts("memory", json.dumps(about))]
    refusals = [x["refusal"] for x in ranks if x["refusal"]]
    if any(x["machine"] != ranks[0]["machine"] for x in ranks):
        refusals.append("there are several machines")
    if len({core for x in ranks for core in x["cores"]}) < world_size:
        refusals.append("there are fewer cores than processes")
    memory = None
    if not refusals:
        try:
            with open("/proc/{pid}/fd/{descriptor}".format(**ranks[0]), "r+b", buffering=0) as file:
                file.truncate((8 * LINE + 2 * SLOT) * world_size)
                memory = SharedMemory(file.fileno(), rank, [x["pid"] for x in ranks])
        except OSError as error:
            refusal = f"it is not allowed: {error.strerror}"
        refusals = [text for text in gather_texts("mapped", refusal) if text]
    if about["descriptor"] >= 0:
        os.close(about["descriptor"])
    return (None, refusals[0]) if refusals else (memory, "")
