"""A few draws of tests/fuzz.py, and that it finds what is broken."""

import json
from collections import Counter

import fuzz

# Draws of seed 1 that are short: a lengthened run whose environments have quirks, a killed one, last observations in
# the environment's own buffer, and stacked frames. The second and third are compiled.
FEW = {"ppo": 2655, "ppg": 1448, "sac": 4413, "dqn": 4066}
ENDED = {"ppo": ["shorter"], "ppg": ["killed at any moment"], "sac": ["killed behind a checkpoint"], "dqn": []}
# known breaks, the draw that finds each, and what it says
FOUND = {"acting": ("ppo", "part in"), "names": ("ppo", "part in"), "stack": ("dqn", "part in")}
FOUND["alignment"] = ("ppo", "bytes too late")


def test_drawn_experiments_have_the_same_bytes_on_any_number_of_processes():
    """One of each script. Breaks that depend on processes, and one that is in all of them alike, are found."""
    servers = fuzz.Servers()
    try:
        for script, number in FEW.items():
            draw = fuzz.drawn(1, number)
            endings = [launch.ending for launch in draw.launches if launch.ending]
            assert draw.script == script and endings == ENDED[script]
            assert ("compile" in draw.flags) == (script in ("ppg", "sac"))
            assert fuzz.tried(draw, servers) == "same", f"python tests/fuzz.py --seed 1 --only {number}"
        for broken, (script, says) in FOUND.items():
            result = fuzz.tried(fuzz.drawn(1, FEW[script]), servers, broken)
            assert says in result, f"{broken}: {result}"
    finally:
        servers.close()


def test_draws_repeat_and_vary():
    assert fuzz.drawn(3, 14) == fuzz.drawn(3, 14)
    draws = [fuzz.drawn(3, number) for number in range(300)]
    launches = [launch for draw in draws for launch in draw.launches]
    assert {draw.script for draw in draws} == set(fuzz.LOSSES)
    assert {draw.edit for draw in draws} == {"", *fuzz.EDITS}
    assert {draw.processor for draw in draws} == {*fuzz.PROCESSORS}
    assert {draw.launches[1].processes for draw in draws} == {2, 4, 8}
    assert sum("action_dtype" in draw.flags["env-kwargs"] for draw in draws) >= 130, "too few continuous actions"
    endings = Counter(launch.ending for launch in launches)
    quirks = Counter(name for launch in launches for name in launch.quirks)
    assert min(endings[name] for name in fuzz.ENDINGS) >= 12, endings
    assert min(quirks[name] for name in fuzz.QUIRKS) >= 30, quirks
    families = Counter(draw.flags["env-id"].partition("/")[0] for draw in draws)
    assert families["ALE"] >= 20 and families["MinAtar"] >= 10, families
    stacks = [json.loads(draw.flags["env-kwargs"]).get("stack_num", 0) for draw in draws if draw.script == "dqn"]
    assert sum(stack > 1 for stack in stacks) >= 8, stacks
    assert sum("network" in draw.flags for draw in draws) >= 5
    assert sum("stop-at-return" in draw.flags for draw in draws) >= 10
    assert sum(draw.loads for draw in draws) >= 10
