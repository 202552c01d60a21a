"""Types of flags with the range that a value must be in: a field's annotation, which `RunArgs` checks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple


class Range(NamedTuple):
    """`valid` tells whether a value may stand (False for NaN), `needed` says what may."""

    valid: Callable[[Any], bool]
    needed: str


def is_object(text: str) -> bool:
    """Whether a text is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


Count = Annotated[int, Range(lambda x: x >= 1, "an integer of at least 1")]
Whole = Annotated[int, Range(lambda x: x >= 0, "an integer of at least 0")]
Period = Whole  # 0: never
Positive = Annotated[float, Range(lambda x: 0 < x < math.inf, "a number above 0")]
Weight = Annotated[float, Range(lambda x: 0 <= x < math.inf, "a number of at least 0")]
Fraction = Annotated[float, Range(lambda x: 0 <= x <= 1, "a number from 0 to 1")]
Rate = Annotated[float, Range(lambda x: 0 < x <= 1, "a number above 0, at most 1")]
Norm = Annotated[float, Range(lambda x: x > 0, "a number above 0 (inf: no clipping)")]
Seed = Annotated[int, Range(lambda x: 0 <= x < 2**32, "an integer from 0 to 2**32 - 1")]
Threads = Annotated[int, Range(lambda x: 0 <= x <= 1024, "an integer from 0 to 1024")]
Seconds = Annotated[float, Range(lambda x: 0 < x <= 1e6, "a number above 0, at most 1e6")]
Json = Annotated[str, Range(is_object, """a JSON object, such as '{"num_levels": 200}'""")]
Return = Annotated[float, Range(lambda x: x > -math.inf, "a number")]
