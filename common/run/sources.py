"""The code that runs: its commit, its digest, and in what it differs from the commit."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.run.files import hashing


def source_files(script: Path, folders: Sequence[str] = ()) -> dict[str, Path]:
    """A script and the files of `common/`, by name; the script alone where it imports none (`common.onefile`).

    `folders`: where the script's process looks for `common/`, in this order (default: this process's `sys.path`).
    """
    script, found = script.absolute(), {}
    if re.search(rb"^\s*(from|import) common[ .]", script.read_bytes(), re.MULTILINE):
        for folder in folders or sys.path:
            for path in Path(folder).absolute().glob("common/**/*.py"):
                found.setdefault(str(path.relative_to(Path(folder).absolute())), path)
    return {script.name: script} | dict(sorted(found.items()))


def git(folder: Path, *words: str | Path) -> str | None:
    """What `git` prints in a folder; None without git, or where it is no repository."""
    try:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, errors="replace")
    except OSError:
        return None
    return done.stdout if done.returncode < 2 else None  # 1: `git diff --no-index` found a difference


def source_record(script: Path, folders: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """The commit (None without git), whether sources differ from it, their digest -> and the difference, as git's.

    `folders`: as of `source_files`. A file that the commit lacks, ignored ones too, differs from it in all its lines.
    """
    files, digest = source_files(script, folders), hashing()
    for name, path in files.items():
        digest.update(name.encode() + b"\0" + path.read_bytes())
    record = {"commit": None, "changed": None, "sources": digest.hexdigest()}
    commit = git(script.absolute().parent, "rev-parse", "--verify", "--quiet", "HEAD")
    if not commit:
        return record, ""
    difference = ""
    for folder in dict.fromkeys(path.parent for path in files.values()):
        here = [path for path in files.values() if path.parent == folder]
        difference += git(folder, "diff", "HEAD", "--", *here) or ""
        for name in (git(folder, "ls-files", "--others", "-z", "--", *here) or "").split("\0")[:-1]:
            difference += git(folder, "diff", "--no-index", "--", "/dev/null", name) or ""
    return record | {"commit": commit.strip(), "changed": bool(difference)}, difference
