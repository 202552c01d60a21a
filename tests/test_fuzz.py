"""A few draws of tests/fuzz.py, and that it finds what is broken."""

import json
from collections import Counter
from contextlib import closing

import pytest

import fuzz

# Draws of seed 1 that are short: quirks, a killed one with another quirk, a killed and compiled one, stacked frames.
FEW = {"ppo": 4890, "ppg": 21553, "sac": 4062, "dqn": 1251}
ENDED = {"ppo": [], "ppg": ["killed at any moment"], "sac": ["killed behind a checkpoint"], "dqn": []}
# known breaks, the draw that finds each, and what it says
FOUND = {"acting": ("ppo", "part in"), "buffer": ("ppg", "part in"), "resume": ("sac", "part in")}
FOUND |= {"stack": ("dqn", "part in"), "alignment": ("ppo", "bytes too late")}


@pytest.mark.parametrize("breaks", [("acting", "alignment"), pytest.param([*FOUND], marks=pytest.mark.slow)])
def test_drawn_experiments_have_the_same_bytes_on_any_number_of_processes(breaks):
    """One of each script. What is broken, in some processes or in all alike, is found."""
    with closing(fuzz.Servers()) as servers:
        for script, number in FEW.items():
            draw = fuzz.drawn(1, number)
            assert draw.script == script and [x.ending for x in draw.launches if x.ending] == ENDED[script]
            assert fuzz.tried(draw, servers) == "same", f"python tests/fuzz.py --seed 1 --first {number} --draws 1"
        for broken in breaks:
            servers.broken, (script, says) = broken, FOUND[broken]
            result = fuzz.tried(fuzz.drawn(1, FEW[script]), servers)
            assert says in result, f"{broken}: {result}"


def test_draws_repeat_and_vary():
    assert fuzz.drawn(3, 14) == fuzz.drawn(3, 14)
    draws = [fuzz.drawn(3, number) for number in range(300)]
    launches = [launch for draw in draws for launch in draw.launches]
    assert {draw.script for draw in draws} == {*fuzz.SCRIPTS}
    assert {draw.processor for draw in draws} == {*fuzz.PROCESSORS}
    assert {draw.launches[1].processes for draw in draws} == {2, 4, 8}
    found = Counter(name for x in launches for name in (x.ending, *x.quirks, *["twice"] * (len(x.before) > 1)))
    found.update(name for draw in draws for name in (*draw.flags, draw.flags["env-id"].partition("/")[0]))
    found.update(name for draw in draws for name in ("loads", "sockets") if getattr(draw, name))
    options = [(draw.script, json.loads(draw.flags["env-kwargs"])) for draw in draws]
    found.update(name for _, kwargs in options for name in kwargs)
    found["stacks"] = sum(script == "dqn" and kwargs.get("stack_num", 0) > 1 for script, kwargs in options)
    least = dict.fromkeys(fuzz.QUIRKS, 30) | dict.fromkeys((*fuzz.ENDINGS, "ALE", "sockets", "loads"), 20)
    least |= {"twice": 10, "MinAtar": 10, "stacks": 8, "network": 5, "stop-at-return": 10, "action_dtype": 130}
    assert not {name: found[name] for name in least if found[name] < least[name]}
