"""What ends a run: bad input, faults, the end of another rank; and checks of flags."""

from __future__ import annotations

import os


class BadInput(ValueError):
    """A setting that cannot work. `launch` and tyro print it in one line and exit with code 2."""


class Fault(RuntimeError):
    """A failure at run time, not a bad setting. `launch` prints it in one line and exits with code 1."""


def peer_ended(error: BaseException) -> bool:
    """True for an error of a collective or the store whose other end is gone: another rank's fault."""
    signs = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "got 0 bytes")
    launched = int(os.environ.get("WORLD_SIZE", 1)) > 1
    return launched and isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def one_line(text: object) -> str:
    """A text or an error on one line of at most 500 characters; without a text, its class's name."""
    return " ".join(str(text).split())[:500] or type(text).__name__


def flag(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


def require(valid: bool, flag: str, value: object, needed: str) -> None:
    """Raise `BadInput` unless `valid`. NaN is to fail it: write `0 < x < inf`, not `not x <= 0`."""
    if not valid:
        raise BadInput(f"{flag} {value}: must be {needed}.")


def require_divisible(flag: str, value: int, divisor: int, divisor_name: str) -> None:
    """Raise `BadInput` with the nearest valid values unless `divisor` divides `value`. Nothing is rounded."""
    if value % divisor:
        below = value - value % divisor
        nearest = f"{below} or {below + divisor}" if below else f"{divisor}"
        raise BadInput(f"{flag} {value}: must be a multiple of {divisor_name} ({divisor}), such as {nearest}.")
