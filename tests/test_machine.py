"""What the scripts set on the machine, and what they copy to a GPU."""

import platform
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.tensors import upload
from runs import ROOT

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
    """Large arrays that it takes again have their pages; numpy, and each of torch's threads, make 0 of denormals."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    *_, faults, denormals = done.stdout.splitlines() or [done.stderr]
    assert int(faults) < 100 and denormals == "0.0 0.0", done.stdout + done.stderr


def test_an_upload_is_one_copy_of_all_that_is_in_it(monkeypatch):
    """Of arrays of any type, layout and size, each at an aligned place. Here the copy stays on the CPU."""
    copies, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory, **how: empty(*sizes, **how))
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, non_blocking: (copies.append(x), x)[1])
    noise = np.arange(512, dtype=np.float32).reshape(64, 2, 4)
    arrays = [noise[:, 1:], noise[:, 0].T, np.array([True, False, True]), np.zeros((0, 3), np.float32), np.array([7])]
    there = upload(SimpleNamespace(type="cuda"), *arrays)
    assert all(np.array_equal(x, y) and x.numpy().dtype == y.dtype for x, y in zip(there, arrays, strict=True))
    (whole,) = copies
    assert all((x.data_ptr() - whole.data_ptr()) % 512 == 0 for x in there if len(x))
