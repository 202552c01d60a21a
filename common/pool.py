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
PICTURE = """
import json, sys, envpool
env = envpool.make_gymnasium(sys.argv[1], num_envs=1, render_mode="rgb_array", **json.loads(sys.argv[2]))
env.reset(), env.render()
"""


class Pool(VectorEnv):
    """EnvPool environments that reset in the step that ends an episode, each from a seed of its own.

    EnvPool takes seeds only when it makes environments, so `reset` makes them anew. A dictionary of vectors and
    numbers is observed as one vector, in the order of its keys. Of an Atari game, `game_over` in the infos tells where
    the whole game ended; with `life_loss` a lost life terminates, and the game goes on.
    Raises `gym.error.Error` for an unknown task or one of several players, and `TypeError` naming an option that it
    lacks, or a value of a wrong type.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self, task: str, num_envs: int, num_threads: int, options: dict[str, Any], life_loss: bool, draws: bool = False
    ) -> None:
        import envpool

        if task not in (tasks := envpool.list_all_envs()):
            near = difflib.get_close_matches(task, tasks, 3, 0.5) or tasks[:3]
            raise gym.error.NameNotFound(f"EnvPool has no {task}; it has {', '.join(near)}, ...")
        config = envpool.make_spec(task).config._asdict()
        for name, value in options.items():
            if name not in config.keys() | PIXELS:
                raise TypeError(f"{task} has no {name}; it has {', '.join(sorted(config.keys() - OURS))}")
            wanted = type(config.get(name, value))
            if not isinstance(value, (int, float) if wanted is float else wanted):
                raise TypeError(f"{name} {value!r}: must be of type {wanted.__name__}, such as {config[name]!r}")
        config |= options
        if config["max_num_players"] > 1:
            raise gym.error.Error(f"EnvPool's {task} has several players; it must have one.")
        self.atari = "full_action_space" in config
        self.stack = config["stack_num"] if self.atari and config["gray_scale"] else 1  # frames of an observation
        self.life_loss, self.num_envs, self.render_mode = self.atari and life_loss, num_envs, None
        options = options | {"num_threads": min(num_threads, num_envs)}
        if draws:
            require_picture(task, json.dumps(options))
            self.render_mode = options["render_mode"] = "rgb_array"
        self.make = functools.partial(envpool.make_gymnasium, task, **options)
        trial = self.make(num_envs=1, seed=[0])  # so that what is wrong shows here
        with warnings.catch_warnings():  # that bounds of spaces lose digits
            warnings.simplefilter("ignore")
            space, self.single_action_space = trial.observation_space, trial.action_space
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


@functools.cache
def require_picture(task: str, options: str) -> None:
    """Raise `RuntimeError` where EnvPool cannot draw: of MuJoCo, without OpenGL, it ends the process that tries."""
    done = subprocess.run([sys.executable, "-c", PICTURE, task, options], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"EnvPool cannot draw {task} here: {' '.join(done.stderr.split()[-12:])}")
