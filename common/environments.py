"""Vector environments: how they are made, seeded by global index, checked and counted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from common.distributed import World
from common.encoders import is_large
from common.errors import BadInput, Fault, one_line, require_divisible
from common.machine import keep_freed_memory, set_threads
from common.simulators import MAKE_ANEW, RESERVED_OPTIONS, make_vec, seed_libraries

TRAINING, EVALUATION, RESTART = range(3)  # seed domains


def environment_seeds(seed: int, domain: int, indices: Sequence[int], checkpoint: int = 0) -> np.ndarray:
    """One seed for each global index, derived from (seed, domain, index), so that runs share no streams.

    After a `checkpoint`, which has this number, training has others.
    """
    words = [RESTART, checkpoint] if checkpoint and domain == TRAINING else [domain]
    seeds = [np.random.SeedSequence([seed, *words, i]).generate_state(1)[0] for i in indices]
    return np.array(seeds, dtype=np.int64) >> 1  # 31 bits: what every simulator takes


class Episode(NamedTuple):
    """The seed of an evaluation episode, the actions as the environment took them, and the return."""

    seed: int
    actions: list[Any]
    episodic_return: float


class EpisodeStatistics:
    """Return (of unchanged rewards) and length of every whole episode of the local environments.

    An Atari game does not end with a life. `family`: of simulators other than "ALE" and "envpool" no
    infos are read.
    """

    def __init__(self, shards: list[slice], family: str) -> None:
        self.shards = shards
        self.family = family
        num_envs = shards[-1].stop
        self.returns = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs, dtype=np.int64)
        self.frames = np.zeros(num_envs, dtype=np.int64)
        self.finished: list[tuple[float, int, int]] = []  # (return, length, local environment)

    def step(self, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray, infos: dict) -> np.ndarray:
        """Count one vector step: arrays (n,) -> where whole episodes ended (n,)."""
        self.returns += rewards
        self.lengths += 1
        dones = terminations | truncations
        if self.family == "envpool":
            dones = infos["game_over"]
        elif self.family == "ALE":
            ended = infos["episode_frame_number"] < self.frames  # not where a life was lost
            dones = truncations | (terminations & ended)
            self.frames[:] = infos["episode_frame_number"]
        for i in dones.nonzero()[0]:
            self.finished.append((float(self.returns[i]), int(self.lengths[i]), int(i)))
            self.returns[i] = 0.0
            self.lengths[i] = 0
        return dones

    def pop(self) -> list[dict[str, float]]:
        """For each shard, sums over its episodes that ended since the last call."""
        sums = np.zeros((len(self.shards), 3))
        for episode_return, length, i in self.finished:
            shard = next(k for k, envs in enumerate(self.shards) if i < envs.stop)
            sums[shard] += episode_return, length, 1
        self.finished = []
        return [dict(zip(("return", "length", "episodes"), row, strict=True)) for row in sums]


class Environments(VectorWrapper):
    """Environments with global indices and a seed each; rewards and observations must be finite.

    Images are (channels, height, width): views, if the simulator has `channels_last`.
    `atari`: Atari games in C++, with `stack` frames in an observation, oldest first; after a reset
    these are copies of the first (`repeats_first`), or zeros. `shards`: the environments of each shard.
    `episodes`: statistics since the start. `evaluation`: None if this rank plays no part of it.
    `first_episode`: of the last evaluation, on the rank that played it.
    """

    world: World | None = None
    evaluation: Environments | None = None
    first_episode: Episode | None = None

    def __init__(self, envs: VectorEnv, family: str, seed: int, domain: int, indices: Sequence[int]) -> None:
        super().__init__(envs)
        space = envs.single_observation_space
        self.family = family
        self.seed = seed
        self.domain = domain
        self.indices = indices
        self.seeds = environment_seeds(seed, domain, indices)
        self.checkpoint = 0
        self.shards = [slice(0, len(indices))]
        self.atari = family == "ALE" or getattr(envs, "atari", False)
        self.stack = space.shape[0] if family == "ALE" else getattr(envs, "stack", 1)
        self.repeats_first = family == "envpool"
        self.channels_last = channels_axis(space, family, self.atari) == 2
        if self.channels_last:
            bounds = [self._channels_first(x) for x in (space.low, space.high)]
            self.single_observation_space = gym.spaces.Box(*bounds, dtype=space.dtype)

    def storage(self, *shape: int) -> np.ndarray:
        """Zeros (*shape, *observation's shape), with the memory layout of the simulator's observations."""
        space = self.env.single_observation_space
        return self._channels_first(np.zeros((*shape, *space.shape), space.dtype))

    def start(self, checkpoint: int = 0) -> np.ndarray:
        """Reset every environment with its own seed -> observations (n, *shape).

        `checkpoint`: the number of the last one, or 0. After each, training has other seeds, and simulators
        in Python are made anew: some keep hidden state, such as BipedalWalker its Box2D world.
        """
        seeds = environment_seeds(self.seed, self.domain, self.indices, checkpoint)
        if checkpoint and self.domain == TRAINING:
            seed_libraries(int(seeds[0]))
        anew = checkpoint != self.checkpoint and self.family not in RESERVED_OPTIONS
        self.checkpoint = checkpoint
        self.steps = 0
        self.episodes = EpisodeStatistics(self.shards, self.family)
        seeds = seeds if self.family == "ALE" else seeds.tolist()  # ALE's take only an array
        obs, _ = self.env.reset(seed=seeds, options=MAKE_ANEW if anew else None)
        self._require_finite("an observation", obs)
        return self._channels_first(obs)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """A vector step, of actions that `clip_to_action_space` takes.

        `episode_ended` in the infos (n,): where a whole episode ended.
        An episode that ends by itself in the step of its limit is terminated and not truncated.
        Raises `Fault`, naming environment and step, for what is not finite.
        """
        self.steps += 1
        actions = self.clip_to_action_space(actions)
        self._require_finite("the networks have diverged: the action for it", actions)
        try:
            obs, rewards, terminations, truncations, infos = self.env.step(actions)
        except SystemExit as error:  # a window that was closed, say: the run is not done
            raise Fault(f"--env-id: an environment called sys.exit({error.code}).") from error
        self._require_finite("a reward", rewards)
        self._require_finite("an observation", obs)
        infos["episode_ended"] = self.episodes.step(rewards, terminations, truncations, infos)
        if "final_obs" in infos:  # where an episode ended
            truncations = truncations & ~terminations
            if self.channels_last:
                dones = np.flatnonzero(terminations | truncations)
                infos["final_obs"] = {i: self._channels_first(infos["final_obs"][i]) for i in dones}
            for i in np.flatnonzero(truncations):
                self._require_finite("its last observation", infos["final_obs"][i][None], first=i)
        if self.world is not None:
            self.world.watchdog.feed()
        return self._channels_first(obs), rewards, terminations, truncations, infos

    def clip_to_action_space(self, actions: np.ndarray) -> np.ndarray:
        """Actions (n,) from 0 -> from the space's start; (n, d) -> clipped; both of the space's type."""
        space = self.single_action_space
        if isinstance(space, gym.spaces.Discrete):
            return (actions + space.start).astype(space.dtype, copy=False)
        return actions.reshape(-1, *space.shape).astype(space.dtype).clip(space.low, space.high)

    def close(self) -> None:
        asynchronous = hasattr(self.unwrapped, "processes")
        self.env.close(**({"timeout": 5} if asynchronous else {}))

    def _channels_first(self, obs: np.ndarray) -> np.ndarray:
        return np.moveaxis(obs, -1, -3) if self.channels_last else obs

    def _require_finite(self, what: str, values: np.ndarray, first: int = 0) -> None:
        """Raise `Fault` for a float that is not finite. `values[0]` is of the local environment `first`."""
        if values.dtype.kind != "f" or math.isfinite(np.vdot(values, values)):  # cheap; it may overflow
            return
        for i, value in enumerate(values):
            if not np.isfinite(value).all():
                number = value[~np.isfinite(value)].flat[0]
                name = "environment" if self.domain == TRAINING else "evaluation episode"
                where = f"{name} {self.indices[first + i]}, its step {self.steps}"
                raise Fault(f"{where}: {what} is not finite ({number}).")


@contextmanager
def open_environments(
    args: Any, action_spaces: tuple[type[gym.Space], ...], life_loss: bool = False
) -> Iterator[Environments]:
    """This rank's training environments, with the `world` and its part of the `evaluation`.

    `args`: a script's. Shard s plays the episodes e with e mod the number of shards = s.
    Sets threads, and how memory and denormal numbers are treated.
    Raises `BadInput` as `World` and `make_envs` do, and if the environments do not divide.
    """
    world = World(args.cuda, args.shards)
    divisor_name = "--shards" if world.sharded else "the number of processes"
    require_divisible("--num-envs", args.num_envs, world.num_shards, divisor_name)
    size = args.num_envs // world.num_shards
    num_episodes = args.eval_episodes if args.eval_every else 0
    training = [range(shard * size, (shard + 1) * size) for shard in world.shards]
    episodes = [range(shard, num_episodes, world.num_shards) for shard in world.shards if shard < num_episodes]
    options = {"vectorization": args.vectorization, "env_kwargs": args.env_kwargs}
    options |= {"num_threads": args.num_threads or world.cores, "life_loss": life_loss}

    with ExitStack() as stack:
        # processors take some twenty times as long for numbers nearer to 0 than 1e-38, and Adam's averages
        # for dead units become such; threads and processes that are started later take them as 0 too
        torch.set_flush_denormal(True)
        stack.callback(torch.set_flush_denormal, False)

        def opened(domain: int, parts: list[range]) -> Environments:
            envs = make_envs(args.env_id, args.seed, domain, np.concatenate(parts), action_spaces, **options)
            stack.callback(envs.close)
            ends = np.cumsum([len(part) for part in parts])
            envs.shards = [slice(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
            envs.world = world
            return envs

        envs = opened(TRAINING, training)
        if episodes:
            envs.evaluation = opened(EVALUATION, episodes)
        set_threads(args.num_threads, is_large(envs.single_observation_space), world)
        keep_freed_memory()
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
    """The environments of global `indices`, which reset in the step that ends an episode.

    `num_threads`: of Atari and EnvPool. `life_loss`: a lost life of Atari terminates, in training.
    Raises `BadInput` naming --env-id for an unknown id, a missing package, or an unsupported space
    (`action_spaces`: the supported), and --env-kwargs for what the simulator refuses.
    """
    options = json.loads(env_kwargs)
    flags = f"--env-id {env_id}" + (f" --env-kwargs {env_kwargs}" if options else "")
    family = env_id.partition("/")[0]
    for name in options.keys() & RESERVED_OPTIONS.get(family, set()):
        raise BadInput(f"--env-kwargs {env_kwargs}: {name} is not to be set here; leave it out.")
    first_seed = int(environment_seeds(seed, domain, indices[:1])[0])
    own = {"life_loss": life_loss and domain == TRAINING, "one_episode": domain == EVALUATION}
    try:
        envs = make_vec(env_id, len(indices), first_seed, options, vectorization, num_threads, **own)
    except (gym.error.Error, ImportError, OSError, BadInput) as error:  # OSError: a missing ROM, say
        reason = one_line(error)
        if isinstance(error, ModuleNotFoundError) and error.name:  # None for a user's module
            reason = f"needs a package that is missing: pip install {error.name.replace('_', '-')}"
        raise BadInput(f"{flags}: {reason}") from error
    except Exception as error:
        if not options:
            raise
        raise BadInput(f"--env-kwargs {env_kwargs}: {type(error).__name__}: {one_line(error)}") from error
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    try:
        require_action_space(envs.single_action_space, action_spaces)
        return Environments(envs, family, seed, domain, indices)
    except BadInput as error:
        envs.close()
        raise BadInput(f"{flags}: {one_line(error)}.") from None


def channels_axis(space: gym.Space, family: str, atari: bool) -> int | None:
    """The axis of an image's channels, 0 or 2, the smallest except in games; None of a vector.

    Raises `BadInput` for all other observations.
    """
    shape = space.shape if isinstance(space, gym.spaces.Box) else ()
    if len(shape) == 1 and shape[0] > 0:
        return None
    if len(shape) == 3:
        axis = shape.index(min(shape)) if shape.count(min(shape)) == 1 else 1
        if atari:
            axis = 0  # of any number of frames
        elif family == "MinAtar":
            axis = 2  # of any number of kinds of objects
        if axis != 1 and min(np.delete(shape, axis)) >= 3:
            return axis
    image = "at least 3 x 3 with fewer channels, first or last, than rows and columns"
    raise BadInput(f"observation space {space}: must be a vector (1-D Box) or an image (3-D Box, {image})")


def require_action_space(space: gym.Space, supported: tuple[type[gym.Space], ...]) -> None:
    integer_box = isinstance(space, gym.spaces.Box) and not np.issubdtype(space.dtype, np.floating)
    if integer_box or not isinstance(space, supported):
        names = " or ".join(kind.__name__ for kind in supported)
        raise BadInput(f"action space {space}: must be {names}; a Box must hold floats")
