"""Vector environments: how they are made, seeded by global index, and counted; and evaluations in them."""

import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from common.processes import BadInput, World, end_with_parent, one_line
from common.tensors import default_float

TRAINING, EVALUATION, RESTART = range(3)  # seed domains
MAX_STEPS = 27_000  # of one evaluation episode: half an hour of an Atari game
EVALUATION_BOUNDARY = 100  # steps of an evaluation


def environment_seeds(seed: int, domain: int, indices: Sequence[int], checkpoint: int = 0) -> list[int]:
    """One seed for each global index: runs share no streams. Training has others after a `checkpoint`."""
    words = [RESTART, checkpoint] if checkpoint and domain == TRAINING else [domain]
    seeds = [np.random.SeedSequence([seed, *words, i]).generate_state(1)[0] for i in indices]
    return [int(x) >> 1 for x in seeds]  # 31 bits: what every simulator takes


class Environments:
    """This rank's environments, each with a global index and a seed of its own.

    `parts`: the global indices of each shard; `shards`: the same in local ones. Vectors are floats, images
    (channels, height, width): their channels are the last axis unless the first is shorter. `atari`: games, with
    `stack` frames in an observation, oldest first. `finished`: (return, length, local environment) of episodes
    that ended. Raises `BadInput` naming --env-id.
    """

    def __init__(self, args: Any, domain: int, parts: list[range], world: World) -> None:
        self.args = args
        self.domain = domain
        self.world = world
        self.indices = np.concatenate(parts)
        self.num_envs = len(self.indices)
        ends = np.cumsum([len(part) for part in parts])
        self.shards = [slice(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
        self.family = args.env_id.partition("/")[0]
        self.started = False
        self.envs = self._make()
        space = self.envs.single_observation_space
        self.single_action_space = self.envs.single_action_space
        self.atari = self.family == "ALE" or getattr(self.envs, "atari", False)
        self.stack = space.shape[0] if self.family == "ALE" else 1
        if not isinstance(space, gym.spaces.Box) or len(space.shape) not in (1, 3):
            needed = f"a vector (1-D Box) or an image (3-D Box), not {one_line(space)}"
            raise BadInput(f"--env-id {args.env_id}: its observations must be {needed}.")
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
        life_loss = self.domain == TRAINING and getattr(args, "life_loss", False)
        try:
            return make_vec(args, self.num_envs, args.num_threads or self.world.cores, life_loss)
        except (gym.error.Error, ImportError, OSError, TypeError) as error:  # OSError: a missing ROM, say
            missing = getattr(error, "name", None)
            advice = f" (pip install {missing})" if missing in ("envpool", "minatar") else ""
            flags = f"--env-id {args.env_id} --env-kwargs {args.env_kwargs}"
            raise BadInput(f"{flags}: {one_line(error)}{advice}") from error

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
        self.finished: list[tuple[float, int, int]] = []
        self.seeds = environment_seeds(self.args.seed, self.domain, self.indices, checkpoint)
        seed_libraries(self.seeds[0])
        obs, _ = self.envs.reset(seed=np.array(self.seeds) if self.family == "ALE" else self.seeds)
        return self._converted(obs)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        """A vector step of actions (n,) from 0, or (n, d), which are clipped to their bounds.

        Infos: `final_obs`, by environment, the last observations of truncated episodes; `episode_ended` (n,):
        where a whole episode ended, not at a lost life. An episode that ends by itself is not truncated.
        Raises `FloatingPointError`, naming environment and step, for what is not finite.
        """
        self.steps += 1
        self._require_finite("the networks have diverged: the action for it", actions)
        obs, rewards, terminations, truncations, infos = self.envs.step(self.for_simulator(actions))
        self._require_finite("its reward", rewards)
        truncations = truncations & ~terminations
        ended = self._count(rewards, terminations, truncations, infos)
        final_obs = {}
        for i in truncations.nonzero()[0]:
            [final_obs[i]] = self._converted(np.array(infos["final_obs"][i])[None], first=i)
        self.world.feed()
        infos = {"final_obs": final_obs, "episode_ended": ended}
        return self._converted(obs), rewards, terminations, truncations, infos

    def for_simulator(self, actions: np.ndarray) -> np.ndarray:
        """Actions (n,) from 0, or (n, d) -> as the space has them: its start, shape, type and bounds."""
        space = self.single_action_space
        if isinstance(space, gym.spaces.Discrete):
            return (actions + space.start).astype(space.dtype, copy=False)
        return actions.reshape(-1, *space.shape).astype(space.dtype).clip(space.low, space.high)

    def _count(self, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray, infos: dict) -> np.ndarray:
        """Count a vector step, by unchanged rewards -> where whole episodes ended."""
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
            self.finished.append((float(self.returns[i]), int(self.lengths[i]), int(i)))
            self.returns[i] = 0.0
            self.lengths[i] = 0
        return ended

    def pop_sums(self) -> np.ndarray:
        """For each shard (number here, 3): returns, lengths, number of its episodes since the last call."""
        sums = np.zeros((self.num_envs, 3))
        for episode_return, length, i in self.finished:
            sums[i] += episode_return, length, 1
        self.finished = []
        return np.add.reduceat(sums, [shard.start for shard in self.shards])

    def close(self) -> None:
        self.envs.close(**({"timeout": 5} if hasattr(self.envs, "processes") else {}))

    def _converted(self, obs: np.ndarray, first: int = 0) -> np.ndarray:
        self._require_finite("its observation", obs, first)
        if self.channels_last:
            return np.moveaxis(obs, -1, -3)
        return obs.astype(default_float()) if self.casts else obs

    def _require_finite(self, what: str, values: np.ndarray, first: int = 0) -> None:
        """Raise for a float that is not finite. `values[0]` is of the local environment `first`."""
        if values.dtype.kind != "f" or math.isfinite(np.vdot(values, values)):  # cheap; it may overflow
            return
        for i, value in enumerate(values, first):
            if not np.isfinite(value).all():
                name = "environment" if self.domain == TRAINING else "evaluation episode"
                where = f"{name} {self.indices[i]}, its step {self.steps}"
                raise FloatingPointError(f"{where}: {what} is not finite")


def make_vec(args: Any, num_envs: int, threads: int, life_loss: bool, draws: bool = False) -> VectorEnv:
    """The bare environments of --env-id, which reset in the step that ends an episode. `draws`: for films."""
    options = json.loads(args.env_kwargs)
    same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
    family = args.env_id.partition("/")[0]
    if draws and family != "ALE":
        options = {"render_mode": "rgb_array"} | options
    if family == "envpool":
        from common.pool import Pool

        return Pool(args.env_id.removeprefix("envpool/"), num_envs, threads, life_loss, options)
    if family == "ALE":
        import ale_py

        gym.register_envs(ale_py)
        own = same_step | {
            "num_threads": min(threads, num_envs),
            "life_loss_info": life_loss,
            "reward_clipping": False,  # statistics count the score; scripts take the sign
        }
        if "game" in options:
            raise gym.error.Error("game is what --env-id says; leave it out")
        options = {"repeat_action_probability": 0.0} | options  # as in NoFrameskip-v4's published results
        if draws:
            options |= {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}
        return gym.make_vec(args.env_id, num_envs, vectorization_mode="vector_entry_point", **own, **options)
    if family == "MinAtar" and args.env_id not in gym.registry:
        from minatar.gym import register_envs

        register_envs()
    own = {"wrappers": [partial(Simulator, minatar=family == "MinAtar")]}
    own["vector_kwargs"] = same_step | {"copy": False}  # scripts copy what they keep
    return gym.make_vec(args.env_id, num_envs, vectorization_mode=args.vectorization, **own, **options)


def seed_libraries(seed: int) -> None:
    """Seed what an environment may draw from beside its own generator: `random` and `numpy.random`."""
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave those generators as they were."""
    states = (random.getstate(), np.random.get_state())
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


class Simulator(gym.Wrapper):
    """One environment that is written in Python: without its infos, which nothing reads.

    In a worker process Ctrl-C spares it, it never outlives its rank, and libraries are seeded for it alone.
    """

    def __init__(self, env: gym.Env, minatar: bool) -> None:
        super().__init__(env)
        self.minatar = minatar
        # the rank itself makes one too, for its spaces
        self.in_worker = multiprocessing.current_process().name.startswith("Worker<AsyncVectorEnv>")
        if self.in_worker:
            os.setsid()
            end_with_parent()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        if self.in_worker and seed is not None:
            seed_libraries(seed)
        if self.minatar:
            self.unwrapped.game.last_action = 0  # it may stick, and MinAtar keeps it over a reset
        obs, _ = self.env.reset(seed=seed, options=options)
        return obs, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        if terminated or truncated:  # kept while the vector resets; many return one array at each step
            obs = np.array(obs, self.observation_space.dtype)
        return obs, reward, terminated, truncated, {}


class Episode(NamedTuple):
    seed: int
    actions: list[np.ndarray]  # as the simulator took them
    episodic_return: float


@generators_kept()
def evaluate(
    act: Callable[[np.ndarray], np.ndarray], args: Any, world: World
) -> tuple[dict[str, float], Episode | None]:
    """Play --eval-episodes, each from its own seed, always the same -> a row of means; and the first, to film.

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
    first_actions = []  # of episode 0, on rank 0
    for step in range(1, MAX_STEPS + 1):
        if playing.any():
            actions = np.concatenate([act(obs[shard]) for shard in envs.shards])
            if playing[0] and args.capture_video and world.rank == 0:
                first_actions.append(np.array(envs.for_simulator(actions)[0]))
            obs, *_ = envs.step(actions)
            for episode_return, length, i in envs.finished:
                if playing[i]:  # the first episode of each counts
                    results[envs.indices[i]] = episode_return, length
                    playing[i] = False
            envs.finished.clear()
        if step % EVALUATION_BOUNDARY == 0:  # so that a long evaluation is no hang
            num_playing = world.gather([playing.sum()]).sum()  # collective
            if num_playing == 0 or world.stop:
                break
    for i in playing.nonzero()[0]:
        results[envs.indices[i]] = envs.returns[i], envs.lengths[i]
    if envs:
        envs.close()
    returns, lengths = world.gather(results).sum(0).reshape(episodes, 2).T  # collective
    row = {"eval/episodic_return": returns.mean(), "eval/episodic_length": lengths.mean()}
    row |= {"eval/episodes": episodes, "time/eval": time.perf_counter() - start}
    return row, Episode(envs.seeds[0], first_actions, results[0, 0]) if first_actions else None
