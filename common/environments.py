"""Vector environments: how they are made, seeded by global index, and counted; and evaluations in them."""

import json
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import FlattenObservation

from common.processes import BadInput, World, end_with_parent, one_line
from common.tensors import default_float

TRAINING, EVALUATION, RESTART = range(3)  # seed domains
MAX_STEPS = 27_000  # of one evaluation episode: half an hour of an Atari game
EVALUATION_BOUNDARY = 100  # steps of an evaluation
PROGRESS_PERIOD = 10.0  # seconds between two lines of progress where there is no terminal


def environment_seeds(seed: int, domain: int, indices: Sequence[int], checkpoint: int = 0) -> list[int]:
    """One seed for each global index: runs share no streams. Training has others after a `checkpoint`."""
    words = [RESTART, checkpoint] if checkpoint and domain == TRAINING else [domain]
    seeds = [np.random.SeedSequence([seed, *words, i]).generate_state(1)[0] for i in indices]
    return [int(x) >> 1 for x in seeds]  # 31 bits: what every simulator takes


class Environments:
    """This rank's environments, each with a global index and a seed of its own.

    `parts`: the global indices of each shard; `shards`: the same in local ones. Vectors are floats, images
    (channels, height, width): their channels are the last axis unless the first is shorter. `atari`: games, with
    `stack` frames in an observation, oldest first. Raises `BadInput` naming --env-id.
    """

    def __init__(self, args: Any, domain: int, parts: list[range], world: World, draws: bool = False) -> None:
        self.args = args
        self.domain = domain
        self.world = world
        self.draws = draws  # for films
        self.indices = np.concatenate(parts)
        self.num_envs = len(self.indices)
        name = "environment" if domain == TRAINING else "evaluation episode"
        self.names = [f"{name} {i}" for i in self.indices]
        ends = np.cumsum([len(part) for part in parts])
        self.shards = [slice(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
        self.family = args.env_id.partition("/")[0]
        self.started = False
        self.envs = self._make()
        space = self.envs.single_action_space
        self.action_space = self.single_action_space = space
        if isinstance(space, gym.spaces.Box):  # scripts see an action between finite bounds in units of [-1, 1]
            with np.errstate(over="ignore"):
                bounded = np.isfinite(space.high - space.low)  # not where a type's largest numbers stand for none
            low, high = np.where(bounded, space.low, -1.0), np.where(bounded, space.high, 1.0)
            self.center = (low + high) / 2
            self.scale = (high - low) / 2
            low, high = np.where(bounded, -1.0, space.low), np.where(bounded, 1.0, space.high)
            self.single_action_space = gym.spaces.Box(low, high, dtype=space.dtype)
        space = self.envs.single_observation_space
        if not draws and (not isinstance(space, gym.spaces.Box) or len(space.shape) not in (1, 3) or 0 in space.shape):
            advice = "register a wrapper that makes them a Box (docs/environments.md)"
            raise BadInput(f"--env-id {args.env_id}: its observations, {one_line(space)}, make no vector; {advice}.")
        self.atari = self.family == "ALE" or getattr(self.envs, "atari", False)
        self.stack = space.shape[0] if self.family == "ALE" else 1
        self.channels_last = len(space.shape) == 3 and not self.atari and space.shape[-1] <= space.shape[0]
        self.casts = len(space.shape) == 1 and space.dtype.kind != "f"
        if self.channels_last:
            space = gym.spaces.Box(np.moveaxis(space.low, -1, 0), np.moveaxis(space.high, -1, 0), dtype=space.dtype)
        elif self.casts:
            space = gym.spaces.Box(-np.inf, np.inf, space.shape, default_float())
        self.single_observation_space = space

    def _make(self) -> VectorEnv:
        args = self.args
        seed_libraries(environment_seeds(args.seed, self.domain, self.indices[:1])[0])
        try:
            return self._vector()
        except (gym.error.Error, ImportError, TypeError) as error:
            if isinstance(error, TypeError) and "argument" not in str(error):  # the constructor's own
                raise
            unknown = isinstance(error, gym.error.NameNotFound)
            advice = " (Atari: ALE/Pong-v5; where a package or a file registers it: MODULE:ID)" if unknown else ""
            options = f" --env-kwargs {args.env_kwargs}" if args.env_kwargs != "{}" else ""
            raise BadInput(f"--env-id {args.env_id}{options}: {one_line(error)}{advice}") from error

    def _vector(self) -> VectorEnv:
        """The bare environments of --env-id, which reset in the step that ends an episode."""
        args = self.args
        threads = min(args.num_threads or self.world.cores, self.num_envs)
        life_loss = self.domain == TRAINING and getattr(args, "life_loss", False)
        options = json.loads(args.env_kwargs)
        same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
        if self.draws and self.family != "ALE":
            options = {"render_mode": "rgb_array"} | options
        if self.family == "envpool":
            from common.pool import Pool

            return Pool(args.env_id.removeprefix("envpool/"), self.num_envs, threads, life_loss, options)
        if self.family == "ALE":
            import ale_py

            gym.register_envs(ale_py)
            # not clipped: statistics count the score, scripts take the sign
            own = same_step | {"num_threads": threads, "life_loss_info": life_loss, "reward_clipping": False}
            if {"game", "batch_size"} & options.keys():
                raise gym.error.Error("leave out game and batch_size")
            options = {"repeat_action_probability": 0.0} | options  # as in published results
            if self.draws:
                options |= {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}
            return gym.make_vec(args.env_id, self.num_envs, vectorization_mode="vector_entry_point", **own, **options)
        kind = AsyncVectorEnv if args.vectorization == "async" else SyncVectorEnv
        makers = [partial(Simulator, args.env_id, options, name) for name in self.names]
        return kind(makers, **same_step, copy=False)  # scripts copy what they keep

    def reset(self, checkpoint: int = 0) -> np.ndarray:
        """Start an episode in every environment -> observations (n, *shape). `checkpoint`: the last one's.

        The first time takes what is there, later ones make all simulators anew: some keep hidden state.
        """
        if self.started:
            self.close()
            self.envs = self._make()
        self.started = True
        self.steps = 0
        self.returns = np.zeros(self.num_envs)
        self.lengths = np.zeros(self.num_envs, dtype=np.int64)
        self.frames = np.zeros(self.num_envs, dtype=np.int64)  # of an Atari game so far
        self.episodes = np.zeros((self.num_envs, 3))  # of those that ended: sums of returns and lengths, number
        self.seeds = environment_seeds(self.args.seed, self.domain, self.indices, checkpoint)
        seed_libraries(self.seeds[0])
        obs, _ = self.envs.reset(seed=np.array(self.seeds) if self.family == "ALE" else self.seeds)
        return self._converted(obs)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """A vector step of actions (n,) from 0, or (n, d) in units of `single_action_space`, which are clipped.

        Infos: `final_obs`, by environment, the last observations of truncated episodes; `episode_ended` (n,):
        where a whole episode ended, not at a lost life. An episode that ends by itself is not truncated.
        Raises `FloatingPointError`, naming environment and step, for what is not finite.
        """
        self.steps += 1
        self._require_finite("the networks have diverged: the action for it", actions)
        obs, rewards, terminations, truncations, infos = self.envs.step(self.for_simulator(actions))
        self._require_finite("its reward", rewards)
        truncations = truncations & ~terminations
        self.returns += rewards
        self.lengths += 1
        ended = terminations | truncations
        if self.family == "ALE":
            over = infos["episode_frame_number"] < self.frames  # not where a life was lost
            ended = truncations | (terminations & over)
            self.frames[:] = infos["episode_frame_number"]
        elif self.family == "envpool":
            ended = infos["game_over"]
        for i in ended.nonzero()[0]:
            self.episodes[i] += (self.returns[i], self.lengths[i], 1)
            self.returns[i] = 0.0
            self.lengths[i] = 0
        final_obs = {}
        for i in truncations.nonzero()[0]:
            [final_obs[i]] = self._converted(np.array(infos["final_obs"][i])[None], first=i)
        self.world.feed()
        infos = {"final_obs": final_obs, "episode_ended": ended}
        return self._converted(obs), rewards, terminations, truncations, infos

    def for_simulator(self, actions: np.ndarray) -> np.ndarray:
        """Actions (n,) from 0, or (n, d) -> as the space has them: its start, shape, type and bounds."""
        space = self.action_space
        if not isinstance(space, gym.spaces.Box):
            return (actions + getattr(space, "start", 0)).astype(space.dtype, copy=False)
        actions = self.center + self.scale * actions.reshape(-1, *space.shape)
        return actions.clip(space.low, space.high).astype(space.dtype)

    def pop_sums(self) -> np.ndarray:
        """For each shard (number here, 3): returns, lengths, number of its episodes since the last call."""
        sums = np.add.reduceat(self.episodes, [shard.start for shard in self.shards])
        self.episodes[:] = 0.0
        return sums

    def close(self) -> None:
        try:
            self.envs.close(**({"timeout": 5} if hasattr(self.envs, "processes") else {}))
        except Exception:  # a simulator's own; nothing is lost by it
            traceback.print_exc()

    def _converted(self, obs: np.ndarray, first: int = 0) -> np.ndarray:
        self._require_finite("its observation", obs, first)
        if self.channels_last:
            return np.moveaxis(obs, -1, -3)
        return obs.astype(default_float()) if self.casts else obs

    def _require_finite(self, what: str, values: np.ndarray, first: int = 0) -> None:
        """Raise for what is not finite in torch's default type. `values[0]`: of the local environment `first`."""
        if values.dtype.kind != "f" or np.vdot(values, values) < 1e38:  # cheap, and False for NaN
            return
        with np.errstate(over="ignore"):
            finite = np.isfinite(values.astype(default_float()))
        for i, of_environment in enumerate(finite, first):
            if not of_environment.all():
                where = f"{self.names[i]}, its step {self.steps}"
                raise FloatingPointError(f"{where}: {what} is not finite, or too large for {default_float()}")


def seed_libraries(seed: int) -> None:
    """Seed what an environment may draw from beside its own generator: `random` and `numpy.random`."""
    random.seed(seed)
    np.random.seed(seed)


class Simulator(gym.Wrapper):
    """One environment that is written in Python: without its infos, which nothing reads.

    Observations that are neither a vector nor an image become a vector, as `metadata` says. Each episode has a seed,
    also of environments that would seed themselves. In a worker process Ctrl-C spares it, it never outlives its rank,
    and libraries are seeded for it alone. Errors carry its `name` and step. Raises `BadInput` for a wrong space.
    """

    def __init__(self, env_id: str, options: dict[str, Any], name: str) -> None:
        self.minatar = env_id.startswith("MinAtar/")
        if self.minatar and env_id not in gym.registry:
            from minatar.gym import register_envs

            register_envs()
        env = gym.make(env_id, **options)
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) not in (1, 3):
            with suppress(NotImplementedError):
                env = FlattenObservation(env)
                env.metadata = env.metadata | {"flattened": one_line(space)}
        super().__init__(env)
        self.shape = self.observation_space.shape
        self.name = name
        self.num_steps = 0
        self.in_worker = multiprocessing.current_process().name.startswith("Worker<AsyncVectorEnv>")
        if self.in_worker:
            os.setsid()
            end_with_parent()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        if seed is None:
            seed = int(self.seeds.integers(2**31))
        else:
            self.seeds = np.random.default_rng(seed)  # of the episodes that follow
            for env in (self, self.unwrapped):
                env.action_space.seed(seed)
                env.observation_space.seed(seed)
            if self.in_worker:
                seed_libraries(seed)
        if self.minatar:
            self.unwrapped.game.last_action = 0  # it may stick, and MinAtar keeps it over a reset
        try:
            obs, _ = self.env.reset(seed=seed, options=options)
        except Exception as error:
            error.add_note(f"{self.name}, its reset after step {self.num_steps}")
            raise
        obs = np.asarray(obs)
        space = self.observation_space
        if obs.shape != space.shape or not np.can_cast(obs.dtype, space.dtype, "same_kind"):
            fault = f"observed {obs.dtype}{list(obs.shape)}, where its space has {space.dtype}{list(space.shape)}"
            raise BadInput(f"--env-id {self.spec.id}: {fault}.")
        return obs, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.num_steps += 1
        try:
            obs, reward, terminated, truncated, _ = self.env.step(action)
            reward = reward.item() if isinstance(reward, np.ndarray) else float(reward)
            if getattr(obs, "shape", None) != self.shape and np.shape(obs) != self.shape:
                raise ValueError(f"it observed {np.shape(obs)}, where its space has {self.shape}")
        except Exception as error:
            error.add_note(f"{self.name}, its step {self.num_steps}")
            raise
        if terminated or truncated:  # kept while the vector resets; many return one array at each step
            obs = np.array(obs, self.observation_space.dtype)
        return obs, reward, terminated, truncated, {}


class Episode(NamedTuple):
    first_obs: np.ndarray | None  # of all of the rank's episodes
    actions: list[np.ndarray]  # with --capture-video
    episodic_return: float


def evaluate(
    act: Callable[[np.ndarray], np.ndarray], args: Any, world: World, note: Callable[[str], None] = print
) -> tuple[dict[str, float], Episode]:
    """Play --eval-episodes, each from its own seed, always the same -> a row of means; and this rank's first.

    `act` maps a shard's observations (n, *shape) to actions. Shard s plays the episodes e with e mod the number
    of shards = s. An episode of `MAX_STEPS` counts as it stands. A stop request cuts it short (`world.stop`).
    """
    start = time.perf_counter()
    episodes = args.eval_episodes
    results = np.zeros((episodes, 2))  # returns and lengths; those of other ranks stay 0
    parts = [range(shard, episodes, world.num_shards) for shard in world.shards if shard < episodes]
    envs = Environments(args, EVALUATION, parts, world) if parts else None
    playing = np.ones(envs.num_envs if envs else 0, dtype=bool)
    obs = envs.reset() if envs else None
    first_obs = obs.copy() if envs else None
    first_actions = []
    shown = start
    for step in range(1, MAX_STEPS + 1):
        if playing.any():
            actions = np.concatenate([act(obs[shard]) for shard in envs.shards])
            if playing[0] and args.capture_video and world.rank == 0:
                first_actions.append(np.array(actions[0]))
            obs, *_ = envs.step(actions)
            for i in np.flatnonzero(playing & (envs.episodes[:, 2] > 0)):  # the first episode of each counts
                results[envs.indices[i]] = envs.episodes[i, :2]
                playing[i] = False
        if step % EVALUATION_BOUNDARY == 0:  # so that a long evaluation is no hang
            num_playing = world.gather([playing.sum()]).sum()  # collective
            if num_playing == 0 or world.stop:
                break
            if time.perf_counter() > shown + PROGRESS_PERIOD:
                shown = time.perf_counter()
                note(f"evaluation: {num_playing:.0f} of {episodes} episodes go on after {step:,} steps")
    for i in playing.nonzero()[0]:
        results[envs.indices[i]] = envs.returns[i], envs.lengths[i]
    if envs:
        envs.close()
    returns, lengths = world.gather(results).sum(0).reshape(episodes, 2).T  # collective
    row = {"eval/episodic_return": returns.mean(), "eval/episodic_length": lengths.mean()}
    row |= {"eval/episodes": episodes, "time/eval": time.perf_counter() - start}
    return row, Episode(first_obs, first_actions, results[0, 0])
