"""What made a run's numbers: code, versions, processor; and whether another run may go on with them."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_info

from common.distributed import World
from common.errors import BadInput, flag, require
from common.run.arguments import MAY_CHANGE_ON_RESUME
from common.run.files import hashing

# variables by which users and libraries choose the instructions that arithmetic takes
ARITHMETIC = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
ARITHMETIC += ("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES")
WIDE = ("sse4", "avx", "fma", "amx", "asimd", "sve", "neon")  # how instructions that change numbers begin
MACHINE = ("device", "instructions", "arithmetic", "threads", "blas", "sources", "versions")


def source_files(script: Path, folders: Sequence[str] = ()) -> dict[str, Path]:
    """A script and the files of `common/`, by name; the script alone where it imports none (`common.onefile`).

    `folders`: where the script's process looks for `common/`, in this order (default: this process's `sys.path`).
    """
    found = {}
    if re.search(rb"^\s*(from|import) common[ .]", script.read_bytes(), re.MULTILINE):
        for folder in (Path(folder).absolute() for folder in reversed(folders or sys.path)):
            found |= {str(path.relative_to(folder)): path for path in folder.glob("common/**/*.py")}
    return {script.name: script.absolute()} | dict(sorted(found.items()))


def git(folder: Path, *words: str | Path) -> str:
    """What `git` prints in a folder; nothing without git, or where it is no repository."""
    with suppress(OSError):
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, errors="replace")
        return done.stdout if done.returncode < 2 else ""  # 1: `git diff --no-index` found a difference
    return ""


def source_record(script: Path, folders: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """The commit (None without git), whether sources differ from it, their digest; and the difference, as of git.

    `folders`: as for `source_files`. Of a file that the commit lacks, ignored or not, all lines are in the difference.
    """
    files, difference = source_files(script, folders), ""
    content = b"".join(name.encode() + b"\0" + path.read_bytes() for name, path in files.items())
    commit = git(script.absolute().parent, "rev-parse", "--verify", "--quiet", "HEAD").strip()
    for folder in dict.fromkeys(path.parent for path in files.values() if commit):
        here = [path for path in files.values() if path.parent == folder]
        difference += git(folder, "diff", "HEAD", "--", *here)
        for name in git(folder, "ls-files", "--others", "-z", "--", *here).split("\0")[:-1]:
            difference += git(folder, "diff", "--no-index", "--", "/dev/null", name)
    changed = bool(difference) if commit else None
    return {"commit": commit or None, "changed": changed, "sources": hashing(content).hexdigest()}, difference


def processor() -> dict[str, Any]:
    """The processor's exact model, and the instructions that it has and that arithmetic may use."""
    text = ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]  # the first processor's lines
    found = dict(re.findall(r"^(.+?)\s*: (.*?) *$", text, re.MULTILINE))
    model = [found.get("model name") or platform.processor() or platform.machine()]
    model += [f"{key.split()[-1]} {found[key]}" for key in ("cpu family", "model", "stepping") if key in found]
    instructions = found.get("flags", found.get("Features", "")).split()
    wide = " ".join(name for name in instructions if name.startswith(WIDE))
    arithmetic = {"torch": torch.backends.cpu.get_cpu_capability()}
    arithmetic |= {name: os.environ[name] for name in ARITHMETIC if name in os.environ}
    return {"device": ", ".join(model), "instructions": wide, "arithmetic": arithmetic}


def environment_record(world: World) -> dict[str, Any]:
    """What a rerun would have to know beside the code: processes, command, threads, versions, processor."""
    about = processor()
    if world.device.type == "cuda":
        about["device"] = f"{torch.cuda.get_device_name(world.device)}; {about['device']}"
        about["arithmetic"] |= {"cudnn": torch.backends.cudnn.version(), "nccl": [*torch.cuda.nccl.version()]}
        about["arithmetic"] |= {"cuda": torch.version.cuda, "driver": torch._C._cuda_getDriverVersion()}
    blas = [
        f"{x.get('internal_api')} {x.get('version')} {x.get('architecture')}, {x['num_threads']} threads"
        for x in threadpool_info()
        if x["user_api"] == "blas"
    ]
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "gymnasium", "ale-py", "box2d", "envpool", "minatar", "mujoco"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    record = {"world_size": world.world_size, "command": shlex.join(sys.argv)}
    return record | {"threads": torch.get_num_threads(), "blas": blas, "versions": versions} | about


def machine(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a record's numbers depend on, all on one level: each version by its package's name."""
    return {name: record.get(name) for name in MACHINE[:-1]} | record["versions"]


def require_same_run(path: Path, recorded: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """Raise `BadInput`, naming the flag, unless what `path` holds was recorded by the run that `record` describes.

    That run may be longer than it was to be.
    """
    if recorded["script"] != record["script"]:
        raise BadInput(f"--run-dir: {path} holds a run of {recorded['script']}.py; name another.")
    if not recorded["args"].get("checkpoint_every"):
        raise BadInput(f"--resume: {path} holds a run that was recorded without --checkpoint-every; name another.")
    for name, value in record["args"].items():
        before = recorded["args"].get(name)
        longer = name == "total_timesteps" and value > (before or value)  # Checkpoints asks what schedules say to that
        if name not in MAY_CHANGE_ON_RESUME and not longer:
            require(value == before, flag(name), value, f"{before} to go on with {path}")
    before, now = recorded["world_size"], record["world_size"]
    if record["args"]["shards"] is None and now != before:
        only = f"{before} process(es) only, not on {now}"
        raise BadInput(f"--shards: {path} was recorded without, so it goes on on {only}.")
