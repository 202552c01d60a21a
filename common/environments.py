"""Vector environments: how they are made, seeded by global index, checked and counted."""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv, VectorWrapper

from common.distributed import World
from common.encoders import is_large
from common.errors import BadInput, Fault, one_line, require_divisible
from common.machine import flush_denormals, keep_freed_memory, set_threads
from common.simulators import GYMNASIUMS, MAKE_ANEW, RESERVED, atari_hint, make_vec, seed_libraries

TRAINING, EVALUATION, RESTART = 0, 1, 2  # seed domains


def environment_seeds(seed: int, domain: int, indices: Sequence[int], *restart: int) -> np.ndarray:
    """One seed for each global index, derived from (seed, domain, index), so that runs share no streams.

    `restart`: in the domain RESTART, the number of a checkpoint.
    """
    words = [np.random.SeedSequence([seed, domain, *restart, i]).generate_state(1)[0] for i in indices]
    return np.array(words, dtype=np.int64) >> 1  # 31 bits: what every simulator takes


class Episode(NamedTuple):
    """A played episode: the environment's seed, its actions as the environment took them, and its return."""

    seed: int
    actions: list[Any]
    episodic_return: float


class EpisodeStatistics:
    """Return (rewards as the environment gives them) and length of every whole episode of the local environments.

    A lost life does not end an Atari game: there EnvPool says where it ended, and of ALE the frame counter, which
    falls at real resets. `family`: the simulator's, "ALE" or "envpool"; of others no infos are read, whatever their
    names.
    """

    def __init__(self, shards: list[slice], family: str) -> None:
        self.shards, self.family, num_envs = shards, family, shards[-1].stop
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs, dtype=np.int64)
        self.frames = np.zeros(num_envs, dtype=np.int64)
        self.finished: list[tuple[float, int, int]] = []  # (return, length, local environment), in order of their end

    def step(self, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray, infos: dict) -> np.ndarray:
        """Count one vector step: rewards (n,), terminations, truncations (n,) -> where whole episodes ended (n,)."""
        self.returns += rewards
        self.lengths += 1
        dones = terminations | truncations
        if self.family == "envpool":
            dones = infos.get("game_over", dones)
        elif self.family == "ALE":
            dones = truncations | (terminations & (infos["episode_frame_number"] < self.frames))
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
    """Environments known by their global indices, with a seed each; what they give is checked before it is used.

    Images are (channels, height, width). If the simulator gives them as (height, width, channels), `channels_last`,
    they are views of that. `atari`: they are Atari games in C++, with `stack` frames in an observation, oldest first;
    after a reset these are copies of the first (`repeats_first`), or zeros. `shards`: the environments of each shard.
    `episodes`: those since the start. `world` and `evaluation` (None if this rank plays no part of it) are set by
    `open_environments`. `first`: episode 0 of the last evaluation, if it was played here.
    """

    world: World | None = None
    evaluation: Environments | None = None
    first: Episode | None = None

    def __init__(
        self, envs: VectorEnv, family: str, seed: int, domain: int, indices: Sequence[int], channels_last: bool
    ) -> None:
        super().__init__(envs)
        self.family, self.domain, self.checkpoint = family, domain, 0
        self.seed, self.indices, self.seeds = seed, indices, environment_seeds(seed, domain, indices)
        self.name = "environment" if domain == TRAINING else "evaluation episode"
        self.steps, self.shards, self.channels_last = 0, [slice(0, len(indices))], channels_last
        space, self.ale = envs.single_observation_space, family == "ALE"
        self.atari, self.repeats_first = is_atari(family, envs), family == "envpool"
        self.stack = space.shape[0] if self.ale else getattr(envs, "stack", 1)
        self.float_obs = np.issubdtype(space.dtype, np.floating)
        self.first_action = getattr(envs.single_action_space, "start", None)  # of a Discrete space; None of a Box
        if channels_last:
            low, high = self._channels_first(space.low), self._channels_first(space.high)
            self.single_observation_space = gym.spaces.Box(low, high, dtype=space.dtype)

    def storage(self, *shape: int) -> np.ndarray:
        """Zeros (*shape, *observation's shape), in memory as the simulator's observations, so that copies are fast."""
        space = self.env.single_observation_space
        return self._channels_first(np.zeros((*shape, *space.shape), space.dtype))

    def start(self, checkpoint: int = 0) -> np.ndarray:
        """Reset every environment with its own seed -> observations (n, *shape).

        `checkpoint`: the number of the last one, or 0. After each, simulators written in Python are made anew, since
        some keep more over a reset than it shows (BipedalWalker its Box2D world), and training has other seeds.
        """
        seeds = self.seeds
        anew = checkpoint != self.checkpoint and self.family not in RESERVED
        self.checkpoint = checkpoint
        if checkpoint and self.domain == TRAINING:
            seeds = environment_seeds(self.seed, RESTART, self.indices, checkpoint)
            seed_libraries(int(seeds[0]))
        self.steps, self.episodes = 0, EpisodeStatistics(self.shards, self.family)
        seeds = seeds if self.ale else seeds.tolist()  # ALE's take only an array
        obs, _ = self._ask(self.env.reset, seed=seeds, options=MAKE_ANEW if anew else None)
        if self.float_obs:
            self._require_finite("an observation", obs)
        return self._channels_first(obs)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """A vector step of actions `in_space`; `episode_ended` in the infos (n,): where a whole episode ended.

        An episode that ends by itself in the step of its limit is terminated and not truncated.
        Raises `Fault`, naming environment and step, for what is not finite.
        """
        self.steps += 1
        actions = self.in_space(actions)
        if self.first_action is None:
            advice = "; the networks have diverged: try a lower learning rate"
            self._require_finite("the action for it", actions, advice)
        obs, rewards, terminations, truncations, infos = self._ask(self.env.step, actions)
        self._require_finite("a reward", rewards)
        if self.float_obs:
            self._require_finite("an observation", obs)
        dones, ended_early = terminations | truncations, truncations
        if dones.any():
            truncations = truncations & ~terminations
            if self.channels_last:
                infos["final_obs"] = {i: self._channels_first(infos["final_obs"][i]) for i in np.flatnonzero(dones)}
            for i in np.flatnonzero(truncations) if self.float_obs else ():
                self._require_finite("its last observation", infos["final_obs"][i][None], at=i)
        if self.world is not None:
            self.world.watchdog.feed()
        infos["episode_ended"] = self.episodes.step(rewards, terminations, ended_early, infos)
        return self._channels_first(obs), rewards, terminations, truncations, infos

    def in_space(self, actions: np.ndarray) -> np.ndarray:
        """Actions (n,) from 0, or (n, d) -> of the space's type: counted from its start, or clipped to its bounds."""
        space = self.single_action_space
        if self.first_action is not None:
            return (actions + self.first_action).astype(space.dtype, copy=False)
        return actions.reshape(-1, *space.shape).astype(space.dtype).clip(space.low, space.high)

    def close(self) -> None:
        """Close all. Asynchronous ones, of which a worker died, would wait for its answer, and are killed instead."""
        workers = getattr(self.unwrapped, "processes", [])
        if all(worker.is_alive() for worker in workers):
            self.env.close(**({"timeout": 5} if workers else {}))
        else:
            for worker in workers:
                worker.kill()
            self.unwrapped.closed = True

    def _channels_first(self, obs: np.ndarray) -> np.ndarray:
        return np.moveaxis(obs, -1, -3) if self.channels_last else obs

    def _ask(self, ask: Callable[..., tuple], *inputs: Any, **options: Any) -> tuple:
        """What the simulators answer. Raises `Fault` if the process of one is gone, or if one wants to end the run."""
        try:
            return ask(*inputs, **options)
        except (EOFError, ConnectionError) as error:
            if not isinstance(self.env, AsyncVectorEnv):
                raise
            raise Fault("--vectorization async: the process of an environment ended; was it killed?") from error
        except SystemExit as error:  # a window that was closed, say: the run is not done
            which = f"{self.name}s {self.indices[0]} to {self.indices[-1]}"
            raise Fault(f"{which}: one called sys.exit({error.code}).") from error

    def _require_finite(self, what: str, values: np.ndarray, advice: str = "", at: int = 0) -> None:
        if math.isfinite(np.vdot(values, values)):  # the cheapest sum; it may overflow, so the value is looked for anew
            return
        for i in np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1)):
            value = values[i][~np.isfinite(values[i])].flat[0] if values[i].shape else values[i]
            where = f"{self.name} {self.indices[at + i]}, its step {self.steps}"
            raise Fault(f"{where}: {what} is not finite ({value}){advice}.")


@contextmanager
def open_environments(
    args: Any, action_spaces: tuple[type[gym.Space], ...], life_loss: bool = False
) -> Iterator[Environments]:
    """This rank's training environments, with the `world` of ranks and its part of the `evaluation`; closed at the end.

    `args`: a script's. Shard s plays the episodes e with e mod the number of shards = s. The machine is set as
    common/machine.py says. Raises `BadInput` as `World` and `make_envs` do, and for numbers of environments that do
    not divide.
    """
    world = World(args.cuda, args.shards)
    divisor_name = "--shards" if world.sharded else "the number of processes"
    require_divisible("--num-envs", args.num_envs, world.num_shards, divisor_name)
    size, num_episodes = args.num_envs // world.num_shards, args.eval_episodes if args.eval_every else 0
    training = [range(shard * size, (shard + 1) * size) for shard in world.shards]
    episodes = [range(shard, num_episodes, world.num_shards) for shard in world.shards]
    options = action_spaces, args.vectorization, args.num_threads or world.cores

    with ExitStack() as stack:
        flush_denormals(True)  # first, so that simulators take them alike, also those in processes of their own
        stack.callback(flush_denormals, False)

        def opened(domain: int, parts: list[range], life_loss: bool) -> Environments:
            ends = np.cumsum([len(part) for part in parts])
            if ends[-1] > 1000 and world.rank == 0:
                print(f"making {ends[-1]:,} environments of {args.env_id}", flush=True)  # may take minutes
            indices = np.concatenate(parts)
            envs = make_envs(args.env_id, args.seed, domain, indices, *options, life_loss, args.env_kwargs)
            stack.callback(envs.close)
            envs.shards = [slice(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
            envs.world = world
            return envs

        envs = opened(TRAINING, training, life_loss)
        if played := [part for part in episodes if part]:
            envs.evaluation = opened(EVALUATION, played, False)
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
    """The environments of global `indices`, which reset in the step that ends an episode (`AutoresetMode.SAME_STEP`).

    `action_spaces`: what the script can act in. `num_threads` concerns Atari and EnvPool alone, `life_loss` (a lost
    life terminates, the game goes on) Atari, `env_kwargs` (a JSON object) is the simulator's. Raises `BadInput` naming
    --env-id for an unknown id, a missing extra, or a space that no script can use, and --env-kwargs for what the
    simulator refuses.
    """
    options, (first_seed,) = json.loads(env_kwargs), environment_seeds(seed, domain, indices[:1]).tolist()
    named = f"--env-id {env_id}" + (f" --env-kwargs {env_kwargs}" if options else "")
    family = env_id.partition("/")[0]
    if taken := sorted(options.keys() & RESERVED.get(family, GYMNASIUMS)):
        raise BadInput(f"--env-kwargs {env_kwargs}: {taken[0]} is not to be set here; leave it out.")
    try:
        envs = make_vec(env_id, len(indices), first_seed, options, vectorization, num_threads, life_loss)
    except (gym.error.Error, ImportError, OSError) as error:  # OSError: a missing ROM, say
        for worker in multiprocessing.active_children():  # of a vector that could not be made whole
            worker.kill()
            worker.join()
        reason = one_line(error)
        if isinstance(error, ModuleNotFoundError) and error.name:  # gymnasium leaves a user's own module unnamed
            reason = f"needs a package that is missing: pip install {error.name.replace('_', '-')}"
        raise BadInput(f"{named}: {reason}{atari_hint(env_id)}") from error
    except (TypeError, ValueError, AssertionError, RuntimeError, LookupError, AttributeError) as error:
        if not options:
            raise
        raise BadInput(f"--env-kwargs {env_kwargs}: {type(error).__name__}: {one_line(error)}") from error
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP

    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    observation, action = f"observation space {obs_space}", f"action space {action_space}"
    fault, shape = None, obs_space.shape or ()
    axis = channels_axis(family, envs) if len(shape) == 3 else None
    if not isinstance(obs_space, gym.spaces.Box) or len(shape) not in (1, 3):
        fault = f"{observation} is not a vector (1-D Box) or an image (3-D Box)"
        if family not in RESERVED:  # which cannot be wrapped
            fault += "; gymnasium.wrappers.FlattenObservation makes a vector of it"
    elif axis == 1:
        fault = f"{observation} is an image of which it is not clear where its channels are"
        fault += ": first or last, they must be fewer than its rows and its columns"
    elif axis is not None and min(np.delete(shape, axis)) < 3:
        fault = f"{observation} is an image smaller than 3 x 3"
    elif 0 in (*shape, *(action_space.shape or ())):
        fault = f"{observation} or {action} holds no number"
    elif not isinstance(action_space, action_spaces):
        fault = f"{action} is not {' or '.join(space.__name__ for space in action_spaces)}"
    elif isinstance(action_space, gym.spaces.Box) and not np.issubdtype(action_space.dtype, np.floating):
        fault = f"{action} is a Box of integers; only a Box of floats is supported"
    if fault:
        envs.close()
        raise BadInput(f"{named}: {one_line(fault)}.")
    return Environments(envs, family, seed, domain, indices, channels_last=axis == 2)


def channels_axis(family: str, envs: VectorEnv) -> int:
    """The axis of an image's channels: 0, or 2, or 1 where that is not clear. It is the smallest, except in games."""
    shape = envs.single_observation_space.shape
    if is_atari(family, envs):
        return 0  # of any number of frames
    if family == "MinAtar":
        return 2  # of any number of kinds of objects
    return shape.index(min(shape)) if shape.count(min(shape)) == 1 else 1


def is_atari(family: str, envs: VectorEnv) -> bool:
    return family == "ALE" or (family == "envpool" and envs.atari)
