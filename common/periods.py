"""Whether a multiple of a period was passed."""

from __future__ import annotations


def crossed(period: int, before: int, now: int) -> bool:
    """True where the step counter reached or passed a multiple of `period` between `before` and `now`; 0 is never."""
    return period > 0 and now // period > before // period
