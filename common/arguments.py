"""Checks of what a user sets, with one line per fault that names the flag and a valid value; and periods."""

from __future__ import annotations


class BadInput(ValueError):
    """A setting that cannot work. `launch` and tyro print its one line and exit with code 2."""


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
        valid = [d for d in range(1, size + 1) if size % d == 0]
        nearest = [d for d in valid if d < value][-1:] + [d for d in valid if d > value][:1]
        raise BadInput(f"{flag} {value}: must divide {size_name} ({size}), such as {' or '.join(map(str, nearest))}.")


def crossed(period: int, before: int, now: int) -> bool:
    """True where the step counter reached or passed a multiple of `period` between `before` and `now`; 0 is never."""
    return period > 0 and now // period > before // period
