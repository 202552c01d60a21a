"""What the scripts set on the machine."""

import platform
import subprocess
import sys

import pytest

from runs import ROOT

FAULTS = """
import resource
import gymnasium as gym
import numpy as np
import ppo_ddp
from common.environments import open_environments

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (30_000_000, 3_000_000, 50_000_000):
        np.ones(size, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with open_environments(ppo_ddp.Args(cuda=False), (gym.spaces.Discrete,)):
    page_faults()
    print(page_faults())
"""


@pytest.mark.skipif(platform.libc_ver() < ("glibc", "2.35"), reason="older C libraries cannot")
def test_freed_memory_is_kept():
    """Large arrays that a run takes again and again have their pages after the first time."""
    done = subprocess.run([sys.executable, "-c", FAULTS], cwd=ROOT, capture_output=True, text=True)
    assert int(done.stdout.split()[-1]) < 100, done.stdout + done.stderr


DENORMALS = """
import gymnasium as gym
import numpy as np
import torch
import ppo_ddp
from common.environments import open_environments

smallest = np.full(3, 1e-45, np.float32)
with open_environments(ppo_ddp.Args(cuda=False, num_threads=2), (gym.spaces.Discrete,)):
    print((smallest * 1.0).max(), float((torch.full((1_000_000,), 1e-45) * 1.0).max()))  # over both threads
print((smallest * 1.0).max() > 0.0)
"""


def test_denormals_are_zero_while_a_run_is_open():
    """In numpy and in each of torch's threads, and afterwards no longer in the process's first thread."""
    done = subprocess.run([sys.executable, "-c", DENORMALS], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-2:] == ["0.0 0.0", "True"], done.stdout + done.stderr
