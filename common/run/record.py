"""The record of what made a run's numbers: code, versions, processor; and whether another run may go on with it."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from threadpoolctl import threadpool_info

from common.distributed import World
from common.errors import BadInput, flag, require
from common.run.arguments import FREE


def blas_record() -> list[str]:
    """The BLAS libraries of this process, numpy's among them: kernels and threads, such as "openblas 0.3 Zen, 1"."""
    libraries = threadpool_info()
    names = ("internal_api", "version", "architecture")
    return [
        f"{' '.join(str(library.get(name)) for name in names)}, {library['num_threads']} threads"
        for library in libraries
        if library["user_api"] == "blas"
    ]


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


MACHINE = ("device", "instructions", "arithmetic", "threads", "blas", "sources", "versions")  # what numbers depend on


def machine(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record.get(name) for name in MACHINE[:-1]} | record["versions"]


def require_same_run(path: Path, recorded: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Raise `BadInput`, naming the flag, unless what `path` holds was recorded by the run that `record` describes."""
    if recorded["script"] != record["script"]:
        raise BadInput(f"--run-dir: {path} holds a run of {recorded['script']}.py; name another.")
    if not recorded["args"].get("checkpoint_every"):
        raise BadInput(f"--resume: {path} holds a run that was recorded without --checkpoint-every; name another.")
    for name, value in record["args"].items():
        before = recorded["args"].get(name)
        if name not in FREE:
            require(value == before, flag(name), value, f"{before} to go on with {path}")
    processes = recorded["world_size"]
    if record["args"]["shards"] is None and record["world_size"] != processes:
        fault = f"{path} was recorded without, so it goes on on {processes} process(es) only"
        raise BadInput(f"--shards: {fault}, not on {record['world_size']}.")
