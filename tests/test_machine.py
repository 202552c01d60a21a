"""What the scripts set on the machine, what they copy to a GPU, and the memory that ranks share."""

import json
import math
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import dqn_ddp
import ppo_ddp
import sac_ddp
from common.memory import SLOT, share_memory
from common.processes import World
from common.run import Run
from common.tensors import upload
from runs import PATIENCE, ROOT, train

PROGRAM = """
import resource, sys
import gymnasium as gym
import numpy as np
import torch
from common.run import open_run
import ppo_ddp

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (30_000_000, 3_000_000, 50_000_000):
        np.ones(size, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

args = ppo_ddp.Args(cuda=False, num_threads=2, run_dir=sys.argv[1])
with open_run(args, ppo_ddp.__file__, (), (gym.spaces.Discrete,)):
    page_faults()
    print(page_faults())
    smallest = np.full(3, 1e-45, np.float32)
    print((smallest * 1.0).max(), float((torch.full((1_000_000,), 1e-45) * 1.0).max()))  # over both threads
"""


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="older C libraries cannot")
def test_freed_memory_is_kept_and_denormals_are_zero_in_a_run(tmp_path):
    """Large arrays that it takes again have their pages; denormals are 0 in numpy and torch's threads."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    *_, faults, denormals = done.stdout.splitlines() or [done.stderr]
    assert int(faults) < 100 and denormals == "0.0 0.0", done.stdout + done.stderr


SIZES = {  # script, settings, threads of three cores
    "small": (ppo_ddp, {"total_timesteps": 512}, 1),
    "large batches": (ppo_ddp, {"total_timesteps": 8192, "num_envs": 64}, 3),
    "wide": (sac_ddp, {"total_timesteps": 24, "learning_starts": 16}, 3),
    "shards": (sac_ddp, {"total_timesteps": 24, "learning_starts": 16, "num_envs": 2, "shards": 2}, 1),
    "by flag": (dqn_ddp, {"total_timesteps": 24, "learning_starts": 16, "num_threads": 2}, 2),
}


@pytest.mark.parametrize("size", SIZES)
def test_torch_takes_all_cores_where_networks_and_batches_are_large(size, tmp_path, monkeypatch):
    """And one thread else, also for the networks' first weights."""
    script, settings, threads = SIZES[size]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr("common.processes.container_limit", lambda _: math.inf)
    seen = []
    for name in ("register", "backward"):
        call = getattr(Run, name)
        watched = lambda *args, call=call, **how: (seen.append(torch.get_num_threads()), call(*args, **how))[1]  # noqa: E731
        monkeypatch.setattr(Run, name, watched)
    train(script, tmp_path / "run", **{"num_threads": 0} | settings)
    assert seen[0] == settings.get("num_threads", 1) and seen[-1] == threads
    most = json.loads((tmp_path / "run" / "config.json").read_text())["threads"]
    assert most == settings.get("num_threads", 1 if "shards" in settings else 3)


def test_an_upload_is_one_copy_of_all_that_is_in_it(monkeypatch):
    """Of any type, layout and size, each at an aligned place. Here the copy stays on the CPU."""
    copies, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **how: empty(*sizes, **how))
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, non_blocking: (copies.append(x), x)[1])
    noise = np.arange(512, dtype=np.float32).reshape(64, 2, 4)
    arrays = [noise[:, 1:], noise[:, 0].T, np.array([True, False, True]), np.zeros((0, 3), np.float32), np.array([7])]
    there = upload(SimpleNamespace(type="cuda"), *arrays)
    assert all(np.array_equal(x, y) and x.numpy().dtype == y.dtype for x, y in zip(there, arrays, strict=True))
    (whole,) = copies
    assert all((x.data_ptr() - whole.data_ptr()) % 512 == 0 for x in there if len(x))


FORKED = multiprocessing.get_context("fork")


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """`function(memory or None, rank)` in `size` processes, with a core each -> what they return, and exit codes."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})

    def run_all(function, size):
        results = FORKED.SimpleQueue()

        def work(rank):
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=size)
            world = World(cuda=False)
            world.world_size = size
            results.put((rank, function(share_memory(rank, world.gather_objects), rank)))
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

    def on_one(rank, gather):
        if rank == 1 and lacking == "x86":
            platform.machine = lambda: "aarch64"
        if rank == 1 and lacking == "leave":
            os.pidfd_open = lambda _: (_ for _ in ()).throw(PermissionError())
        return shared(rank, gather)

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
