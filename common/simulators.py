"""The simulators behind an --env-id: ALE's own vector environments, EnvPool's, MinAtar's and gymnasium's."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from common.pool import OURS, Pool
from common.watchdog import end_with_parent

COLOURS = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}  # ALE's own environments' films
# options that are the program's, or would hide what it counts
GYMNASIUMS = {"id", "num_envs", "vectorization_mode", "vector_kwargs", "wrappers", "render_mode"}
ALES = GYMNASIUMS | {"game", "rom_path", "num_threads", "autoreset_mode", "reward_clipping", "life_loss_info"}
ALES |= {"episodic_life", "batch_size", "seed", "thread_affinity_offset"}
RESERVED = {"envpool": OURS, "ALE": ALES}


def make_vec(
    env_id: str,
    num_envs: int,
    seed: int,
    options: dict[str, Any],
    vectorization: str = "sync",
    num_threads: int = 1,
    life_loss: bool = False,
    draws: bool = False,
) -> VectorEnv:
    """The bare environments of an id, which reset in the step that ends an episode. `draws`: for films.

    `seed`: for what they draw from beside their own generators. Raises what the simulators do.
    """
    seed_libraries(seed)
    module, colon, _ = env_id.rpartition(":")
    if colon and not all(word.isidentifier() for word in module.split(".")):
        raise gym.error.Error("must be an id, such as CartPole-v1, or module:id, such as my.envs:Mine-v0.")
    if env_id.startswith("envpool/"):
        return Pool(env_id.removeprefix("envpool/"), num_envs, num_threads, options, life_loss, draws)
    same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
    if env_id.startswith("ALE/"):
        import ale_py

        gym.register_envs(ale_py)
        own = same_step | {"num_threads": min(num_threads, num_envs), "life_loss_info": life_loss}
        own["reward_clipping"] = False  # statistics count the score; scripts take the sign
        own["repeat_action_probability"] = 0.0  # as in the published results for NoFrameskip-v4
        own |= options | (COLOURS if draws else {})
        return gym.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point", **own)
    own = {"render_mode": "rgb_array"} if draws else {}
    wrappers = [partial(Simulator, make=partial(gym.make, env_id, **own, **options), seed=seed)]
    if env_id.startswith("MinAtar/"):
        from minatar.gym import register_envs

        if "MinAtar/Breakout-v1" not in gym.registry:
            register_envs()
        wrappers.append(Unstick)
    own["vector_kwargs"] = same_step | {"copy": False}  # scripts copy what they keep
    return gym.make_vec(env_id, num_envs, vectorization_mode=vectorization, wrappers=wrappers, **own, **options)


def seed_libraries(seed: int) -> None:
    """Seed what an environment may draw from beside its own generator: `random` and `numpy.random`."""
    random.seed(seed)
    np.random.seed(seed)


def atari_hint(env_id: str) -> str:
    """For an Atari game's older ids, where it is found here; otherwise nothing."""
    game = re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", env_id)
    with suppress(ImportError):
        import ale_py

        gym.register_envs(ale_py)
    return f" Here it is ALE/{game}-v5." if f"ALE/{game}-v5" in gym.registry and "/" not in game else ""


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave `random` and `numpy.random` afterwards as they are now."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


MAKE_ANEW = {"make_anew": True}  # an option of `reset`


class Simulator(gym.Wrapper):
    """One environment that is written in Python. `make` makes it once more.

    In a worker process Ctrl-C spares it, and it never outlives its rank. There, libraries are seeded for it alone, and
    at each reset with a seed, so that what follows depends on that only.
    """

    def __init__(self, env: gym.Env, make: Callable[[], gym.Env], seed: int) -> None:
        super().__init__(env)
        self.make = make
        name, _, index = multiprocessing.current_process().name.partition("-")
        self.apart = name == "Worker<AsyncVectorEnv>"  # the rank itself makes one too, for its spaces
        if self.apart:
            os.setsid()
            end_with_parent(signal.SIGKILL)
            seed_libraries(seed + int(index))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        if options == MAKE_ANEW:
            self.env.close()
            with kept_random_state():
                self.env = self.make()
            options = None
        if self.apart and seed is not None:
            seed_libraries(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:  # the vector keeps it while it resets, and many return one array at each step
            obs = np.array(obs, self.observation_space.dtype)
        return obs, reward, terminated, truncated, info


class Unstick(gym.Wrapper):
    """MinAtar keeps the last action, which may stick, over a reset: then an episode would not follow from its seed."""

    def reset(self, **kwargs) -> tuple[np.ndarray, dict]:
        self.unwrapped.game.last_action = 0
        return self.env.reset(**kwargs)
