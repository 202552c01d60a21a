"""Memory that the ranks of one machine share: small arrays are exchanged through it faster than through sockets.

Waking a process that waits on a socket takes about as long as a small network's gradient. Here each rank
writes into a slot of its own and counts, and watches the others' counts. That needs Linux on x86-64, where
writes are seen in their order, CPU tensors, and a core for each rank. The memory has no name: however the
ranks end, nothing of it is left.
"""

from __future__ import annotations

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
COUNT = 0  # in a rank's line: its calls so far
LEFT = 1  # whether it left
KINDS = 2  # what its two slots hold
SPIN = 0.001  # seconds of a wait in which a rank uses its core
YIELD = 0.02  # seconds of a wait until which it offers its core to others; then it sleeps


class SharedMemory:
    """Slots of all ranks in the memory behind `descriptor`. `pids`: of all ranks; `rank`: this one."""

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

        Every rank must call. Raises `RuntimeError`, as gloo does, where another rank has ended, or calls with
        another size or type.
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


def share_memory(rank: int, world_size: int, cores: set[int], fault: str) -> tuple[SharedMemory | None, str]:
    """Memory for all ranks, or None and why there is none. Every rank must call, in the process group.

    `cores`: the numbers of those on which this rank may run; `fault`: why it wants none, if so.
    """
    descriptor = -1
    machine = ()
    calls = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")  # which some builds of Python lack
    if not calls or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        fault = fault or "it needs Linux on x86-64, and a Python with os.memfd_create and os.pidfd_open"
    if not fault:
        try:
            machine = (Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid"))
            if rank == 0:
                descriptor = os.memfd_create("lockstep")
        except OSError as error:
            fault = f"it is not allowed: {error.strerror}"
    ranks = [None] * world_size
    dist.all_gather_object(ranks, (fault, machine, cores, os.getpid(), descriptor))  # collective
    faults, machines, cores_of_ranks, pids, descriptors = zip(*ranks, strict=True)
    fault = next(filter(None, faults), "")
    if len(set(machines)) > 1:
        fault = fault or "there are several machines"
    if len(set.union(*cores_of_ranks)) < world_size:
        fault = fault or "there are fewer cores than processes"
    memory = None
    if not fault:
        try:
            with open(f"/proc/{pids[0]}/fd/{descriptors[0]}", "r+b", buffering=0) as file:
                file.truncate((8 * LINE + 2 * SLOT) * world_size)
                memory = SharedMemory(file.fileno(), rank, pids)
        except OSError as error:
            fault = f"it is not allowed: {error.strerror}"
        faults = [""] * world_size
        dist.all_gather_object(faults, fault)  # collective
        fault = next(filter(None, faults), "")
    if descriptor >= 0:
        os.close(descriptor)
    return (None, fault) if fault else (memory, "")
