"""A few draws of tests/fuzz.py, and that it finds what is broken."""

import fuzz

FEW = {"ppo": 3, "ppg": 41, "dqn": 32, "sac": 4}  # draws of seed 1 that are short, one of each script


def test_drawn_experiments_have_the_same_bytes_on_any_number_of_processes():
    """One of each script, one of them killed and resumed. Acting that depends on the number of processes is found."""
    servers = fuzz.Servers()
    try:
        for script, number in FEW.items():
            draw = fuzz.drawn(1, number)
            assert draw.script == script
            assert fuzz.tried(draw, servers) == "same", f"python tests/fuzz.py --seed 1 --only {number}"
        assert fuzz.tried(fuzz.drawn(1, FEW["ppo"]), servers, "acting").startswith("part in row")
    finally:
        servers.close()


def test_draws_repeat_and_vary():
    assert fuzz.drawn(3, 14) == fuzz.drawn(3, 14)
    draws = [fuzz.drawn(3, number) for number in range(300)]
    assert {draw.script for draw in draws} == set(fuzz.LOSSES)
    assert {draw.edit for draw in draws} == {"", *fuzz.EDITS} and {draw.processor for draw in draws} == {
        *fuzz.PROCESSORS
    }
    assert sum("action_dtype" in draw.flags["env-kwargs"] for draw in draws) >= 150, "too few continuous actions"
    assert sum(any(launch.killed for launch in draw.launches) for draw in draws) >= 30
