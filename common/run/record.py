"""What made a run's numbers: code, versions, processor; and whether another run may continue it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_info

from common.distributed import World
from common.errors import BadInput, flag, require
from common.run.arguments import MAY_CHANGE_ON_RESUME

PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "box2d", "envpool", "minatar", "mujoco")
# variables by which MKL, oneDNN and numpy take other instructions; torch and OpenBLAS name those that they take
LIMITS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA")
LIMITS += ("NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES")
DECIDES_BYTES = ("device", "instructions", "threads", "blas", "sources")  # of a record, with its versions


def source_files(script: Path) -> dict[str, Path]:
    """A script and the files of `common/`, by name; the script alone if it imports none (`tools/onefile.py`)."""
    files = {script.name: script.absolute()}
    if re.search(rb"^\s*(from|import) common[ .]", script.read_bytes(), re.MULTILINE):
        folder = script.absolute().parent
        if not (folder / "common").exists():
            folder = Path(__file__).parents[2]
        files |= {str(path.relative_to(folder)): path for path in sorted(folder.glob("common/**/*.py"))}
    return files


def git(folder: Path, *words: str) -> str:
    """What `git` prints in a folder; nothing if git is missing, or the folder is in no repository."""
    with suppress(OSError):
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, errors="replace")
        return done.stdout
    return ""


def source_record(script: Path) -> tuple[dict[str, Any], str]:
    """The commit (None without git), whether the sources differ from it, their digest; and git's difference.

    A file that git does not track differs, but is not in the difference.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, path in source_files(script).items():
        digest.update(name.encode() + b"\0" + path.read_bytes())
    folder = script.absolute().parent
    sources = ("--", script.name, "common")
    commit = git(folder, "rev-parse", "--verify", "--quiet", "HEAD").strip() or None
    changed = bool(git(folder, "status", "--porcelain", *sources)) if commit else None
    record = {"commit": commit, "changed": changed, "sources": digest.hexdigest()}
    return record, git(folder, "diff", "HEAD", *sources)


def processor() -> str:
    """The processor's model."""
    with suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    return platform.processor() or platform.machine()


def environment_record(world: World) -> dict[str, Any]:
    """What a rerun must know beside the code: processes, command, threads, versions, processor."""
    record = {"world_size": world.world_size, "command": shlex.join(sys.argv), "device": processor()}
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    record["instructions"] = " ".join([torch.backends.cpu.get_cpu_capability(), *limits])  # such as AVX512
    record["threads"] = torch.get_num_threads()
    libraries = [x for x in threadpool_info() if x["user_api"] == "blas"]
    facts = ("internal_api", "version", "architecture", "num_threads")
    record["blas"] = [" ".join(str(library.get(name)) for name in facts) for library in libraries]
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    if world.device.type == "cuda":
        record["device"] = f"{torch.cuda.get_device_name(world.device)}; {record['device']}"
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        with suppress(OSError), open("/sys/module/nvidia/version") as file:
            versions["driver"] = file.read().strip()
    return record | {"versions": versions}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two records of that on which the bytes of a run depend, in words."""
    old, new = ({name: x.get(name) for name in DECIDES_BYTES} | x["versions"] for x in (before, now))
    return [f"{name} {value}, before {old.get(name)}" for name, value in new.items() if value != old.get(name)]


def require_same_run(path: Path, recorded: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Raise `BadInput`, naming the flag, unless the run that `record` describes may continue the recorded one.

    `path`: the recorded run's. The run may be longer than was planned.
    """
    args = recorded["args"]
    if recorded["script"] != record["script"]:
        raise BadInput(f"--run-dir: {path} holds a run of {recorded['script']}.py; name another.")
    if not args.get("checkpoint_every"):
        raise BadInput(f"--resume: {path} holds a run that was recorded without --checkpoint-every; name another.")
    for name, value in record["args"].items():
        before = args.get(name, value)  # a flag may be newer than the record
        longer = name == "total_timesteps" and value > before  # Checkpoints looks at the schedules
        if name not in MAY_CHANGE_ON_RESUME and not longer:
            require(value == before, flag(name), value, f"{before} to go on with {path}")
    if record["args"]["shards"] is None and record["world_size"] != recorded["world_size"]:
        only = f"{recorded['world_size']} process(es) only, not on {record['world_size']}"
        raise BadInput(f"--shards: {path} was recorded without, so it goes on on {only}.")
    if record["columns"] != recorded["columns"]:
        name = min({*record["columns"]} ^ {*recorded["columns"]}, default="their order")
        raise BadInput(f"--run-dir: {path} was recorded with other COLUMNS ({name}); name another.")
