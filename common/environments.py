"""Vector environments: construction, seeds by global index, the spaces that fit, and episode statistics."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from common.arguments import BadInput

TRAINING, EVALUATION = 0, 1  # seed domains


def environment_seeds(seed: int, domain: int, indices: range) -> np.ndarray:
    """One seed for each global index, derived from (seed, domain, index), so that runs share no streams."""
    words = [np.random.SeedSequence([seed, domain, i]).generate_state(1)[0] for i in indices]
    return np.array(words, dtype=np.int64) >> 1  # 31 bits: what every simulator takes


def is_native_atari(env_id: str) -> bool:
    """True for ids that run in ALE's own C++ vector environment: observations (4, 84, 84), oldest frame first."""
    return env_id.startswith("ALE/")


def make_envs(
    env_id: str,
    num_envs: int,
    action_spaces: tuple[type[gym.Space], ...],
    vectorization: str = "sync",
    num_threads: int = 1,
    life_loss: bool = False,
) -> VectorEnv:
    """`num_envs` environments that reset in the step that ends an episode (`AutoresetMode.SAME_STEP`).

    `action_spaces`: what the script can act in. `num_threads` and `life_loss` (a lost life terminates, the game goes
    on) concern Atari alone. Raises `BadInput` naming --env-id for an unknown id, a missing extra, or a space that no
    script can use.
    """
    same_step = AutoresetMode.SAME_STEP
    module, colon, _ = env_id.rpartition(":")
    if colon and not all(word.isidentifier() for word in module.split(".")):
        raise BadInput(f"--env-id {env_id}: must be an id, such as CartPole-v1, or module:id, such as my.envs:Mine-v0.")
    try:
        if is_native_atari(env_id):
            import ale_py

            gym.register_envs(ale_py)
            envs = gym.make_vec(
                env_id,
                num_envs,
                vectorization_mode="vector_entry_point",
                autoreset_mode=same_step,
                num_threads=min(num_threads, num_envs),
                repeat_action_probability=0.0,  # as in the published results for NoFrameskip-v4
                reward_clipping=False,  # statistics count the score; scripts take the sign
                life_loss_info=life_loss,
            )
        else:
            if env_id.startswith("MinAtar/"):
                from minatar.gym import register_envs

                if "MinAtar/Breakout-v1" not in gym.registry:
                    register_envs()
            kwargs = {"autoreset_mode": same_step, "copy": False}  # scripts copy what they keep
            wrappers = [alone, Unstick] if env_id.startswith("MinAtar/") else [alone]
            envs = gym.make_vec(
                env_id, num_envs, vectorization_mode=vectorization, vector_kwargs=kwargs, wrappers=wrappers
            )
    except (gym.error.Error, ImportError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, ModuleNotFoundError) and error.name:  # gymnasium leaves a user's own module unnamed
            reason = f"needs a package that is missing: pip install {error.name.replace('_', '-')}"
        raise BadInput(f"--env-id {env_id}: {reason}") from error
    assert envs.metadata["autoreset_mode"] == same_step
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    fault = None
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) not in (1, 3):
        fault = f"observation space {obs_space} is not a vector (1-D Box) or an image (3-D Box)"
    elif len(obs_space.shape) == 3 and min(obs_space.shape[:2]) < 3:
        fault = f"observation space {obs_space} is an image smaller than 3 x 3"
    elif not isinstance(action_space, action_spaces):
        fault = f"action space {action_space} is not {' or '.join(space.__name__ for space in action_spaces)}"
    elif isinstance(action_space, gym.spaces.Box) and not np.issubdtype(action_space.dtype, np.floating):
        fault = f"action space {action_space} is a Box of integers; only a Box of floats is supported"
    if fault:
        envs.close()
        raise BadInput(f"--env-id {env_id}: {' '.join(fault.split())}.")
    return envs


def alone(env: gym.Env) -> gym.Env:
    """In a worker process of an asynchronous environment: Ctrl-C spares it, and it never outlives its rank."""
    if multiprocessing.current_process().name.startswith("Worker<AsyncVectorEnv>"):
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    return env


def close(envs: VectorEnv) -> None:
    """Close `envs`; asynchronous ones of which a worker died would wait for its answer, and are killed instead."""
    workers = envs.processes if isinstance(envs, AsyncVectorEnv) else []
    if all(worker.is_alive() for worker in workers):
        envs.close(**({"timeout": 5} if workers else {}))
    else:
        for worker in workers:
            worker.kill()
        envs.closed = True


class Unstick(gym.Wrapper):
    """MinAtar keeps the last action, which may stick, over a reset: then an episode would not follow from its seed."""

    def reset(self, **kwargs) -> tuple[np.ndarray, dict]:
        self.unwrapped.game.last_action = 0
        return self.env.reset(**kwargs)


def reset(envs: VectorEnv, seeds: np.ndarray) -> np.ndarray:
    """Reset every environment with its own seed -> observations (n, *shape)."""
    native = type(envs).__name__ == "AtariVectorEnv"  # the one that takes an array, and only that
    return envs.reset(seed=seeds if native else seeds.tolist())[0]


class EpisodeStatistics:
    """Return (rewards as the environment gives them) and length of every whole episode of the local environments.

    A lost life does not end an Atari game: there the frame counter, which falls at real resets only, tells the end.
    """

    def __init__(self, num_envs: int) -> None:
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs, dtype=np.int64)
        self.frames = np.zeros(num_envs, dtype=np.int64)
        self.finished: list[tuple[float, int, int]] = []  # (return, length, local environment), in order of their end

    def step(self, rewards: np.ndarray, dones: np.ndarray, infos: dict) -> np.ndarray:
        """Count one vector step: rewards (n,), dones (n,) -> where whole episodes ended (n,)."""
        self.returns += rewards
        self.lengths += 1
        if "episode_frame_number" in infos:
            dones = dones & (infos["episode_frame_number"] < self.frames)
            self.frames[:] = infos["episode_frame_number"]
        if dones.any():
            for i in np.flatnonzero(dones):
                self.finished.append((float(self.returns[i]), int(self.lengths[i]), int(i)))
            self.returns[dones], self.lengths[dones] = 0.0, 0
        return dones

    def pop(self) -> dict[str, float]:
        """Sums over the episodes that ended since the last call: their returns, lengths and number."""
        finished, self.finished = self.finished, []
        returns, lengths = sum(f[0] for f in finished), sum(f[1] for f in finished)
        return {"return": returns, "length": lengths, "episodes": len(finished)}
