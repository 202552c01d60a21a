"""EnvPool's environments (ids `envpool/...`), which C++ threads simulate, as a gymnasium vector."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv


class Pool(VectorEnv):
    """A dictionary is observed as one vector. With `life_loss` a lost life of an Atari game terminates.

    Raises `gym.error.Error` for a task that EnvPool cannot make.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, task: str, num_envs: int, threads: int, life_loss: bool, options: dict[str, Any]) -> None:
        import envpool

        self.num_envs = num_envs
        self.make = partial(envpool.make_gymnasium, task, num_threads=threads, **options)
        try:
            one = self.make(num_envs=1, seed=[0])
        except (AssertionError, RuntimeError) as error:
            raise gym.error.Error(f"EnvPool cannot make {task}: {error}") from error
        config = one.spec.config._asdict()
        if config["max_num_players"] > 1:
            raise gym.error.Error(f"EnvPool's {task} has several players; it must have one.")
        self.atari = "full_action_space" in config
        self.life_loss = self.atari and life_loss
        space = one.observation_space
        self.single_action_space = one.action_space
        self.keys = list(space.spaces) if isinstance(space, gym.spaces.Dict) else []
        self.single_observation_space = gym.spaces.flatten_space(space) if self.keys else space

    def _as_array(self, obs: Any) -> np.ndarray:
        parts = [obs[key].reshape(len(obs[key]), -1) for key in self.keys]
        return np.concatenate(parts, 1) if parts else obs

    def reset(self, *, seed: list[int], options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.pool = None  # its threads end before others begin
        self.pool = self.make(num_envs=self.num_envs, seed=seed)  # it takes no seeds later
        obs, infos = self.pool.reset()
        self.lives = infos.get("lives")
        return self._as_array(obs), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        obs, rewards, terminations, truncations, pool_infos = self.pool.step(actions)
        obs = self._as_array(obs)
        dones = terminations | truncations
        infos = {"game_over": dones}
        if self.life_loss:
            terminations = terminations | (pool_infos["lives"] < self.lives)
            self.lives = pool_infos["lives"]
        if dones.any():
            ids = np.flatnonzero(dones)
            infos["final_obs"] = {i: obs[i].copy() for i in ids}
            first_obs, reset_infos = self.pool.reset(ids)
            obs[ids] = self._as_array(first_obs)
            if self.life_loss:
                self.lives[ids] = reset_infos["lives"]
        return obs, rewards, terminations, truncations, infos

    def render(self) -> np.ndarray:
        return self.pool.render()

    def close_extras(self, **kwargs: Any) -> None:
        self.pool = None
