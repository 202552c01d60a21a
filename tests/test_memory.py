"""Memory that ranks share: the numbers of all, in order, and an end where another rank ends."""

import multiprocessing
import os
import platform
import signal
import time

import numpy as np
import pytest
import torch.distributed as dist

from common.memory import SLOT, share_memory
from runs import PATIENCE

FORKED = multiprocessing.get_context("fork")


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """`function(memory or None, rank)` in `size` processes, with a core each -> what they return, and exit codes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})

    def run_all(function, size):
        results = FORKED.SimpleQueue()

        def work(rank):
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=size)
            results.put((rank, function(share_memory(rank, size), rank)))
            os._exit(0)

        processes = [FORKED.Process(target=work, args=(rank,)) for rank in range(size)]
        for process in processes:
            process.start()
        try:
            found, deadline = {}, time.monotonic() + PATIENCE
            while time.monotonic() < deadline and any(x.is_alive() for x in processes) or not results.empty():
                if not results.empty():
                    rank, value = results.get()
                    found[rank] = value
                time.sleep(0.005)
            return found, [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()

    return run_all


def numbers(rank, count):
    kind = (np.float32, np.float64)[count % 2]
    return np.random.default_rng([rank, count]).standard_normal(1 + count % 97).astype(kind)


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_the_numbers_of_all(size, ranks):
    """Also where ranks come late, on more ranks than cores; and arrays that fill the slot."""

    def exchange(memory, rank):
        late = np.random.default_rng(rank)
        for count in range(500):
            if late.random() < 0.02:
                time.sleep(0.03 * late.random())
            table = memory.gather(numbers(rank, count))
            expected = [numbers(other, count) for other in range(size)]
            assert table.dtype == expected[0].dtype and all(map(np.array_equal, table, expected)), count
        whole = np.full(SLOT, rank, np.uint8)
        return all((row == other).all() for other, row in enumerate(memory.gather(whole)))

    assert ranks(exchange, size) == (dict.fromkeys(range(size), True), [0] * size)


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_who_waits_for_a_rank_that_has_ended_is_told(end, ranks):
    """At once; what that rank had said before still counts."""

    def wait(memory, rank):
        first = memory.gather(np.array([7.0 + rank])).tolist()
        if rank == 1:
            os._exit(0) if end == "exit" else os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="rank 0: another rank has ended"):
            memory.gather(np.zeros(3))
        return first

    assert ranks(wait, 2)[0] == {0: [[7.0], [8.0]]}


@pytest.mark.parametrize("lacking", ["cores", "x86", "leave"])
def test_all_ranks_are_without_it_where_one_is(lacking, ranks, monkeypatch):
    if lacking == "cores":
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})

    def without(memory, rank):
        return memory is None

    shared = share_memory

    def on_one(rank, size):
        if rank == 1 and lacking == "x86":
            platform.machine = lambda: "aarch64"
        if rank == 1 and lacking == "leave":
            os.pidfd_open = lambda _: (_ for _ in ()).throw(PermissionError())
        return shared(rank, size)

    monkeypatch.setitem(globals(), "share_memory", on_one)
    assert ranks(without, 2) == ({0: True, 1: True}, [0, 0])


def test_ranks_that_exchange_unlike_numbers_are_told(ranks):
    """As where one process makes one collective call less than the others."""

    def exchange(memory, rank):
        memory.gather(np.zeros(4))
        with pytest.raises(RuntimeError, match="ranks must make the same collective calls in the same order"):
            memory.gather(np.zeros(3 + rank))
        return True

    assert ranks(exchange, 2)[0] == {0: True, 1: True}
