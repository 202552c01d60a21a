"""The simulators behind an --env-id: ALE's own vector environments, EnvPool's, MinAtar's and gymnasium's."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from common.watchdog import end_with_parent

# of simulators in C++, options that would break the same experiment everywhere, or hide what is counted
RESERVED_OPTIONS = {
    "ALE": {"game", "batch_size", "autoreset_mode", "reward_clipping", "life_loss_info", "episodic_life"},
    "envpool": {"num_envs", "batch_size", "seed", "env_seed", "reward_clip", "episodic_life"},
}
FILM_OPTIONS = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}  # of ALE
MAKE_ANEW = {"make_anew": True}  # an option of `reset`


def make_vec(
    env_id: str,
    num_envs: int,
    seed: int,
    options: dict[str, Any],
    vectorization: str = "sync",
    num_threads: int = 1,
    life_loss: bool = False,
    draws: bool = False,
    one_episode: bool = False,
) -> VectorEnv:
    """The bare environments of an id, which reset in the step that ends an episode. `draws`: for films.

    `one_episode`: those in Python stand still after an episode. `seed`: of libraries, while they are made.
    """
    module, colon, _ = env_id.rpartition(":")
    if colon and not all(word.isidentifier() for word in module.split(".")):
        raise gym.error.Error("must be an id, such as CartPole-v1, or module:id, such as my.envs:Mine-v0.")
    seed_libraries(seed)
    family = env_id.partition("/")[0]
    same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
    if family == "envpool":
        from common.pool import Pool

        return Pool(env_id.removeprefix("envpool/"), num_envs, num_threads, options, life_loss, draws)
    if family == "ALE":
        import ale_py

        gym.register_envs(ale_py)
        own = {
            "num_threads": min(num_threads, num_envs),
            "life_loss_info": life_loss,
            "reward_clipping": False,  # statistics count the score; scripts take the sign
            "repeat_action_probability": 0.0,  # as in the published results for NoFrameskip-v4
        }
        own |= same_step | options | (FILM_OPTIONS if draws else {})
        return gym.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point", **own)
    if family == "MinAtar":
        from minatar.gym import register_envs

        if "MinAtar/Breakout-v1" not in gym.registry:
            register_envs()
    if draws:
        options = {"render_mode": "rgb_array"} | options
    make = partial(gym.make, env_id, **options)
    wrapper = partial(Simulator, make=make, one_episode=one_episode, minatar=family == "MinAtar")
    own = {"wrappers": [wrapper], "vector_kwargs": same_step | {"copy": False}}  # scripts copy what they keep
    return gym.make_vec(env_id, num_envs, vectorization_mode=vectorization, **own, **options)


def seed_libraries(seed: int) -> None:
    """Seed what an environment may draw from beside its own generator: `random` and `numpy.random`."""
    random.seed(seed)
    np.random.seed(seed)


class Simulator(gym.Wrapper):
    """One environment that is written in Python. `make` makes it once more.

    `one_episode`: it stands still after an episode until it gets a seed. Else what it remembers would
    depend on how long others play, and so on the number of processes. In a worker process Ctrl-C
    spares it, it never outlives its rank, and libraries are seeded for it alone.
    """

    def __init__(self, env: gym.Env, make: Callable[[], gym.Env], one_episode: bool, minatar: bool) -> None:
        super().__init__(env)
        self.make = make
        self.one_episode = one_episode
        self.minatar = minatar
        self.ended = False
        # the rank itself makes one too, for its spaces
        self.in_worker = multiprocessing.current_process().name.startswith("Worker<AsyncVectorEnv>")
        if self.in_worker:
            os.setsid()
            end_with_parent(signal.SIGKILL)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        if self.ended and seed is None:
            return self.last_obs, {}
        self.ended = False
        if self.in_worker and seed is not None:
            seed_libraries(seed)
        if options == MAKE_ANEW:
            self.env.close()
            self.env = self.make()
            options = None
        if self.minatar:
            self.unwrapped.game.last_action = 0  # it may stick, and MinAtar keeps it over a reset
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        if self.ended:
            return self.last_obs, 0.0, False, False, {}
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:  # kept while the vector resets; many return one array at each step
            obs = np.array(obs, self.observation_space.dtype)
            self.last_obs = obs
            self.ended = self.one_episode
        return obs, reward, terminated, truncated, info
