"""Simulators may return their own memory, lists, any infos and integers: learning stays right."""

import json
from importlib.util import find_spec

import numpy as np
import pytest

from common.environments import TRAINING, Environments, Simulator, evaluate
from common.processes import World
from ppo_ddp import Args
from runs import flat, run

ENVPOOL = pytest.mark.skipif(find_spec("envpool") is None, reason="pip install envpool==1.2.5")
DRAWN = "tests.envs:Drawn-v0"


def environments(env_id: str, indices, **flags) -> Environments:
    """Training environments of these global indices, in one process of one shard."""
    return Environments(Args(env_id=env_id, **flags), TRAINING, [indices], World(False))


def transitions(vectorization: str, *quirks: str) -> list:
    """What 40 steps give, and the episodes that were counted."""
    options = {"shape": [3], "dtype": "float32", "actions": [2, 3], "remembers": True, "quirks": quirks}
    envs = environments(DRAWN, range(3), vectorization=vectorization, env_kwargs=json.dumps(options))
    found = [envs.reset().tolist()]
    for step in range(40):
        *arrays, infos = envs.step(np.array([0, 1, step % 2]))
        assert infos.keys() == {"final_obs", "episode_ended"} and [*infos["final_obs"]] == [*np.flatnonzero(arrays[-1])]
        found.append([x.tolist() for x in (*arrays, infos["episode_ended"], *infos["final_obs"].values())])
    envs.close()
    assert envs.episodes[:, 2].sum() > 4
    return [*found, envs.episodes.tolist()]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_simulators_with_quirks_give_the_same_transitions_as_one_without(vectorization):
    plain = transitions("sync")
    assert plain == transitions(vectorization, "infos", "buffer", "int32")
    assert plain == transitions(vectorization, "lists", "int8")
    simulator = Simulator(DRAWN, {"shape": [3], "dtype": "float32", "actions": [2, 0], "quirks": ["infos"]}, "")
    assert simulator.reset(seed=1)[1] == simulator.step(0)[-1] == {} != simulator.env.step(0)[-1]


@pytest.mark.parametrize("dtype", ["uint8", "bool"])
def test_vectors_of_whole_numbers_are_floats_for_networks_and_images_are_not(dtype):
    for shape, wanted in (([3], "float32"), ([5, 5, 3], dtype)):
        options = {"shape": shape, "dtype": dtype, "actions": [2, 0], "end": 0.0, "cut": 1.0}
        envs = environments(DRAWN, range(2), env_kwargs=json.dumps(options))
        last = envs.step(np.zeros(2, np.int64))[-1]["final_obs"] if envs.reset().dtype == wanted else {}
        assert envs.single_observation_space.dtype == wanted and [x.dtype for x in last.values()] == [wanted] * 2
        envs.close()


WHAT = ("the action for it", "its reward", "its observation", "its last observation")


@pytest.mark.parametrize("what", WHAT)
def test_what_is_not_finite_is_told_with_its_environment_and_step(what):
    envs = environments("Pendulum-v1", [4, 5], env_kwargs='{"max_episode_steps": 2}')
    step, actions = envs.envs.step, np.zeros((2, 1))
    envs.reset()
    envs.step(actions)

    def broken(actions):
        obs, rewards, *ends, infos = step(actions)
        dict(zip(WHAT, (np.zeros(2), rewards, obs, infos["final_obs"]), strict=True))[what][1] *= np.nan
        return obs, rewards, *ends, infos

    envs.envs.step = broken
    actions[1] = np.inf if what == WHAT[0] else 0
    message = f"environment 5, its step 2: .*{what.replace('last ', '')} is not finite"
    with pytest.raises(FloatingPointError, match=message):
        envs.step(actions)
    envs.close()


def test_evaluations_change_nothing_that_an_environment_draws_from_libraries(tmp_path):
    flags = "--env-id tests.envs:LibraryCartPole-v0 --num-steps 16 --total-timesteps 256 --eval-episodes 2 --save-model"
    never, often = (run("ppo_ddp.py", 1, f"{flags} --eval-every {x}", tmp_path / x) for x in ("0", "64"))
    assert len(often.column("eval/episodic_return")) == 5
    assert never.rows == [row for row in often.rows if not row["eval/episodes"]]
    assert all(a.equal(b) for (_, a), (_, b) in zip(flat(never.model), flat(often.model), strict=True))


def test_the_action_that_may_stick_in_minatar_does_not_outlive_its_episode():
    envs = environments("MinAtar/Breakout-v1", range(1))
    envs.reset()
    game = envs.envs.envs[0].unwrapped.game
    for _ in range(100):
        before, infos = game.last_action, envs.step(np.full(1, envs.single_action_space.n - 1))[-1]
        if infos["episode_ended"][0]:
            break
    assert before > 0 == game.last_action and infos["episode_ended"][0]
    envs.close()


def test_a_game_that_its_limit_of_frames_ends_is_counted():
    """Also where the next game's no-ops take more frames than the limit."""
    envs = environments("ALE/Breakout-v5", range(4), env_kwargs='{"max_num_frames_per_episode": 20}')
    envs.reset()
    truncated = 0
    for _ in range(60):
        _, _, _, truncations, infos = envs.step(np.zeros(4, np.int64))
        assert np.array_equal(infos["episode_ended"], truncations)
        truncated += truncations.sum()
    envs.close()
    assert truncated > 20 and envs.episodes[:, 2].sum() == truncated


def test_atari_games_take_every_action():
    games = []
    for probability in ("", ', "repeat_action_probability": 0.0', ', "repeat_action_probability": 0.25'):
        options = f'{{"img_height": 12, "img_width": 12{probability}}}'
        envs = environments("ALE/Breakout-v5", range(4), env_kwargs=options)
        actions = np.random.default_rng(0).integers(0, 4, (200, 4))
        games.append(np.stack([envs.reset().copy(), *(envs.step(x)[0].copy() for x in actions)]))
        envs.close()
    plain, never, sometimes = games
    assert np.array_equal(plain, never) and not np.array_equal(plain, sometimes)


def test_an_evaluation_depends_on_nothing_before_or_beside_it():
    args = Args(env_id=DRAWN, env_kwargs='{"shape": [3], "dtype": "float32", "actions": [2, 0], "remembers": true}')
    args.eval_episodes, world = 4, World(False, 4)

    def mean(shards: range) -> float:
        world.shards = shards
        return evaluate(lambda obs: np.zeros(len(obs), np.int64), args, world)[0]["eval/episodic_return"]

    alone = sum(mean(range(i, i + 1)) for i in range(4))
    together = mean(range(4))
    assert mean(range(4)) == together == pytest.approx(alone) and alone != 0
    args.vectorization = "async"  # in processes of their own
    assert mean(range(4)) == together


@pytest.mark.parametrize(
    "env_id, more", [("Pendulum-v1", ',"g":5.0'), pytest.param("envpool/Pendulum-v1", "", marks=ENVPOOL)]
)
def test_options_reach_a_runs_training_evaluation_and_films(env_id, more, tmp_path):
    flags = f"--env-id {env_id} --num-envs 4 --num-steps 32 --total-timesteps 128 --eval-episodes 2"
    flags += f' --capture-video --env-kwargs {{"max_episode_steps":16{more}}}'
    done = run("ppo_ddp.py", 1, flags, tmp_path / "run")
    assert set(done.column("charts/episodic_length")) == set(done.column("eval/episodic_length")) == {16.0}
    assert len(list((done.dir / "videos").iterdir())) == 2, done.out  # played again to the same return
