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
from threadpoolctl import threadpool_info, threadpool_limits

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


def set_threads(threads: int, parallel: bool, world: World) -> None:
    """Set how many threads torch takes; 0: as many as there are cores where work is `parallel`, otherwise one.

    With `--shards` the default is one: convolutions round otherwise where they are split over more threads, and so do
    numpy's products, whose BLAS always takes one.
    """
    torch.set_num_threads(threads or (world.cores if parallel and not world.sharded else 1))
    threadpool_limits(1, "blas")


def blas_record() -> list[str]:
    """The BLAS libraries of this process, numpy's among them: kernels and threads, such as "openblas 0.3 Zen, 1"."""
    libraries = threadpool_info()
    names = ("internal_api", "version", "architecture")
    return [
        f"{' '.join(str(library.get(name)) for name in names)}, {library['num_threads']} threads"
        for library in libraries
        if library["user_api"] == "blas"
    ]


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


# variables by which users and libraries choose the instructions that arithmetic takes
ARITHMETIC = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
ARITHMETIC += ("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES")


def processor() -> dict[str, Any]:
    """The processor's exact model, and the instructions that it has and that arithmetic may use."""
    about = {"device": platform.processor() or platform.machine(), "instructions": ""}
    with contextlib.suppress(OSError):
        with open("/proc/cpuinfo") as file:  # of the first processor: the others' lines come after a blank one
            lines = [line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines() if ":" in line]
        found = {name.strip(): value.strip() for name, value in lines}
        numbers = [f"{word} {found[name]}" for name, word in NUMBERS.items() if name in found]
        about["device"] = ", ".join([found.get("model name", about["device"]), *numbers])
        flags = found.get("flags", found.get("Features", "")).split()
        about["instructions"] = " ".join(flag for flag in flags if flag.startswith(WIDE))
    chosen = {name: os.environ[name] for name in ARITHMETIC if name in os.environ}
    return about | {"arithmetic": {"torch": torch.backends.cpu.get_cpu_capability()} | chosen}


NUMBERS = {"cpu family": "family", "model": "model", "stepping": "stepping"}
WIDE = ("sse4", "avx", "fma", "amx", "asimd", "sve", "neon")


def environment_record(world: World) -> dict[str, Any]:
    """What a rerun would have to know beside the code: world size, threads, command, versions, processor."""
    about = processor()
    if world.device.type == "cuda":
        about["device"] = f"{torch.cuda.get_device_name(world.device)}; {about['device']}"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    versions["gymnasium"] = gymnasium.__version__
    for simulator in ("ale-py", "box2d", "envpool", "minatar", "mujoco"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[simulator] = metadata.version(simulator)
    record = {"world_size": world.world_size, "command": shlex.join(sys.argv)}
    record |= {"threads": torch.get_num_threads(), "blas": blas_record()}
    return record | {"versions": versions, **about}
