"""Ids `envpool/...`: the same contract, and --env-kwargs."""

import sys

import gymnasium as gym
import numpy as np
import pytest

from common.environments import EVALUATION, TRAINING, make_envs
from common.errors import BadInput
from test_shards import same_bytes

envpool = pytest.importorskip("envpool", reason="pip install envpool==1.2.5")
SPACES = gym.spaces.Discrete, gym.spaces.Box


def has_qt() -> bool:
    try:
        envpool.make_spec("StarpilotEasy-v0")
    except ImportError:
        return False
    return True


PROCGEN = pytest.mark.skipif(not has_qt(), reason="Procgen in EnvPool needs Qt 5 (Debian: apt install libqt5gui5)")
STARPILOT = "--env-id envpool/StarpilotEasy-v0 --num-envs 4 --num-steps 16 --eval-every 0"
BREAKOUT = "--env-id envpool/Breakout-v5 --num-envs 4 --eval-every 0 --buffer-size 400 --total-timesteps 560"
BREAKOUT += " --learning-starts 480 --batch-size 16 --log-every 200"
CHEETAH = "--env-id envpool/HalfCheetah-v5 --num-envs 4 --batch-size 64 --total-timesteps 560 --learning-starts 500"
CHEETAH += """ --log-every 200 --eval-every 280 --eval-episodes 3 --env-kwargs {"max_episode_steps":100}"""
CARTPOLE = "--env-id envpool/CartPole-v1 --num-envs 8 --num-steps 32 --total-timesteps 1536 --eval-every 800"
CARTPOLE += " --eval-episodes 6"
PHASES = "--total-timesteps 128 --n-pi 2 --aux-epochs 1 --num-aux-minibatches 4"


@pytest.mark.parametrize(
    "script, flags",
    [
        ("ppo_ddp.py", CARTPOLE),
        pytest.param("ppg_ddp.py", f"{STARPILOT} {PHASES} --network impala", marks=PROCGEN),
        ("dqn_ddp.py", BREAKOUT),
        pytest.param("sac_ddp.py", CHEETAH, marks=pytest.mark.slow),
    ],
)
def test_the_same_bytes_on_one_process_and_two(script, flags, tmp_path):
    same_bytes(script, 2, flags, (1, 2), tmp_path)


IDS = ["CartPole-v1", "HalfCheetah-v5", "CheetahRun-v1", "Breakout-v5"]
IDS.append(pytest.param("StarpilotEasy-v0", marks=PROCGEN))


def played(env_id: str, indices: list[int], steps: int, before: int = 0, checkpoint: int = 0) -> dict[int, list]:
    """By global index, what an environment gives for actions that are drawn for it alone."""
    envs = make_envs(env_id, 1, TRAINING, indices, SPACES, num_threads=2)
    space, found = envs.single_action_space, {i: [] for i in indices}
    for length, number in ((before, 0), (steps, checkpoint)):
        obs, draws = envs.start(number), {i: np.random.default_rng(i) for i in indices}
        for step in range(length):
            if isinstance(space, gym.spaces.Discrete):
                actions = np.array([draws[i].integers(space.n) for i in indices])
            else:
                actions = np.array([draws[i].uniform(space.low, space.high) for i in indices], space.dtype)
            after, rewards, terminations, truncations, infos = envs.step(actions)
            for row, i in enumerate(indices):
                last = infos["final_obs"][row] if terminations[row] | truncations[row] else after[row]
                if number == checkpoint and length == steps:
                    kept = obs[row].copy(), rewards[row], terminations[row], truncations[row], last.copy(), step
                    found[i].append(kept)
            obs = after
    envs.close()
    return found


def same(one: list, two: list) -> bool:
    return all(np.array_equal(x, y) for a, b in zip(one, two, strict=True) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("task", IDS)
def test_an_environment_depends_on_its_seed_alone(task):
    """Not on what is beside it, on the threads, or on what it did before; others are others, at a checkpoint too."""
    steps = 40 if task in ("Breakout-v5", "HalfCheetah-v5") else 230
    three = played(f"envpool/{task}", [0, 1, 2], steps)
    assert not same(three[0], three[1])
    assert same(played(f"envpool/{task}", [2], steps)[2], three[2])
    anew = played(f"envpool/{task}", [1, 2], steps, before=30, checkpoint=2)
    assert same(anew[1], played(f"envpool/{task}", [1], steps, checkpoint=2)[1]) and not same(anew[1], three[1])


def test_steps_are_those_of_the_pool_but_for_the_resets():
    """The pool by itself resets in a step more, which is left out here; last observations are kept."""
    envs = make_envs("envpool/CartPole-v1", 1, TRAINING, [5], SPACES)
    raw = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=envs.seeds.tolist())
    envs.action_space.seed(0)
    np.testing.assert_array_equal(envs.start(), raw.reset()[0])
    ends = 0
    for _ in range(500):
        action = envs.action_space.sample()
        obs, *rest, infos = envs.step(action)
        expected, *others, _ = raw.step(action)
        np.testing.assert_array_equal(np.stack(rest), np.stack(others))
        if rest[1][0] or rest[2][0]:
            np.testing.assert_array_equal(infos["final_obs"][0], expected[0])
            expected, ends = raw.step(action)[0], ends + 1
        np.testing.assert_array_equal(obs, expected)
    assert ends >= 2 and (rest[1].dtype, rest[2].dtype) == (bool, bool)
    envs.close()


def test_a_dictionary_of_vectors_is_one_vector():
    """DeepMind Control's cheetah: position (8) and velocity (9), in the order of the space's keys."""
    envs = make_envs("envpool/CheetahRun-v1", 1, TRAINING, [0, 1], SPACES)
    raw, _ = envpool.make_gymnasium("CheetahRun-v1", num_envs=2, seed=envs.seeds.tolist()).reset()
    assert envs.single_observation_space.shape == (17,)
    np.testing.assert_array_equal(envs.start(), np.concatenate([raw["position"], raw["velocity"]], 1))
    envs.close()


def test_options_reach_the_simulator():
    """EnvPool's, gymnasium's, ALE's own and MuJoCo's."""

    def first(env_id: str, options: str, indices=(0, 1)) -> tuple[np.ndarray, np.ndarray]:
        envs = make_envs(env_id, 1, EVALUATION, indices, SPACES, env_kwargs=options)
        obs = envs.start().copy()
        action = np.zeros((len(indices), *envs.single_action_space.shape), envs.single_action_space.dtype)
        rewards = envs.step(action)[1]
        envs.close()
        return obs, rewards

    assert first("CartPole-v1", "{}")[1].tolist() == [1, 1]
    assert first("CartPole-v1", '{"sutton_barto_reward": true}')[1].tolist() == [0, 0]
    assert first("ALE/Breakout-v5", '{"stack_num": 2, "img_height": 40}')[0].shape == (2, 2, 40, 84)
    assert first("envpool/Breakout-v5", '{"stack_num": 2, "img_height": 40}')[0].shape == (2, 2, 40, 84)
    calm, costly = (first("envpool/Pusher-v5", x)[1] for x in ("{}", '{"dist_cost_weight": 9}'))
    assert (costly < 4 * calm).all() and (calm < 0).all()


@PROCGEN
def test_procgens_levels():
    """One level for all, where there is one; otherwise each seed has its own."""

    def levels(options: str) -> int:
        envs = make_envs("envpool/CoinrunEasy-v0", 1, TRAINING, range(6), SPACES, env_kwargs=options)
        found = len({obs.tobytes() for obs in envs.start()})
        assert not envs.channels_last and not envs.atari and envs.single_observation_space.shape == (3, 64, 64)
        envs.close()
        return found

    assert levels('{"num_levels": 1, "start_level": 7}') == 1 < levels("{}")


REFUSED = {
    ("envpool/CartPol-v1", "{}"): "--env-id envpool/CartPol-v1: .*CartPol",
    ("envpool/Chess-v1", "{}"): "--env-id envpool/Chess-v1: EnvPool's Chess-v1 has several players",
    ("envpool/CartPole-v1", '{"gravity": 1}'): "--env-kwargs .* unexpected keyword argument",
    ("envpool/Breakout-v5", '{"stack_num": 1.5}'): "--env-kwargs .*: TypeError: ",
    ("envpool/Breakout-v5", '{"img_height": 2}'): "--env-id envpool/Breakout-v5 --env-kwargs .*3-D Box, at least 3 x 3",
}


@pytest.mark.parametrize("env_id, options", REFUSED)
def test_what_a_simulator_does_not_have_is_refused_in_one_line(env_id, options):
    with pytest.raises(BadInput, match=f"^{REFUSED[env_id, options]}") as refused:
        make_envs(env_id, 1, TRAINING, range(2), SPACES, env_kwargs=options)
    assert "\n" not in str(refused.value)


def test_what_is_missing_is_said(monkeypatch):
    """EnvPool itself, and for Procgen Qt."""

    def no_qt(*args, **kwargs):
        raise ImportError("EnvPool Procgen requires the system Qt 5 runtime on Linux. Install ...")

    monkeypatch.setattr(envpool, "make_gymnasium", no_qt)
    with pytest.raises(BadInput, match="^--env-id envpool/StarpilotEasy-v0: EnvPool Procgen requires the system Qt 5"):
        make_envs("envpool/StarpilotEasy-v0", 1, TRAINING, range(2), SPACES)
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(BadInput, match="^--env-id envpool/Pong-v5: needs a package that is missing: pip install envp"):
        make_envs("envpool/Pong-v5", 1, TRAINING, range(2), SPACES)
