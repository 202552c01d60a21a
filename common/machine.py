"""What this machine has, and whether that is enough."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from typing import Any

import gymnasium
import numpy as np
import torch

from common.distributed import World
from common.launch import BadInput


def free_memory() -> float:
    """Bytes of main memory that can be had; infinite where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def require_memory(flag: str, value: object, nbytes: float, world: World, smaller: str = "a smaller one") -> None:
    """Raise `BadInput` unless `nbytes` in each rank of this machine fit its free memory."""
    needed, free = nbytes * world.local_world_size / 1e9, free_memory() / 1e9
    if needed > free:
        fault = f"needs {needed:.1f} GB on this machine, of which {free:.1f} GB are free"
        raise BadInput(f"{flag} {value}: {fault}; {smaller} fits.")


def require_compiler(world: World) -> None:
    """Raise `BadInput` (--compile) where torch would not find its C++ compiler; its own answer is 80 lines long."""
    if world.device.type != "cpu":
        return
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    try:
        subprocess.run([compiler, "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        needed = f"a C++ compiler that runs: install {compiler}, or leave it off (--no-compile)"
        raise BadInput(f"--compile: needs {needed}.") from error


def environment_record(world: World) -> dict[str, Any]:
    """What a rerun would have to know: world size, command, versions, processor, and the commit if there is one."""
    try:
        git = ["git", "-C", os.path.dirname(os.path.abspath(sys.argv[0])), "rev-parse", "HEAD"]
        answer = subprocess.run(git, capture_output=True, text=True)
        commit = answer.stdout.strip() if answer.returncode == 0 else None
    except OSError:
        commit = None
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        models = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        cpu = models[0] if models else cpu
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions["gymnasium"] = gymnasium.__version__
    for simulator in ("ale-py", "box2d", "minatar", "mujoco"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[simulator] = metadata.version(simulator)
    return {
        "world_size": world.world_size,
        "threads": torch.get_num_threads(),
        "command": shlex.join(sys.argv),
        "versions": versions,
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else cpu,
        "commit": commit,
    }
