"""What the scripts set on the machine, and what they copy to a GPU."""

import json
import math
import platform
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dqn_ddp
import ppo_ddp
import sac_ddp
from common.run import Run
from common.tensors import upload
from runs import ROOT, train

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
    train(script, tmp_path / "run", **settings)
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
