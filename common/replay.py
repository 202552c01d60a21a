"""One replay buffer over all ranks, uniform or prioritised (arXiv:1511.05952); transitions stay where they arose.

Each environment has a ring of `buffer_size // num_envs` places. A rank stores the rings of its environments, and
the ranks' parts one after another are the single buffer of world size 1. A place has a priority: 0 where it may
not be sampled yet, 1 where sampling is uniform. A batch is `batch_size` stratified points over all priorities
laid end to end; each shard serves the points that fall into its part. Uniform one-step replay, where every
stored place has priority 1, keeps no priorities and needs no collective.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import psutil
import torch

from common.distributed import World
from common.errors import require
from common.tensors import default_float, to_tensor, upload

BLOCK = 128  # places per partial sum of priorities


class Batch(NamedTuple):
    """A shard's b of the batch's transitions, in the batch's order; b differs between shards and may be 0."""

    positions: np.ndarray  # (b,) in the batch of all shards
    indices: np.ndarray  # (b,) their places in this rank's memory
    weights: torch.Tensor  # (b,) importance weights; 1 where sampling is uniform
    obs: torch.Tensor  # (b, *shape)
    actions: torch.Tensor  # (b,) or (b, d)
    rewards: torch.Tensor  # (b,) discounted sums over n steps, fewer where the episode ended
    discounts: torch.Tensor  # (b,) gamma^steps, 0 after a termination: the factor of the bootstrapped value
    next_obs: torch.Tensor  # (b, *shape) what followed those steps


class ReplayBuffer:
    """Sizes are global. Observations are stored once, as they are, and handed out as the space has them.

    `stack`: where above 1, observations are (stack, height, width), newest frame last; only the newest is stored.
    The rest is rebuilt, with zeros before an episode's first frame, or copies of it (`repeats_first`).
    `channels_last`: images are stored as (height, width, channels), as their simulator gives them.
    `alpha` 0 is uniform sampling.
    Raises `BadInput` (--buffer-size) where the shards on this machine cannot fit its free memory.
    """

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        world: World,
        obs_space: gym.spaces.Box,
        action_shape: tuple[int, ...],
        action_dtype: np.dtype,
        n_step: int = 1,
        gamma: float = 0.99,
        stack: int = 1,
        alpha: float = 0.0,
        repeats_first: bool = False,
        channels_last: bool = False,
    ) -> None:
        self.world = world
        self.n_step = n_step
        self.gamma = gamma
        self.stack = stack
        self.alpha = alpha
        self.repeats_first = repeats_first
        self.channels_last = channels_last
        self.plain = alpha == 0.0 and n_step == 1  # every stored place may be sampled, with priority 1
        self.envs = np.arange(len(range(num_envs)[world.local_slice(num_envs)]))
        self.size = len(self.envs) // len(world.shards)  # environments of a shard
        self.capacity = buffer_size // num_envs  # places of one environment
        self.width = -(-self.capacity // BLOCK) * BLOCK  # the same in memory, whole blocks
        self.rows = self.capacity + stack  # of observations: one after the newest, earlier frames of the oldest
        self.time = 0  # vector steps so far; transition t has place t % capacity, observation t row t % rows
        frame = obs_space.shape[1:] if stack > 1 else obs_space.shape
        if channels_last:
            frame = (*frame[1:], frame[0])
        rows = (len(self.envs), self.rows)
        places = (len(self.envs), self.width)
        shapes = {
            "frames": ((*rows, *frame), obs_space.dtype),
            "first": (rows, np.dtype(bool)),  # observations that begin an episode
            "actions": ((*places, *action_shape), np.dtype(action_dtype)),
            "rewards": (places, default_float()),
            "terminations": (places, np.dtype(bool)),
            "truncations": (places, np.dtype(bool)),
            "priorities": ((len(self.envs), 0 if self.plain else self.width), np.dtype(np.float64)),
        }
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
        free = psutil.virtual_memory().available / world.local_world_size
        most = int(self.capacity * min(1.0, free / nbytes)) * num_envs
        needed = f"at most {most}: it needs {nbytes / 1e9:.1f} GB a process, of which {free / 1e9:.1f} GB are free"
        require(nbytes <= free, "--buffer-size", buffer_size, needed)
        for name, (shape, dtype) in shapes.items():
            setattr(self, name, np.zeros(shape, dtype))
        self.observed = np.moveaxis(self.frames, -1, 2) if channels_last else self.frames  # the same memory
        self.final_obs: dict[int, np.ndarray] = {}  # by place: the last observations of truncated episodes
        self.block_sums = np.zeros(self.priorities.size // BLOCK)
        self.changed_blocks: list[np.ndarray] = []  # since the last sample
        self.discounts = gamma ** np.arange(1.0, n_step + 1.0)
        self.largest = 1.0  # priority that was set on this rank
        self.new_priority = 1.0  # the largest on any rank, as of the last sample

    def start(self, obs: np.ndarray) -> None:
        """The observations (n, *shape) of a reset of all environments: the first, or after `cut`."""
        self._observe(obs, True)

    def _observe(self, obs: np.ndarray, first: np.ndarray | bool) -> None:
        row = self.time % self.rows
        self.observed[:, row] = obs[:, -1] if self.stack > 1 else obs
        self.first[:, row] = first

    def add(
        self,
        actions: np.ndarray,  # (n,) or (n, d)
        rewards: np.ndarray,  # (n,), and so all below but next_obs
        terminations: np.ndarray,
        truncations: np.ndarray,
        next_obs: np.ndarray,  # (n, *shape): after a reset, the new episode's
        infos: dict,  # with `final_obs` of truncated episodes, and `episode_ended`: not at a lost life
    ) -> None:
        """Store one vector step of this rank's environments over the oldest."""
        place = self.time % self.capacity
        for i in self.truncations[:, place].nonzero()[0]:
            self.final_obs.pop(i * self.width + place, None)
        if "final_obs" in infos:  # an episode ended
            self._copy_final_obs(truncations & ~terminations, place, infos["final_obs"])
        self.actions[:, place] = actions
        self.rewards[:, place] = rewards
        self.terminations[:, place] = terminations
        self.truncations[:, place] = truncations
        self.time += 1
        self._observe(next_obs, infos["episode_ended"])
        if not self.plain:
            self._set_priorities(self.envs * self.width + place, 0.0)
            self._let_sample(terminations | truncations)

    def cut(self) -> None:
        """End all running episodes, as truncations after the newest observations. Collective."""
        place = (self.time - 1) % self.capacity
        running = ~(self.terminations[:, place] | self.truncations[:, place])
        self.truncations[running, place] = True
        newest = self._observations(self.envs, np.full(len(self.envs), self.time))
        self._copy_final_obs(running, place, newest)
        if not self.plain:
            self._let_sample(np.ones(len(running), bool))
        self.largest = float(self.world.gather([self.largest]).max())  # collective

    def _copy_final_obs(self, truncated: np.ndarray, place: int, final_obs: np.ndarray) -> None:
        for i in np.flatnonzero(truncated):
            self.final_obs[i * self.width + place] = np.array(final_obs[i], self.frames.dtype, order="C")

    def _let_sample(self, dones: np.ndarray) -> None:
        """Let places be sampled whose n steps are stored, or fewer where `dones` (n,) ends an episode."""
        for age in range(1, min(self.n_step, self.time) + 1):
            places = self.envs * self.width + (self.time - age) % self.capacity
            waiting = self.priorities.take(places) == 0.0
            complete = waiting if age == self.n_step else waiting & dones
            self._set_priorities(places[complete], self.new_priority)

    def _set_priorities(self, indices: np.ndarray, values: np.ndarray | float) -> None:
        self.priorities.reshape(-1)[indices] = values
        self.changed_blocks.append(indices // BLOCK)

    def sample(self, batch_size: int, generator: torch.Generator, beta: float = 1.0) -> list[Batch]:
        """`batch_size` stratified draws from the buffer of all ranks -> what each of this rank's shards has of them.

        Weights are (count p / sum p)^-beta, divided by the largest of the batch. Every rank must call.
        """
        filled = min(self.time, self.capacity)
        masses = np.full(self.world.num_shards, float(filled * self.size))
        if not self.plain:
            self._sum_blocks()
            block_ends = self.block_sums.reshape(len(self.world.shards), -1).cumsum(1)
            of_shards = [[ends[-1], self.largest] for ends in block_ends]
            masses, maxima = self.world.gather_shards(of_shards).T  # collective
            self.new_priority = maxima.max()
        shard_ends = masses.cumsum()
        draws = torch.rand(batch_size, generator=generator, dtype=torch.float64).numpy()
        points = (np.arange(batch_size) + draws) * (shard_ends[-1] / batch_size)  # ascending
        points = np.minimum(points, np.nextafter(shard_ends[-1], 0))
        bounds = np.searchsorted(points, [0.0, *shard_ends])  # of each shard's part of the batch

        parts = []  # each shard's positions in the batch and places in memory
        for local, shard in enumerate(self.world.shards):
            positions = np.arange(bounds[shard], bounds[shard + 1])
            targets = points[positions] - (shard_ends[shard] - masses[shard])
            if self.plain:
                targets = np.minimum(targets.clip(0.0), masses[0] - 1.0)
                env, place = np.divmod(targets.astype(np.int64), filled)
                indices = (local * self.size + env) * self.width + place
            else:
                indices = self._find(targets, local, block_ends[local])
            parts.append((positions, indices))
        weights = [np.ones(len(indices)) for _, indices in parts]
        if self.alpha > 0.0:
            priorities = [self.priorities.take(indices) for _, indices in parts]
            smallest = self.world.gather_shards([[x.min(initial=np.inf)] for x in priorities]).min()  # collective
            weights = [(x / smallest) ** -beta for x in priorities]
        batches = [self._batch(*part, x) for part, x in zip(parts, weights, strict=True)]
        return upload(batches, self.world.device)

    def _batch(self, positions: np.ndarray, indices: np.ndarray, weights: np.ndarray) -> Batch:
        env, place = np.divmod(indices, self.width)
        # n-step returns, which stop at an end
        time = self.time - 1 - (self.time - 1 - place) % self.capacity
        last = time
        last_indices = indices
        rewards = self.rewards.take(indices).astype(np.float64)
        running = np.ones(len(env), bool)
        for k in range(1, self.n_step):
            running &= ~(self.terminations.take(last_indices) | self.truncations.take(last_indices))
            last = np.where(running, time + k, last)
            last_indices = env * self.width + last % self.capacity
            rewards += np.where(running, self.gamma**k * self.rewards.take(last_indices), 0.0)
        terminations = self.terminations.take(last_indices)
        discounts = np.where(terminations, 0.0, self.discounts.take(last - time))
        next_obs = self._observations(env, last + 1)
        for i in np.flatnonzero(self.truncations.take(last_indices) & ~terminations):
            next_obs[i] = self.final_obs[last_indices[i]]

        return Batch(
            positions=positions,
            indices=indices,
            weights=to_tensor(weights.astype(self.rewards.dtype)),
            obs=to_tensor(self._observations(env, time)),
            actions=to_tensor(self.actions[env, place]),
            rewards=to_tensor(rewards.astype(self.rewards.dtype)),
            discounts=to_tensor(discounts.astype(self.rewards.dtype)),
            next_obs=to_tensor(next_obs),
        )

    def _sum_blocks(self) -> None:
        """Update the sums of those blocks whose priorities changed."""
        if self.changed_blocks:
            blocks = np.unique(np.concatenate(self.changed_blocks))
            self.changed_blocks = []
            self.block_sums[blocks] = self.priorities.reshape(-1, BLOCK)[blocks].sum(1)

    def _find(self, targets: np.ndarray, shard: int, block_ends: np.ndarray) -> np.ndarray:
        """Where the running sum of a shard's priorities exceeds `targets` (b,), whatever rounding does."""
        targets = targets.clip(0.0, np.nextafter(block_ends[-1], 0))
        blocks = np.searchsorted(block_ends, targets, side="right")
        targets = targets - (block_ends[blocks] - self.block_sums[shard * len(block_ends) + blocks])
        blocks += shard * len(block_ends)
        ends = self.priorities.reshape(-1, BLOCK)[blocks].cumsum(1)
        targets = np.minimum(targets.clip(0.0), np.nextafter(ends[:, -1], 0))  # rounding may put them outside
        return blocks * BLOCK + (ends <= targets[:, None]).sum(1)

    def _observations(self, env: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Observations of environments `env` (b,) at vector steps `time` (b,) -> (b, *shape), a copy."""
        if self.stack == 1:
            frames = self.frames.reshape(-1, *self.frames.shape[2:])
            obs = frames.take(env * self.rows + time % self.rows, axis=0)
            return np.moveaxis(obs, -1, 1) if self.channels_last else obs
        rows = (time[:, None] + np.arange(1 - self.stack, 1)) % self.rows  # (b, stack), oldest first
        starts = self.first[env[:, None], rows[:, 1:]]  # what is before an episode's first frame is not of it
        known = ~np.logical_or.accumulate(starts[:, ::-1], 1)[:, ::-1]
        if self.repeats_first:
            oldest = (~known).sum(1, keepdims=True)
            rows = np.take_along_axis(rows, np.maximum(np.arange(self.stack), oldest), 1)
            return self.frames[env[:, None], rows]
        frames = self.frames[env[:, None], rows]
        frames[:, :-1][~known] = 0
        return frames

    def state_dict(self) -> dict[str, float]:
        """What is equal on all ranks after `cut`; the rest is in `shard_state`."""
        return {"time": self.time, "new_priority": float(self.new_priority), "largest": self.largest}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.time = state["time"]
        self.new_priority = state["new_priority"]
        self.largest = state["largest"]
        self.changed_blocks = [np.arange(len(self.block_sums))]

    def shard_state(self, shard: int) -> dict[str, Any]:
        """What one of this rank's shards holds, after `cut`: views of its memory, by environment."""
        envs = range(shard * self.size, (shard + 1) * self.size)
        rows = min(self.time + 1, self.rows)
        places = min(self.time, self.capacity)
        lengths = {"frames": rows, "first": rows, "actions": places, "rewards": places}
        lengths |= {"terminations": places, "truncations": places, "priorities": places}
        state = {}
        for name, length in lengths.items():
            state[name] = [torch.from_numpy(getattr(self, name)[i, :length]) for i in envs]
        start = envs.start * self.width
        final_obs = {}
        for place, obs in self.final_obs.items():
            if 0 <= place - start < self.size * self.width:
                final_obs[int(place) - start] = torch.from_numpy(obs)
        return state | {"final_obs": final_obs}

    def load_shard(self, shard: int, state: dict[str, Any]) -> None:
        """Set one of this rank's shards, after `load_state_dict`, to what `shard_state` returned."""
        start = shard * self.size * self.width
        for i, x in state["final_obs"].items():
            self.final_obs[start + i] = x.numpy().copy()
        for name, memory in self.shard_state(shard).items():
            if name != "final_obs":
                torch._foreach_copy_(memory, state[name])

    def update_priorities(self, indices: np.ndarray, td_errors: torch.Tensor) -> None:
        """Set the priorities of places that `sample` drew on this rank to (|td_error| + 1e-6)^alpha."""
        if len(indices) and self.alpha > 0.0:
            values = (np.abs(td_errors.detach().double().cpu().numpy()) + 1e-6) ** self.alpha
            self._set_priorities(indices, values)
            self.largest = max(self.largest, float(values.max()))
