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
PIXELS = {"from_pixels", "render_width", "render_height", "render_camera_id"}  # which MuJoCo's have beside their own
COUNTS = {"max_episode_steps", "frame_skip", "stack_num", "frame_stack", "img_height", "img_width"}
TRIAL = """
import json, sys, envpool, numpy
options = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(sys.argv[2]).items()}
env = envpool.make_gymnasium(sys.argv[1], num_envs=1, seed=[0], **options)
env.reset()
env.step(numpy.asarray(env.action_space.sample())[None])
if "max_episode_steps" in options:
    short = envpool.make_gymnasium(sys.argv[1], num_envs=1, seed=[0], **options | {"max_episode_steps": 1})
    short.reset()
    if not short.step(numpy.asarray(short.action_space.sample())[None])[3].any():
        sys.exit("it ignores max_episode_steps; leave that out")
if "render_mode" in options:
    env.render()
"""


class Pool(VectorEnv):
    """EnvPool environments that reset in the step that ends an episode, each from a seed of its own.

    EnvPool takes seeds only when it makes environments, so `reset` makes them anew. A dictionary of vectors and
    numbers is observed as one vector, in the order of its keys. Of an Atari game, `game_over` in the infos tells where
    the whole game ended; with `life_loss` a lost life terminates, and the game goes on.
    Raises `gym.error.Error` for an unknown task, one of several players or one that cannot be made, `TypeError` or
    `ValueError` naming an option that it lacks or a wrong value, and `RuntimeError` for options that do not work.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self, task: str, num_envs: int, num_threads: int, options: dict[str, Any], life_loss: bool, draws: bool = False
    ) -> None:
        import envpool

        if task not in (tasks := envpool.list_all_envs()):
            near = difflib.get_close_matches(task, tasks, 3, 0.5) or tasks[:3]
            raise gym.error.NameNotFound(f"EnvPool has no {task}; it has {', '.join(near)}, ...")
        config = options_of(task, options)
        for name, value in options.items():
            if name not in config.keys() | (PIXELS if options.get("from_pixels") else {"from_pixels"}):
                raise TypeError(f"{task} has no {name}; it has {', '.join(sorted(config.keys() - OURS))}")
            wanted = type(config.get(name, value))
            if wanted is tuple and isinstance(value, list):  # JSON has no tuples
                options = options | {name: tuple(value)}
            elif not isinstance(value, (int, float) if wanted is float else wanted):
                raise TypeError(f"{name} {value!r}: must be of type {wanted.__name__}, such as {config[name]!r}")
            least = 1 if name in COUNTS else -(2**31)
            if isinstance(value, int) and not least <= value < 2**31:
                raise ValueError(f"{name} {value}: must be from {least} to {2**31 - 1}")
        config |= options
        if config["max_num_players"] > 1:
            raise gym.error.Error(f"EnvPool's {task} has several players; it must have one.")
        self.atari = "full_action_space" in config
        self.stack = config["stack_num"] if self.atari and config["gray_scale"] else 1  # frames of an observation
        self.life_loss, self.num_envs, self.render_mode = self.atari and life_loss, num_envs, None
        if draws:
            self.render_mode = "rgb_array"
            options = options | {"render_mode": self.render_mode}
        if options:
            require_works(task, json.dumps(options))
        self.make = functools.partial(envpool.make_gymnasium, task, num_threads=min(num_threads, num_envs), **options)
        try:
            one = self.make(num_envs=1, seed=[0])
        except RuntimeError as error:
            raise gym.error.Error(f"EnvPool cannot make {task}: {error}") from error
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
        obs, rewards, terminations, truncations, infos = self.pool.step(actions)
        obs, ended, told = self._observed(obs), terminations | truncations, {}
        if self.atari:
            told["game_over"] = ended
        if self.life_loss:
            terminations, self.lives = terminations | (infos["lives"] < self.lives), infos["lives"]
        if ended.any():
            ids = np.flatnonzero(ended)
            told["final_obs"] = {i: obs[i].copy() for i in ids}
            first, infos = self.pool.reset(ids)
            obs[ids] = self._observed(first)
            if self.life_loss:
                self.lives[ids] = infos["lives"]
        return obs, rewards, terminations, truncations, told

    def render(self) -> np.ndarray:
        return self.pool.render()

    def close_extras(self, **kwargs: Any) -> None:
        self.pool = None


def is_vector(space: gym.Space) -> bool:
    return isinstance(space, gym.spaces.Box) and len(space.shape) <= 1 and np.issubdtype(space.dtype, np.floating)


def options_of(task: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a task has, with their defaults; ViZDoom's own task exists only with those given."""
    import envpool

    for given in ({}, options):
        try:
            return envpool.make_spec(task, **given).config._asdict()
        except RuntimeError as error:
            fault = error
    raise gym.error.Error(f"EnvPool cannot make {task}: {fault}")


@functools.cache
def require_works(task: str, options: str) -> None:
    """Raise `RuntimeError` where a task does not start with these options (JSON), or ignores the limit of steps.

    It is tried in a process of its own, since what a simulator cannot do, such as drawing without OpenGL, may end it.
    """
    command = [sys.executable, "-c", TRIAL, task, options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:  # a session of its own: Ctrl-C spares it
        done = subprocess.run(command, **pipes, text=True, timeout=60, start_new_session=True)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"EnvPool's {task} does not start so in 60 seconds") from error
    if done.returncode:
        said = " ".join(" ".join(done.stdout.splitlines()[-3:]).split())
        raise RuntimeError(f"EnvPool's {task} does not run so here: {said or f'exit code {done.returncode}'}")
