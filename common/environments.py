"""Vector environments: construction, seeds by global index, the spaces that fit."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import random
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv, VectorWrapper

from common.distributed import World
from common.encoders import is_large
from common.errors import BadInput, Fault, require_divisible
from common.machine import require_compiler, require_memory, set_threads
from common.pool import OURS, Pool
from common.watchdog import end_with_parent

TRAINING, EVALUATION, RESTART = 0, 1, 2  # seed domains
SMALLEST = 5_000  # bytes that an environment takes at least
COLOURS = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}  # ALE's own environments' films
# options that are the program's, or would hide what it counts
GYMNASIUMS = {"id", "num_envs", "vectorization_mode", "vector_kwargs", "wrappers", "render_mode"}
ALES = GYMNASIUMS | {"game", "rom_path", "num_threads", "autoreset_mode", "reward_clipping", "life_loss_info"}
RESERVED = {"envpool": OURS, "ALE": ALES | {"episodic_life", "batch_size", "seed", "thread_affinity_offset"}}
WORKER_FAULT = "--vectorization async: the process of an environment ended; was it killed?"


def environment_seeds(seed: int, domain: int, indices: Sequence[int], *restart: int) -> np.ndarray:
    """One seed for each global index, derived from (seed, domain, index), so that runs share no streams.

    `restart`: in the domain RESTART, the number of a checkpoint.
    """
    words = [np.random.SeedSequence([seed, domain, *restart, i]).generate_state(1)[0] for i in indices]
    return np.array(words, dtype=np.int64) >> 1  # 31 bits: what every simulator takes


def is_native_atari(env_id: str) -> bool:
    """True for ids that run in ALE's own C++ vector environment: observations (4, 84, 84), oldest frame first."""
    return env_id.startswith("ALE/")


class Episode(NamedTuple):
    """A played episode: the environment's seed, its actions as the environment took them, and its return."""

    seed: int
    actions: list[Any]
    episodic_return: float


class EpisodeStatistics:
    """Return (rewards as the environment gives them) and length of every whole episode of the local environments.

    A lost life does not end an Atari game: there EnvPool says where it ended, and of ALE the frame counter, which
    falls at real resets only.
    """

    def __init__(self, shards: list[slice]) -> None:
        self.shards, num_envs = shards, shards[-1].stop
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs, dtype=np.int64)
        self.frames = np.zeros(num_envs, dtype=np.int64)
        self.finished: list[tuple[float, int, int]] = []  # (return, length, local environment), in order of their end

    def step(self, rewards: np.ndarray, dones: np.ndarray, infos: dict) -> np.ndarray:
        """Count one vector step: rewards (n,), dones (n,) -> where whole episodes ended (n,)."""
        self.returns += rewards
        self.lengths += 1
        if "game_over" in infos:  # EnvPool
            dones = infos["game_over"]
        elif "episode_frame_number" in infos:  # ALE
            dones = dones & (infos["episode_frame_number"] < self.frames)
            self.frames[:] = infos["episode_frame_number"]
        if dones.any():
            for i in np.flatnonzero(dones):
                self.finished.append((float(self.returns[i]), int(self.lengths[i]), int(i)))
            self.returns[dones], self.lengths[dones] = 0.0, 0
        return dones

    def pop(self) -> list[dict[str, float]]:
        """For each shard, sums over its episodes that ended since the last call: their returns, lengths and number."""
        finished, self.finished = self.finished, []
        parts = [[f for f in finished if rows.start <= f[2] < rows.stop] for rows in self.shards]
        return [{"return": sum(f[0] for f in p), "length": sum(f[1] for f in p), "episodes": len(p)} for p in parts]


class Environments(VectorWrapper):
    """Environments known by their global indices, with a seed each; what they say is checked before it is used.

    `atari`: they are Atari games in C++, with `stack` frames in an observation, oldest first, and after a reset copies
    of the first (`repeats_first`) or zeros. Images are (channels, height, width); where the simulator gives them as
    (height, width, channels), `channels_last`, they are views that keep its order in memory. `shards`: which
    environments are each shard's. `episodes`: those since the start. `world` and `evaluation` (None where no episode
    of it is played here) are given by `open_environments`. `first`: the episode 0 of the last evaluation, if it was
    played here.
    """

    def __init__(
        self, envs: VectorEnv, seed: int, domain: int, indices: Sequence[int], channels_last: bool = False
    ) -> None:
        super().__init__(envs)
        self.seed = seed
        self.name = "environment" if domain == TRAINING else "evaluation episode"
        self.indices, self.seeds, self.steps = indices, environment_seeds(seed, domain, indices), 0
        self.first: Episode | None = None
        self.world: World | None = None
        self.evaluation: Environments | None = None
        self.shards = [slice(0, len(indices))]
        ale, pool = is_ale(envs), isinstance(envs, Pool)
        self.atari, self.repeats_first, self.takes_array = ale or (pool and envs.atari), pool, ale
        self.worker_gone = (EOFError, ConnectionError) if isinstance(envs, AsyncVectorEnv) else ()  # its pipe's errors
        spaces = envs.single_observation_space, envs.single_action_space
        self.stack = spaces[0].shape[0] if ale else envs.stack if pool else 1
        self.float_obs, self.float_actions = (np.issubdtype(space.dtype, np.floating) for space in spaces)
        self.channels_last = channels_last
        if channels_last:
            bounds = self._channels_first(spaces[0].low), self._channels_first(spaces[0].high)
            self.single_observation_space = gym.spaces.Box(*bounds, dtype=spaces[0].dtype)

    def _channels_first(self, obs: np.ndarray) -> np.ndarray:
        return np.moveaxis(obs, -1, -3) if self.channels_last else obs

    def storage(self, *shape: int) -> np.ndarray:
        """Zeros (*shape, *observation's shape), in memory as the simulator's observations, so that copies are fast."""
        space = self.env.single_observation_space
        return self._channels_first(np.zeros((*shape, *space.shape), space.dtype))

    def start(self, checkpoint: int = 0) -> np.ndarray:
        """Reset every environment with its own seed, another after each checkpoint -> observations (n, *shape)."""
        seeds = self.seeds
        if checkpoint:
            seeds = environment_seeds(self.seed, RESTART, self.indices, checkpoint)
            seed_libraries(int(seeds[0]))
        try:  # ALE's take an array, and only that
            obs, _ = self.env.reset(seed=seeds if self.takes_array else seeds.tolist())
        except self.worker_gone as error:
            raise Fault(WORKER_FAULT) from error
        self.steps, self.episodes = 0, EpisodeStatistics(self.shards)
        if self.float_obs and not math.isfinite(np.vdot(obs, obs)):
            self._name_fault("an observation", obs)
        return self._channels_first(obs)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """A vector step of actions `in_space`; `episode_ended` in the infos (n,): where a whole one did.

        Raises `Fault`, naming environment and step, for what is not finite.
        """
        self.steps += 1
        actions = self.in_space(actions)
        if self.float_actions and not math.isfinite(np.vdot(actions, actions)):
            self._name_fault("the action for it", actions, "; the networks have diverged: try a lower learning rate")
        try:
            obs, rewards, terminations, truncations, infos = self.env.step(actions)
        except self.worker_gone as error:
            raise Fault(WORKER_FAULT) from error
        except SystemExit as error:  # a window that was closed, say: the run is not done
            which = f"{self.name}s {self.indices[0]} to {self.indices[-1]}"
            raise Fault(f"{which}: one called sys.exit({error.code}).") from error
        # a vector's product with itself is the cheapest sum; it may overflow, so what is named is looked for anew
        if not math.isfinite(np.vdot(rewards, rewards)):
            self._name_fault("a reward", rewards)
        if self.float_obs and not math.isfinite(np.vdot(obs, obs)):
            self._name_fault("an observation", obs)
        if self.float_obs and "final_obs" in infos:
            for i in np.flatnonzero(truncations & ~terminations):
                self._name_fault("its last observation", infos["final_obs"][i][None], at=i)
        if self.channels_last and "final_obs" in infos:
            ended = np.flatnonzero(terminations | truncations)
            infos["final_obs"] = {i: self._channels_first(infos["final_obs"][i]) for i in ended}
        infos["episode_ended"] = self.episodes.step(rewards, terminations | truncations, infos)
        return self._channels_first(obs), rewards, terminations, truncations, infos

    def in_space(self, actions: np.ndarray) -> np.ndarray:
        """Actions (n,) from 0, or (n, d) -> as the action space has them: from its start, or cast and clipped to it."""
        space = self.single_action_space
        if isinstance(space, gym.spaces.Discrete):
            return actions + space.start
        return actions.reshape(-1, *space.shape).astype(space.dtype).clip(space.low, space.high)

    def _name_fault(self, what: str, values: np.ndarray, advice: str = "", at: int = 0) -> None:
        for i in np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1)):
            value = values[i][~np.isfinite(values[i])].flat[0] if values[i].shape else values[i]
            where = f"{self.name} {self.indices[at + i]}, its step {self.steps}"
            raise Fault(f"{where}: {what} is not finite ({value}){advice}.")


@contextmanager
def open_environments(
    args: Any, action_spaces: tuple[type[gym.Space], ...], life_loss: bool = False
) -> Iterator[Environments]:
    """This rank's training environments, with the `world` of ranks and its part of an `evaluation`; closed at the end.

    `args`: a script's. Shard s plays the episodes e with e mod the number of shards = s. Torch's threads are set.
    Raises `BadInput` as `World`, `require_compiler` and `make_envs` do, and for numbers of environments that do not
    divide or fit.
    """
    world = World(args.cuda, args.shards)
    if getattr(args, "compile", False):
        require_compiler(world)
    parts = "--shards" if world.sharded else "the number of processes"
    require_divisible("--num-envs", args.num_envs, world.num_shards, parts)
    size, num_episodes = args.num_envs // world.num_shards, args.eval_episodes if args.eval_every else 0
    training = [range(shard * size, (shard + 1) * size) for shard in world.shards]
    episodes = [range(shard, num_episodes, world.num_shards) for shard in world.shards]
    options = action_spaces, args.vectorization, args.num_threads or world.cores

    with ExitStack() as stack:

        def opened(flag: str, number: int, domain: int, by_shard: list[range], life_loss: bool) -> Environments:
            ends = np.cumsum([len(part) for part in by_shard])
            require_memory(flag, number, SMALLEST * ends[-1], world)
            if ends[-1] > 1000 and world.rank == 0:
                print(f"making {ends[-1]:,} environments of {args.env_id}", flush=True)  # may take minutes
            indices = np.concatenate([np.array(part) for part in by_shard if part])
            envs = make_envs(args.env_id, args.seed, domain, indices, *options, life_loss, args.env_kwargs)
            stack.callback(close, envs)
            starts = [0, *ends[:-1]]
            envs.shards = [slice(start, end) for start, end in zip(starts, ends, strict=True) if end > start]
            envs.world = world
            return envs

        envs = opened("--num-envs", args.num_envs, TRAINING, training, life_loss)
        if any(episodes):
            envs.evaluation = opened("--eval-episodes", args.eval_episodes, EVALUATION, episodes, False)
        set_threads(args.num_threads, is_large(envs.single_observation_space), world)
        yield envs


def make_envs(
    env_id: str,
    seed: int,
    domain: int,
    indices: Sequence[int],
    action_spaces: tuple[type[gym.Space], ...],
    vectorization: str = "sync",
    num_threads: int = 1,
    life_loss: bool = False,
    env_kwargs: str = "{}",
) -> Environments:
    """The environments of global `indices`, which reset in the step that ends an episode (`AutoresetMode.SAME_STEP`).

    `action_spaces`: what the script can act in. `num_threads` concerns Atari and EnvPool alone, `life_loss` (a lost
    life terminates, the game goes on) Atari, `env_kwargs` (a JSON object) is the simulator's. Raises `BadInput` naming
    --env-id for an unknown id, a missing extra, or a space that no script can use, and --env-kwargs for what the
    simulator refuses.
    """
    seeds = environment_seeds(seed, domain, indices)
    options = vectorization, num_threads, life_loss, env_kwargs
    envs = make_vec(env_id, len(indices), int(seeds[0]), *options)
    named = f"--env-id {env_id}" + (f" --env-kwargs {env_kwargs}" if json.loads(env_kwargs) else "")
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    fault, ours, axis = None, env_id.startswith(("ALE/", "envpool/")), channels_axis(env_id, envs)
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) not in (1, 3):
        fault = f"observation space {obs_space} is not a vector (1-D Box) or an image (3-D Box)"
        if not ours:  # which cannot be wrapped
            fault += "; gymnasium.wrappers.FlattenObservation makes a vector of it"
    elif axis not in (None, 0, 2):
        fault = f"observation space {obs_space} is an image of which it is not clear where its channels are"
        fault += ": first or last, they must be fewer than its rows and its columns"
    elif axis is not None and min(np.delete(obs_space.shape, axis)) < 3:
        fault = f"observation space {obs_space} is an image smaller than 3 x 3"
    elif 0 in (*obs_space.shape, *(action_space.shape or ())):
        fault = f"observation space {obs_space} or action space {action_space} holds no number"
    elif not isinstance(action_space, action_spaces):
        fault = f"action space {action_space} is not {' or '.join(space.__name__ for space in action_spaces)}"
    elif isinstance(action_space, gym.spaces.Box) and not np.issubdtype(action_space.dtype, np.floating):
        fault = f"action space {action_space} is a Box of integers; only a Box of floats is supported"
    if fault:
        envs.close()
        raise BadInput(f"{named}: {' '.join(fault.split())}.")
    return Environments(envs, seed, domain, indices, channels_last=axis == 2)


def channels_axis(env_id: str, envs: VectorEnv) -> int | None:
    """The axis of an image's channels: 0 or 2, another number where that is not clear; None without images.

    It is the smallest side, but where we know better: games have any number of frames or of objects.
    """
    shape = envs.single_observation_space.shape or ()
    if len(shape) != 3:
        return None
    if is_ale(envs) or (isinstance(envs, Pool) and envs.atari):
        return 0
    if env_id.startswith("MinAtar/"):
        return 2
    return shape.index(min(shape)) if shape.count(min(shape)) == 1 else -1


def is_ale(envs: VectorEnv) -> bool:
    return type(envs.unwrapped).__name__ == "AtariVectorEnv"


def make_vec(
    env_id: str,
    num_envs: int,
    seed: int,
    vectorization: str = "sync",
    num_threads: int = 1,
    life_loss: bool = False,
    env_kwargs: str = "{}",
    draws: bool = False,
) -> VectorEnv:
    """The bare environments of `make_envs`, with its errors; `seed` is for libraries. `draws`: for films."""
    same_step = AutoresetMode.SAME_STEP
    seed_libraries(seed)
    options = json.loads(env_kwargs)
    family = env_id.partition("/")[0]
    if taken := sorted(options.keys() & RESERVED.get(family, GYMNASIUMS)):
        raise BadInput(f"--env-kwargs {env_kwargs}: {taken[0]} is not to be set here; leave it out.")
    module, colon, _ = env_id.rpartition(":")
    if colon and not all(word.isidentifier() for word in module.split(".")):
        raise BadInput(f"--env-id {env_id}: must be an id, such as CartPole-v1, or module:id, such as my.envs:Mine-v0.")
    try:
        if is_native_atari(env_id):
            import ale_py

            gym.register_envs(ale_py)
            own = {"autoreset_mode": same_step, "num_threads": min(num_threads, num_envs), "life_loss_info": life_loss}
            own["reward_clipping"] = False  # statistics count the score; scripts take the sign
            own["repeat_action_probability"] = 0.0  # as in the published results for NoFrameskip-v4
            own |= options | (COLOURS if draws else {})
            envs = gym.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point", **own)
        elif env_id.startswith("envpool/"):
            task = env_id.removeprefix("envpool/")
            envs = Pool(task, num_envs, num_threads, options, life_loss, draws)
        else:
            if env_id.startswith("MinAtar/"):
                from minatar.gym import register_envs

                if "MinAtar/Breakout-v1" not in gym.registry:
                    register_envs()
            own = {"render_mode": "rgb_array"} if draws else {}
            own["vector_kwargs"] = {"autoreset_mode": same_step, "copy": False}  # scripts copy what they keep
            own["wrappers"] = [partial(alone, seed=seed), *([Unstick] if env_id.startswith("MinAtar/") else [])]
            envs = gym.make_vec(env_id, num_envs, vectorization_mode=vectorization, **own, **options)
    except (gym.error.Error, ImportError, OSError) as error:  # OSError: a missing ROM, say
        for worker in multiprocessing.active_children():  # of a vector that could not be made whole
            worker.kill()
            worker.join()
        reason = " ".join(str(error).split())
        if isinstance(error, ModuleNotFoundError) and error.name:  # gymnasium leaves a user's own module unnamed
            reason = f"needs a package that is missing: pip install {error.name.replace('_', '-')}"
        named = f"--env-id {env_id}" + (f" --env-kwargs {env_kwargs}" if options else "")
        raise BadInput(f"{named}: {reason}{atari_hint(env_id)}") from error
    except (TypeError, ValueError, AssertionError, RuntimeError, LookupError, AttributeError) as error:
        if not options:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise BadInput(f"--env-kwargs {env_kwargs}: {reason}") from error
    assert envs.metadata["autoreset_mode"] == same_step
    return envs


def seed_libraries(seed: int) -> None:
    """Seed what an environment may draw from beside its own generator: `random` and `numpy.random`."""
    random.seed(seed)
    np.random.seed(seed)


def atari_hint(env_id: str) -> str:
    """For an Atari game's older ids, where it is found here; otherwise nothing."""
    game = re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", env_id)
    with contextlib.suppress(ImportError):
        import ale_py

        gym.register_envs(ale_py)
    return f" Here it is ALE/{game}-v5." if f"ALE/{game}-v5" in gym.registry and "/" not in game else ""


def alone(env: gym.Env, seed: int) -> gym.Env:
    """In a worker process: Ctrl-C spares it, it never outlives its rank, and libraries are seeded for it alone."""
    name, _, index = multiprocessing.current_process().name.partition("-")
    if name == "Worker<AsyncVectorEnv>":
        os.setsid()
        end_with_parent(signal.SIGKILL)
        seed_libraries(seed + int(index))
        return Seeded(env)
    return env


class Seeded(gym.Wrapper):
    """In a worker process: a reset with a seed seeds libraries too, so that what follows depends on it alone."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        if seed is not None:
            seed_libraries(seed)
        return self.env.reset(seed=seed, options=options)


def close(envs: VectorEnv) -> None:
    """Close `envs`; asynchronous ones of which a worker died would wait for its answer, and are killed instead."""
    workers = envs.unwrapped.processes if isinstance(envs.unwrapped, AsyncVectorEnv) else []
    if all(worker.is_alive() for worker in workers):
        envs.close(**({"timeout": 5} if workers else {}))
    else:
        for worker in workers:
            worker.kill()
        envs.unwrapped.closed = True


class Unstick(gym.Wrapper):
    """MinAtar keeps the last action, which may stick, over a reset: then an episode would not follow from its seed."""

    def reset(self, **kwargs) -> tuple[np.ndarray, dict]:
        self.unwrapped.game.last_action = 0
        return self.env.reset(**kwargs)
