"""Checks of what a user sets, with one line per fault that names the flag and a valid value; and periods."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from typing import Any


class BadInput(ValueError):
    """A setting that cannot work. `launch` and tyro print its one line and exit with code 2."""


class Fault(RuntimeError):
    """What ends a run though its settings could work. `launch` prints its one line and exits with code 1."""


def command_line(args: type[Any], words: list[str] | None = None) -> list[str]:
    """The command line's words, for tyro. Raises `BadInput` where a switch of the dataclass `args` has a value."""
    words = sys.argv[1:] if words is None else words
    switches = {flag(field.name) for field in dataclasses.fields(args) if field.type in (bool, "bool")}
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        name, joined, value = word.partition("=")
        switch = name.replace("_", "-").replace("--no-", "--")
        if switch in switches and (joined or not following.startswith("-")):
            raise BadInput(f"{name} {value or following}: takes no value; write {switch} or --no-{switch[2:]}.")
    return words


def flag(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


def require(valid: bool, flag: str, value: object, needed: str) -> None:
    """Raise `BadInput` unless `valid`. Write conditions so that NaN fails them: `0 < x < inf`, not `not x <= 0`."""
    if not valid:
        raise BadInput(f"{flag} {value}: must be {needed}.")


def require_divisible(flag: str, value: int, divisor: int, divisor_name: str) -> None:
    """Raise `BadInput` with the nearest valid values unless `divisor` divides `value`. Nothing is rounded."""
    if value % divisor:
        below = value - value % divisor
        nearest = f"{below} or {below + divisor}" if below else f"{divisor}"
        raise BadInput(f"{flag} {value}: must be a multiple of {divisor_name} ({divisor}), such as {nearest}.")


def require_divisor(flag: str, value: int, size: int, size_name: str) -> None:
    """Raise `BadInput` with the nearest valid values unless `value` divides `size`."""
    if size % value:
        small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
        valid = [*small, *(size // d for d in reversed(small))]  # ascending
        nearest = [d for d in valid if d < value][-1:] + [d for d in valid if d > value][:1]
        raise BadInput(f"{flag} {value}: must divide {size_name} ({size}), such as {' or '.join(map(str, nearest))}.")


def require_memory(flag: str, value: object, nbytes: float, processes: int, smaller: str = "a smaller one") -> None:
    """Raise `BadInput` unless `nbytes` in each of a machine's `processes` fit its free memory."""
    needed, free = nbytes * processes / 1e9, free_memory() / 1e9
    if needed > free:
        fault = f"needs {needed:.1f} GB on this machine, of which {free:.1f} GB are free"
        raise BadInput(f"{flag} {value}: {fault}; {smaller} fits.")


def require_compiler() -> None:
    """Raise `BadInput` (--compile) where torch would not find its C++ compiler; its own answer is 80 lines long."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    try:
        subprocess.run([compiler, "--version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        needed = f"a C++ compiler that runs: install {compiler}, or leave it off (--no-compile)"
        raise BadInput(f"--compile: needs {needed}.") from error


def free_memory() -> float:
    """Bytes of main memory that can be had; infinite where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            return next(1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def crossed(period: int, before: int, now: int) -> bool:
    """True where the step counter reached or passed a multiple of `period` between `before` and `now`; 0 is never."""
    return period > 0 and now // period > before // period
