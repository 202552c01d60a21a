"""Memory that ranks share: the numbers of all, in order, and an end where another rank ends."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from common.distributed import World
from common.errors import peer_ended
from common.memory import SLOT, share_memory
from common.shards import tree_sum
from runs import PATIENCE, run, same_run

FORKED = multiprocessing.get_context("fork")


def ranks(function, size, tmp_path, cores=(*range(8),), refusals=None):
    """`function(memory or the refusal, rank)` in `size` processes -> what they return, and their exit codes."""
    results = FORKED.SimpleQueue()

    def work(rank):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=size)
        memory, refusal = share_memory(rank, size, {*cores}, (refusals or {}).get(rank, ""))
        results.put((rank, function(memory or refusal, rank)))
        os._exit(0)

    processes = [FORKED.Process(target=work, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    try:
        found, deadline = {}, time.monotonic() + PATIENCE
        while time.monotonic() < deadline and any(process.is_alive() for process in processes) or not results.empty():
            if not results.empty():
                rank, value = results.get()
                found[rank] = value
            time.sleep(0.005)
        return found, [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def numbers(rank, count):
    return (
        np.random.default_rng([rank, count]).standard_normal(1 + count % 97).astype((np.float32, np.float64)[count % 2])
    )


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_the_numbers_of_all(size, tmp_path):
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

    found, codes = ranks(exchange, size, tmp_path)
    assert found == dict.fromkeys(range(size), True) and codes == [0] * size


@pytest.mark.parametrize("end", ["exit", "kill", "leave"])
def test_who_waits_for_a_rank_that_has_ended_is_told(end, tmp_path, monkeypatch):
    """At once, by the error that ends a run in one line; what that rank had said before still counts."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    def wait(memory, rank):
        first = memory.gather(np.array([7.0 + rank])).tolist()
        if rank == 1:
            if end == "leave":
                memory.leave()
                time.sleep(3.0)
            os._exit(0) if end == "exit" else os.kill(os.getpid(), signal.SIGKILL) if end == "kill" else None
        start = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            memory.gather(np.zeros(3))
        return first, peer_ended(caught.value), time.monotonic() - start

    found, _ = ranks(wait, 2, tmp_path)
    first, known, seconds = found[0]
    assert first == [[7.0], [8.0]] and known
    assert end != "leave" or seconds < 2.5  # the other sleeps for 3


@pytest.mark.parametrize(
    "given, said",
    [
        ({"refusals": {1: "there is a GPU"}}, "there is a GPU"),
        ({"cores": {3}}, "there are fewer cores than processes"),
    ],
)
def test_all_ranks_are_refused_alike(given, said, tmp_path):
    found, _ = ranks(lambda refusal, rank: refusal, 2, tmp_path, **given)
    assert found == {0: said, 1: said}


def test_any_number_of_parts_has_one_order():
    parts = [np.float32(10.0) ** x for x in (8, -1, -8, 0, 7)]
    a, b, c, d, e = parts
    [total] = tree_sum([[torch.tensor(x)] for x in parts])
    assert total.item() == ((a + b) + (c + d)) + e


def test_ranks_that_exchange_unlike_numbers_are_told(tmp_path):
    """As where one process makes one collective call less than the others."""

    def exchange(memory, rank):
        memory.gather(np.zeros(4))
        with pytest.raises(RuntimeError, match="every process must make the same collective calls"):
            memory.gather(np.zeros(3 + rank) if where == "size" else np.zeros(4, ("float64", "int64")[rank]))
        return True

    for where in ("size", "type"):
        (tmp_path / where).mkdir()
        assert ranks(exchange, 2, tmp_path / where)[0] == {0: True, 1: True}


def test_memory_and_sockets_give_the_same_bytes(tmp_path):
    """Without shards; the drawn experiments have both with shards."""
    if World(False).cores < 2:
        pytest.skip("two processes share memory on two cores")
    flags = "--learning-starts 500 --train-frequency 4 --batch-size 32 --eval-every 0 --total-timesteps 600"
    memory = run("sac_ddp.py", 2, f"{flags} --save-model", tmp_path / "memory", dtype="float32")
    sockets = run("sac_ddp.py", 2, f"{flags} --save-model --no-shared-memory", tmp_path / "sockets", dtype="float32")
    assert "2 process(es), cpu, through sockets (it is off)" in sockets.out
    assert same_run(memory, sockets) == "" and "through shared memory" in memory.out
