"""Simulators may return their own memory, lists, any infos and any type of integer: learning stays right."""

import gymnasium as gym
import numpy as np
import pytest

from common.distributed import World
from common.environments import EVALUATION, TRAINING, Environments, make_envs, open_environments
from common.episodes import evaluate
from ppo_ddp import Args
from runs import run

LENGTH = 6  # steps of an episode
PLAIN = {}
QUIRKS = {
    "infos": {"infos": True},
    "own buffer": {"reuses": True},
    "lists": {"lists": True},
    "int32": {"action_dtype": "int32"},
    "uint8": {"action_dtype": "uint8"},
}


class Quirky(gym.Env):
    """Observes the number of its steps, over all episodes; odd episodes terminate, even ones are truncated."""

    def __init__(self, infos=False, reuses=False, lists=False, action_dtype="int64"):
        self.observation_space = gym.spaces.Box(0, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2, start=3, dtype=np.dtype(action_dtype).type)
        self.infos, self.reuses, self.lists = infos, reuses, lists
        self.memory = np.zeros(2, np.float32)
        self.steps = 0
        self.episode = 0

    def observe(self):
        if self.lists:
            return [float(self.steps), 1.0]
        if not self.reuses:
            self.memory = np.zeros(2, np.float32)
        self.memory[:] = self.steps, 1.0
        return self.memory

    def info(self, over):
        if not self.infos:
            return {}
        names = {"game_over": over, "episode_frame_number": self.time, "lives": 3 - self.time % 3}
        return names | {"episode": {"r": 7.0}, "text": "lost", "array": np.ones(3)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.episode += 1
        self.steps += 100
        return self.observe(), self.info(False)

    def step(self, action):
        assert self.action_space.contains(action), action
        self.time += 1
        self.steps += 1
        over = self.time == LENGTH
        terminated = over and self.episode % 2 == 1
        return self.observe(), float(self.steps), terminated, over and not terminated, self.info(over)


gym.register("Quirky-v0", Quirky)


def opened(kwargs: str, vectorization: str) -> Environments:
    spaces = (gym.spaces.Discrete,)
    return make_envs("Quirky-v0", 1, TRAINING, range(3), spaces, vectorization, env_kwargs=kwargs)


def transitions(envs: Environments) -> list:
    """What 20 steps give: observations, rewards, ends, last observations; and the episodes that were counted."""
    found = [envs.start().tolist()]
    for step in range(20):
        obs, rewards, terminations, truncations, infos = envs.step(np.array([0, 1, step % 2]))
        last = [np.asarray(infos["final_obs"][i]).tolist() for i in np.flatnonzero(terminations | truncations)]
        found.append([obs.tolist(), rewards.tolist(), terminations.tolist(), truncations.tolist(), last])
        found.append(infos["episode_ended"].tolist())
    finished = envs.episodes.finished
    envs.close()
    return [*found, finished]


@pytest.mark.parametrize("quirk", QUIRKS)
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_simulator_with_a_quirk_gives_the_same_transitions_as_one_without(quirk, vectorization):
    import json

    plain = transitions(opened("{}", "sync"))
    assert plain == transitions(opened(json.dumps(QUIRKS[quirk]), vectorization))
    assert plain[-1][:3] == [(6 * 100 + 21, 6, i) for i in range(3)] and len(plain[-1]) == 9
    assert plain[2 * LENGTH - 1][-1] == [[106.0, 1.0]] * 3, "the first episode's last observation"


@pytest.mark.parametrize("script", ["ppo_ddp.py", "dqn_ddp.py"])
def test_a_run_learns_the_same_from_a_simulator_with_all_quirks(script, tmp_path):
    """Evaluations and counted episodes too."""
    flags = "--env-id tests.test_simulators:Quirky-v0 --num-envs 2 --eval-every 128 --eval-episodes 2 "
    own = "--num-steps 64" if script == "ppo_ddp.py" else "--learning-starts 64 --log-every 64 --batch-size 16"
    flags += f"{own} --total-timesteps 256 --env-kwargs "
    plain = run(script, 1, f"{flags} {{}}", tmp_path / "plain")
    odd = run(script, 1, f'{flags} {{"infos":true,"reuses":true,"action_dtype":"int32"}}', tmp_path / "odd")
    assert plain.rows == odd.rows
    assert plain.column("eval/episodic_length") == [LENGTH] * 3


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


class Denormal(gym.Env):
    """Rewards are made of a denormal number."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = np.full(2, 1e-30, np.float32)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        reward = (self.number * np.float32(1e-10)) * np.float32(1e35)  # 1e-40 between the two
        return np.zeros(2, np.float32), float(reward[0]), False, False, {}


gym.register("Denormal-v0", Denormal)


def test_simulators_take_denormal_numbers_alike_in_this_process_and_in_their_own():
    rewards = []
    for vectorization in ("sync", "async"):
        args = Args(env_id="Denormal-v0", num_envs=2, vectorization=vectorization, eval_every=0)
        with open_environments(args, (gym.spaces.Discrete,)) as envs:
            envs.start()
            rewards.append(envs.step(np.zeros(2, np.int64))[1].tolist())
    assert rewards == [[0.0, 0.0], [0.0, 0.0]]


def test_a_slow_simulator_is_no_hang(tmp_path, monkeypatch):
    """A step of it is progress, also where ranks meet only after more than --timeout seconds."""
    monkeypatch.setenv("LOCKSTEP_SLEEP", "0.05")
    flags = "--env-id tests.envs:SlowCartPole-v0 --num-envs 1 --total-timesteps 80 --learning-starts 70 --timeout 2"
    flags += " --train-frequency 4 --eval-every 0 --log-every 80 --batch-size 4 --save-model"
    assert run("dqn_ddp.py", 1, flags, tmp_path).code == 0


class Remembers(gym.Env):
    """Rewards are how many episodes it has begun; an episode is as long as its seed says."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)
    episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        self.left = int(self.np_random.integers(1, 40))
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(2, np.float32), float(self.episodes), self.left == 0, False, {}


gym.register("Remembers-v0", Remembers)


def test_how_long_others_play_changes_no_evaluation():
    """The third evaluation of an environment that remembers is the same alone and beside others."""

    def returns(indices) -> list[float]:
        envs = make_envs("Remembers-v0", 1, EVALUATION, indices, (gym.spaces.Discrete,))
        for _ in range(3):
            row = evaluate(lambda obs: np.zeros(len(obs), np.int64), envs, 4, World(False))
        envs.close()
        return row["eval/episodic_return"]

    alone = sum(returns([i]) for i in range(4))
    assert returns(range(4)) == pytest.approx(alone) and alone > 0
