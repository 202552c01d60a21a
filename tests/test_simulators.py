"""Simulators may return their own memory, lists, any infos and any type of integer: learning stays right."""

import json
from importlib.util import find_spec

import gymnasium as gym
import numpy as np
import pytest

from common.distributed import World
from common.environments import EVALUATION, TRAINING, make_envs
from common.episodes import evaluate
from runs import run

ENVPOOL = pytest.mark.skipif(find_spec("envpool") is None, reason="pip install envpool==1.2.5")


def transitions(vectorization: str, *quirks: str) -> list:
    """What 40 steps give: observations, rewards, ends, last observations; and the episodes that were counted."""
    options = {"shape": [3], "dtype": "float32", "actions": [2, 3], "remembers": True, "quirks": quirks}
    envs = make_envs(
        *("tests.envs:Drawn-v0", 1, TRAINING, range(3), (gym.spaces.Discrete,), vectorization),
        env_kwargs=json.dumps(options),
    )
    found = [envs.start().tolist()]
    for step in range(40):
        obs, rewards, terminations, truncations, infos = envs.step(np.array([0, 1, step % 2]))
        last = [np.asarray(infos["final_obs"][i]).tolist() for i in np.flatnonzero(terminations | truncations)]
        found.append([obs.tolist(), rewards.tolist(), terminations.tolist(), truncations.tolist(), last])
        found.append(infos["episode_ended"].tolist())
    finished = envs.episodes.finished
    envs.close()
    assert len(finished) > 4
    return [*found, finished]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_simulators_with_quirks_give_the_same_transitions_as_one_without(vectorization):
    """Their own infos, buffers, lists and types of integers, in this process and in processes of their own."""
    plain = transitions("sync")
    assert plain == transitions(vectorization, "infos", "buffer", "int32")
    assert plain == transitions(vectorization, "infos of resets", "lists", "int8")


def test_a_game_that_its_limit_of_frames_ends_is_counted():
    """Also where the next game's no-ops take more frames than the limit."""
    limited = '{"max_num_frames_per_episode": 20}'
    envs = make_envs("ALE/Breakout-v5", 1, TRAINING, range(4), (gym.spaces.Discrete,), env_kwargs=limited)
    envs.start()
    truncated = 0
    for _ in range(60):
        _, _, _, truncations, infos = envs.step(np.zeros(4, np.int64))
        assert np.array_equal(infos["episode_ended"], truncations)
        truncated += truncations.sum()
    envs.close()
    assert truncated > 20 and len(envs.episodes.finished) == truncated


def test_atari_games_take_every_action():
    """None is replaced by the one before, as those registered as ALE/...-v5 do with probability 0.25."""

    def played(probability: str) -> np.ndarray:
        options = f'{{"img_height": 12, "img_width": 12{probability}}}'
        envs = make_envs("ALE/Breakout-v5", 1, TRAINING, range(4), (gym.spaces.Discrete,), env_kwargs=options)
        actions = np.random.default_rng(0).integers(0, 4, (200, 4))
        frames = [envs.start().copy(), *(envs.step(x)[0].copy() for x in actions)]
        envs.close()
        return np.stack(frames)

    game = played("")
    assert np.array_equal(game, played(', "repeat_action_probability": 0.0'))
    assert not np.array_equal(game, played(', "repeat_action_probability": 0.25'))


def test_how_long_others_play_changes_no_evaluation():
    """The third evaluation of an environment that remembers is the same alone and beside others."""

    def returns(indices) -> list[float]:
        options = '{"shape": [3], "dtype": "float32", "actions": [2, 0], "remembers": true}'
        envs = make_envs("tests.envs:Drawn-v0", 1, EVALUATION, indices, (gym.spaces.Discrete,), env_kwargs=options)
        for _ in range(3):
            row = evaluate(lambda obs: np.zeros(len(obs), np.int64), envs, 4, World(False))
        envs.close()
        return row["eval/episodic_return"]

    alone = sum(returns([i]) for i in range(4))
    assert returns(range(4)) == pytest.approx(alone) and alone != 0


@pytest.mark.parametrize(
    "env_id, more", [("Pendulum-v1", ',"g":5.0'), pytest.param("envpool/Pendulum-v1", "", marks=ENVPOOL)]
)
def test_options_reach_a_runs_training_evaluation_and_films(env_id, more, tmp_path):
    flags = f"--env-id {env_id} --num-envs 4 --num-steps 32 --total-timesteps 128 --eval-episodes 2"
    flags += f' --capture-video --env-kwargs {{"max_episode_steps":16{more}}}'
    done = run("ppo_ddp.py", 1, flags, tmp_path / "run")
    assert set(done.column("charts/episodic_length")) == set(done.column("eval/episodic_length")) == {16.0}
    assert len(list((done.dir / "videos").iterdir())) == 2, done.out  # played again to the same return
