"""Ids `envpool/...`: the same contract, and --env-kwargs."""

import re
import sys
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
from test_simulators import environments

from common.environments import Environments
from common.pool import Pool
from common.processes import BadInput
from runs import run, same_run

envpool = pytest.importorskip("envpool", reason="pip install envpool==1.2.5")


def has_qt() -> bool:
    try:
        envpool.make_spec("StarpilotEasy-v0")
    except (ImportError, KeyError):  # KeyError: an EnvPool without Procgen
        return False
    return True


PROCGEN = pytest.mark.skipif(not has_qt(), reason="Procgen in EnvPool needs Qt 5 (Debian: apt install libqt5gui5)")
STARPILOT = "--env-id envpool/StarpilotEasy-v0 --num-envs 4 --num-steps 16 --eval-every 0"
BREAKOUT = "--env-id envpool/Breakout-v5 --num-envs 4 --eval-every 0 --buffer-size 400 --total-timesteps 560"
BREAKOUT += " --learning-starts 480 --batch-size 16 --log-every 200"
CARTPOLE = "--env-id envpool/CartPole-v1 --num-envs 8 --num-steps 32 --total-timesteps 1536 --eval-every 800"
CARTPOLE += " --eval-episodes 6"
PHASES = "--total-timesteps 128 --n-pi 2 --aux-epochs 1 --num-aux-minibatches 4"
CASES = [
    ("ppo_ddp.py", CARTPOLE),
    pytest.param("ppg_ddp.py", f"{STARPILOT} {PHASES} --network impala", marks=PROCGEN),
    ("dqn_ddp.py", BREAKOUT),
]


@pytest.mark.parametrize("script, flags", CASES)
def test_the_same_bytes_on_one_process_and_two(script, flags, tmp_path):
    runs = [run(script, n, f"{flags} --shards 2 --save-model", tmp_path / f"{n}", "float32") for n in (1, 2)]
    assert same_run(*runs) == "" and len(runs[0].rows) >= 2


IDS = ["CartPole-v1", "HalfCheetah-v5", "CheetahRun-v1", "Breakout-v5"]
IDS.append(pytest.param("StarpilotEasy-v0", marks=PROCGEN))


def played(task: str, indices: list[int], steps: int, before: int = 0, checkpoint: int = 0) -> dict[int, list]:
    """By global index, what an environment gives for actions that are drawn for it alone."""
    envs = environments(f"envpool/{task}", indices, num_threads=2)
    space = envs.single_action_space
    for length, number in ((before, 0), (steps, checkpoint)):
        draws, obs, found = [np.random.default_rng(i) for i in indices], envs.reset(number), {i: [] for i in indices}
        for _ in range(length):
            if isinstance(space, gym.spaces.Discrete):
                actions = np.array([draw.integers(space.n) for draw in draws])
            else:
                actions = np.array([draw.uniform(space.low, space.high) for draw in draws], space.dtype)
            old = obs.copy()
            obs, *arrays, infos = envs.step(actions)
            for row, i in enumerate(indices):
                last = infos["final_obs"].get(row, obs[row]).copy()
                found[i].append([old[row], *(x[row] for x in (*arrays, infos["episode_ended"])), last])
    envs.close()
    return found


def same(one: list, two: list) -> bool:
    return all(np.array_equal(x, y) for a, b in zip(one, two, strict=True) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("task", IDS)
def test_an_environment_depends_on_its_seed_alone(task):
    """Not on what is beside it, on threads, or on what was before; others are others."""
    steps = 40 if task in ("Breakout-v5", "HalfCheetah-v5") else 230
    three = played(task, [0, 1, 2], steps)
    assert not same(three[0], three[1])
    assert same(played(task, [2], steps)[2], three[2])
    anew = played(task, [1, 2], steps, before=30, checkpoint=2)
    assert same(anew[1], played(task, [1], steps, checkpoint=2)[1]) and not same(anew[1], three[1])


def test_steps_are_those_of_envpool_but_for_the_resets():
    """EnvPool by itself resets in a step more, which is left out here."""
    pool, raw = Pool("CartPole-v1", 1, 1, False, {}), envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=[5])
    np.testing.assert_array_equal(pool.reset(seed=[5])[0], raw.reset()[0])
    draws, ends = np.random.default_rng(0), 0
    for action in draws.integers(2, size=(500, 1)):
        obs, *rest, infos = pool.step(action)
        expected, *others, _ = raw.step(action)
        np.testing.assert_array_equal(np.stack(rest), np.stack(others))
        if rest[1][0] or rest[2][0]:
            np.testing.assert_array_equal(infos["final_obs"][0], expected[0])
            expected, ends = raw.step(action)[0], ends + 1
        np.testing.assert_array_equal(obs, expected)
    assert ends >= 2 and (rest[1].dtype, rest[2].dtype) == (bool, bool)


def first(env_id: str, options: str = "{}", indices=(0, 1)) -> tuple[np.ndarray, np.ndarray, Environments]:
    """The first observations, the rewards of a step, and the closed environments."""
    envs = environments(env_id, indices, env_kwargs=options)
    obs, space = envs.reset().copy(), envs.single_action_space
    rewards = envs.step(np.zeros((len(indices), *space.shape), space.dtype))[1]
    envs.close()
    return obs, rewards, envs


def test_a_dictionary_of_vectors_is_one_vector():
    """DeepMind Control's cheetah: position (8) and velocity (9), in the order of the space's keys."""
    obs, _, envs = first("envpool/CheetahRun-v1")
    raw, _ = envpool.make_gymnasium("CheetahRun-v1", num_envs=2, seed=envs.seeds).reset()
    assert envs.single_observation_space.shape == (17,)
    np.testing.assert_array_equal(obs, np.concatenate([raw["position"], raw["velocity"]], 1))


def test_options_reach_the_simulator():
    assert first("CartPole-v1")[1].tolist() == [1, 1]
    assert first("CartPole-v1", '{"sutton_barto_reward": true}')[1].tolist() == [0, 0]
    for env_id in ("ALE/Breakout-v5", "envpool/Breakout-v5"):
        assert first(env_id, '{"stack_num": 2, "img_height": 40}')[0].shape == (2, 2, 40, 84)
    calm, costly = (first("envpool/Pusher-v5", x)[1] for x in ("{}", '{"dist_cost_weight": 9}'))
    assert (costly < 4 * calm).all() and (calm < 0).all()


@PROCGEN
def test_procgens_levels():
    """One level for all, where there is one; otherwise each seed has its own."""
    for options, fewest, most in (('{"num_levels": 1, "start_level": 7}', 1, 1), ("{}", 2, 6)):
        obs, _, envs = first("envpool/CoinrunEasy-v0", options, range(6))
        assert fewest <= len({x.tobytes() for x in obs}) <= most
        assert not envs.channels_last and not envs.atari and envs.single_observation_space.shape == (3, 64, 64)


REFUSED = {
    ("CartPol-v1", "{}"): "EnvPool cannot make CartPol-v1",
    ("Chess-v1", "{}"): "EnvPool's Chess-v1 has several players",
    ("CartPole-v1", '{"gravity": 1}'): "unexpected keyword argument",
    ("Breakout-v5", '{"stack_num": 1.5}'): "incompatible",
    ("StarpilotEasy-v0", "{}"): "EnvPool Procgen requires the system Qt 5",
    ("Pong-v5", "{}"): "envpool",
    ("FrozenLake-v1", "{}"): "its observations, Discrete.*make no vector",
}


@pytest.mark.parametrize("task, options", REFUSED)
def test_what_a_simulator_does_not_have_is_refused_in_one_line(task, options, monkeypatch):
    """Also where EnvPool itself is missing, or for Procgen Qt."""
    if task == "StarpilotEasy-v0":
        error = ImportError("EnvPool Procgen requires the system Qt 5 runtime on Linux. Install ...")
        monkeypatch.setattr(envpool, "make_gymnasium", mock.Mock(side_effect=error))
    if task == "Pong-v5":
        monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(BadInput) as refused:
        environments(f"envpool/{task}", range(2), env_kwargs=options)
    said = str(refused.value)
    assert re.match(rf"--env-id envpool/{task}[ :].*{REFUSED[task, options]}", said) and "\n" not in said
