"""A few draws of tests/fuzz.py, and that it finds what is broken."""

import pytest

import fuzz

FEW = {"ppo": 8, "ppg": 25, "dqn": 7, "sac": 6}  # draws of seed 1 that are short, of each script


@pytest.fixture(scope="module")
def servers():
    started = fuzz.Servers()
    yield started
    started.close()


@pytest.mark.parametrize("script, number", FEW.items())
def test_a_drawn_experiment_has_the_same_bytes_on_any_number_of_processes(script, number, servers):
    draw = fuzz.drawn(1, number)
    assert draw.script == script
    assert fuzz.tried(draw, servers) == "same"


def test_a_break_is_found(servers):
    """What depends on the number of processes by 1e-6, here the normaliser of a killed and resumed run, parts."""
    assert fuzz.tried(fuzz.drawn(1, FEW["ppo"]), servers, "normaliser").startswith("part in row")


def test_draws_repeat_and_vary():
    assert fuzz.drawn(3, 14) == fuzz.drawn(3, 14)
    draws = [fuzz.drawn(3, number) for number in range(300)]
    assert {draw.script for draw in draws} == set(fuzz.LOSSES) and {bool(draw.edit) for draw in draws} == {True, False}
    continuous = [draw for draw in draws if "action_dtype" in draw.flags["env-kwargs"]]
    assert len(continuous) >= 150
    assert any(launch.killed for draw in draws for launch in draw.launches)
