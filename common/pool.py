"""EnvPool's environments (ids `envpool/...`), C++ simulators stepped in threads, as gymnasium's vector environments."""

from __future__ import annotations

import difflib
import functools
import json
import subprocess
import sys
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

# options of `envpool.make_gymnasium` that the program sets, or that would hide what it counts
OURS = {"num_envs", "batch_size", "num_threads", "max_num_players", "thread_affinity_offset", "base_path", "seed"}
OURS |= {"env_seed", "gym_reset_return_info", "env_name", "task", "task_name", "reward_clip", "episodic_life"}
OURS |= {"zero_discount_on_life_loss", "render_mode", "render_env_id"}
COUNTS = {"max_episode_steps", "frame_skip", "stack_num", "frame_stack", "img_height", "img_width"}
PICTURES = {"render_width", "render_height", "render_camera_id"}
TRIAL = """
import json, signal, sys, envpool, numpy
signal.alarm(60)
task = sys.argv[1]
options = {name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(sys.argv[2]).items()}

def step(**more):
    env = envpool.make_gymnasium(task, num_envs=1, seed=[0], **options | more)
    env.reset()
    truncations = env.step(numpy.asarray(env.action_space.sample())[None])[3]
    if "render_mode" in options:
        env.render()
    return truncations

try:
    step()
except TypeError as error:
    if "keyword" in str(error):  # an option that the task lacks
        sys.exit(str(error))
    defaults = envpool.make_spec(task).config._asdict()
    wrong = {name: x for name, x in options.items() if type(x) is not type(defaults.get(name, x))}
    sys.exit("".join(f"{name} {x!r}: must be such as {defaults[name]!r}. " for name, x in wrong.items()) or "too large")
if "max_episode_steps" in options and not step(max_episode_steps=1).any():
    sys.exit("it ignores max_episode_steps; leave that out")
"""


class Pool(VectorEnv):
    """EnvPool environments that reset in the step that ends an episode, each from a seed of its own.

    EnvPool takes seeds only when it makes environments, so `reset` makes them anew. A dictionary of vectors and
    numbers is observed as one vector, in the order of its keys. Of an Atari game, `game_over` in the infos tells where
    the whole game ended; with `life_loss` a lost life terminates, and the game goes on.
    Raises `gym.error.Error` for an unknown task, one of several players or one that cannot be made, and `ValueError`
    for options that do not work.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self, task: str, num_envs: int, num_threads: int, options: dict[str, Any], life_loss: bool, draws: bool = False
    ) -> None:
        import envpool

        if task not in (tasks := envpool.list_all_envs()):
            near = difflib.get_close_matches(task, tasks, 3, 0.5) or tasks[:3]
            raise gym.error.NameNotFound(f"EnvPool has no {task}; it has {', '.join(near)}, ...")
        self.num_envs, self.render_mode = num_envs, "rgb_array" if draws else None
        if draws:
            options = options | {"render_mode": self.render_mode}
        if options:
            require_works(task, json.dumps(options))
        options = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}  # JSON has no tuples
        threads = min(num_threads, num_envs)
        self.make = functools.partial(envpool.make_gymnasium, task, num_threads=threads, **options)
        try:
            one = self.make(num_envs=1, seed=[0])
        except RuntimeError as error:
            raise gym.error.Error(f"EnvPool cannot make {task}: {error}") from error
        config = one.spec.config._asdict()
        if config["max_num_players"] > 1:
            raise gym.error.Error(f"EnvPool's {task} has several players; it must have one.")
        self.atari = "full_action_space" in config
        self.life_loss = self.atari and life_loss
        self.stack = config["stack_num"] if self.atari and config["gray_scale"] else 1  # frames of an observation
        with warnings.catch_warnings(action="ignore"):  # that bounds of spaces lose digits
            space, self.single_action_space = one.observation_space, one.action_space
        self.parts: list[str] = []  # of a dictionary
        if isinstance(space, gym.spaces.Dict) and all(is_vector(part) for part in space.spaces.values()):
            self.parts, space = list(space.spaces), gym.spaces.flatten_space(space)
        self.single_observation_space, self.observation_space = space, batch_space(space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def _observed(self, obs: Any) -> np.ndarray:
        if not self.parts:
            return obs
        return np.concatenate([np.reshape(obs[name], (len(obs[name]), -1)) for name in self.parts], 1)

    def reset(self, *, seed: list[int], options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.pool = None  # its threads end before others begin
        with warnings.catch_warnings(action="ignore"):
            self.pool = self.make(num_envs=self.num_envs, seed=seed)
            obs, infos = self.pool.reset()
        self.lives = infos.get("lives")
        return self._observed(obs), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        obs, rewards, terminations, truncations, info = self.pool.step(actions)
        obs, ended, infos = self._observed(obs), terminations | truncations, {}
        if self.atari:
            infos["game_over"] = ended
        if self.life_loss:
            terminations, self.lives = terminations | (info["lives"] < self.lives), info["lives"]
        if ended.any():
            ids = np.flatnonzero(ended)
            infos["final_obs"] = {i: obs[i].copy() for i in ids}
            first, info = self.pool.reset(ids)
            obs[ids] = self._observed(first)
            if self.life_loss:
                self.lives[ids] = info["lives"]
        return obs, rewards, terminations, truncations, infos

    def render(self) -> np.ndarray:
        return self.pool.render()

    def close_extras(self, **kwargs: Any) -> None:
        self.pool = None


def is_vector(space: gym.Space) -> bool:
    return isinstance(space, gym.spaces.Box) and len(space.shape) <= 1 and np.issubdtype(space.dtype, np.floating)


@functools.cache
def require_works(task: str, options: str) -> None:
    """Raise `ValueError` for options (JSON) that a task lacks, dies of, or ignores, as some do the limit of steps.

    It is tried in a process of its own, since what a simulator cannot do, such as drawing without OpenGL, may end it.
    """
    for name, value in json.loads(options).items():
        if name in COUNTS and isinstance(value, int) and value < 1:
            raise ValueError(f"{name} {value}: must be at least 1")
        if name in PICTURES and '"from_pixels": true' not in options:
            raise ValueError(f"{task} ignores {name} without from_pixels; leave that out")
    command = [sys.executable, "-c", TRIAL, task, options]  # in a session of its own: Ctrl-C spares it
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).splitlines()[-3:]) or f"exit code {done.returncode}"
        raise ValueError(f"EnvPool's {task} does not run so here: {said}")
