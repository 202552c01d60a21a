"""One replay buffer over all ranks, uniform or prioritised (arXiv:1511.05952); transitions stay where they arose.

Environment-major: each environment has a ring of `buffer_size // num_envs` places, a rank stores the rings of its
environments, and the ranks' shards one after another are the single buffer of world size 1, place by place. A place has
a priority: 0 where it may not be sampled yet, 1 where sampling is uniform. A batch is `batch_size` stratified points
over the priorities of all shards laid end to end; each shard serves the points that fall into its part. Uniform
one-step replay, where every stored place has priority 1, keeps no priorities and needs no collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch

from common.distributed import World
from common.errors import Fault
from common.machine import free_memory, require_memory
from common.tensors import to_tensor, upload

BLOCK, GROUP = 128, 8  # places per partial sum of priorities that is kept, and that is made when needed


class Batch(NamedTuple):
    """A shard's b of the batch's transitions, in the order of the batch; b differs between shards and may be 0."""

    places: np.ndarray  # (b,) their numbers in the batch of all shards
    indices: np.ndarray  # (b,) their places in this rank's memory
    weights: torch.Tensor  # (b,) importance weights; 1 where sampling is uniform
    obs: torch.Tensor  # (b, *shape)
    actions: torch.Tensor  # (b,) or (b, d)
    rewards: torch.Tensor  # (b,) discounted sums over n steps, fewer where the episode ended
    discounts: torch.Tensor  # (b,) gamma^steps, 0 after a termination: the factor of the bootstrapped value
    next_obs: torch.Tensor  # (b, *shape) what followed those steps


class ReplayBuffer:
    """Sizes are global. Observations are stored once, as they are, and handed out as the space has them.

    `stack`: where above 1, observations are (stack, height, width), newest frame last; only the newest is stored, and
    the rest is rebuilt, with zeros before an episode's first frame, or copies of it (`repeats_first`). `channels_last`:
    images (channels, height, width) are stored as (height, width, channels), as their simulator gives them. `alpha` 0
    is uniform sampling. Raises `BadInput` (--buffer-size) where the shards on this machine cannot fit its free memory.
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
        self.world, self.n_step, self.gamma, self.stack, self.alpha = world, n_step, gamma, stack, alpha
        self.repeats_first, self.channels_last = repeats_first, channels_last
        self.plain = alpha == 0.0 and n_step == 1  # every stored place may be sampled, with priority 1
        self.num_envs, self.envs = num_envs, np.arange(len(range(num_envs)[world.local_slice(num_envs)]))
        self.capacity = buffer_size // num_envs  # places of one environment
        self.rows = self.capacity + stack  # of observations: one after the newest, and the oldest's earlier frames
        self.time = 0  # vector steps so far; transition t is in place t % capacity, observation t in row t % rows
        n, float_dtype = len(self.envs), torch.empty(0).numpy().dtype
        self.obs_shape, frame = obs_space.shape, obs_space.shape[1:] if stack > 1 else obs_space.shape
        if channels_last:
            frame = (*frame[1:], frame[0])
        self.size = n // len(world.shards)  # environments of a shard
        self.blocks = 0 if self.plain else -(-self.size * self.capacity // BLOCK)  # of a shard
        blocks = len(world.shards) * self.blocks
        shapes = {
            "frames": ((n, self.rows, *frame), obs_space.dtype),
            "first": ((n, self.rows), np.dtype(bool)),  # observations that begin an episode
            "actions": ((n, self.capacity, *action_shape), np.dtype(action_dtype)),
            "rewards": ((n, self.capacity), float_dtype),
            "terminations": ((n, self.capacity), np.dtype(bool)),
            "truncations": ((n, self.capacity), np.dtype(bool)),
            "priorities": ((blocks, BLOCK), np.dtype(np.float64)),
        }
        self.nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
        most = int(self.capacity * min(1.0, free_memory() / (self.nbytes * world.local_world_size))) * num_envs
        require_memory("--buffer-size", buffer_size, self.nbytes, world, f"at most {most}")
        for name, (shape, dtype) in shapes.items():
            setattr(self, name, np.zeros(shape, dtype))
        self.observed = (
            np.moveaxis(self.frames, -1, 2) if channels_last else self.frames
        )  # the same memory, by obs_shape
        self.final_obs: dict[int, np.ndarray] = {}  # by place: the last observations of truncated episodes
        self.block_sums, self.block_minima = np.zeros(blocks), np.full(blocks, np.inf)
        self.discounts = gamma ** np.arange(1.0, n_step + 1.0)
        self.touched = []  # blocks whose priorities changed since the last sample
        self.largest = self.new_priority = 1.0  # seen on this rank; on any rank at the last gather

    def __len__(self) -> int:
        """Transitions stored on all ranks."""
        return min(self.time, self.capacity) * self.num_envs

    def start(self, obs: np.ndarray) -> None:
        """The observations (n, *shape) of a reset of all environments: the first, or after `cut`."""
        row = self.time % self.rows
        self.observed[:, row], self.first[:, row] = obs[:, -1] if self.stack > 1 else obs, True

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
        place, dones = self.time % self.capacity, terminations | truncations
        if self.truncations[:, place].any():
            for i in self.envs:
                self.final_obs.pop(i * self.capacity + place, None)
        if truncations.any():
            self._keep_final_obs(truncations & ~terminations, place, infos["final_obs"])
        self.actions[:, place], self.rewards[:, place] = actions, rewards
        self.terminations[:, place], self.truncations[:, place] = terminations, truncations
        self.time += 1
        row = self.time % self.rows
        self.observed[:, row], self.first[:, row] = (
            next_obs[:, -1] if self.stack > 1 else next_obs,
            infos["episode_ended"],
        )

        if not self.plain:
            self._set_priorities(self.envs * self.capacity + place, 0.0)
            self._let_sample(dones)

    def cut(self) -> None:
        """End all episodes that run, as truncations after the newest observations. Collective."""
        place = (self.time - 1) % self.capacity
        running = ~(self.terminations[:, place] | self.truncations[:, place])
        self.truncations[running, place] = True
        self._keep_final_obs(running, place, self._observations(self.envs, np.full(len(self.envs), self.time)))
        if not self.plain:
            self._let_sample(np.ones(len(running), bool))
        self.largest = float(self.world.gather([self.largest]).max())  # collective

    def _keep_final_obs(self, truncated: np.ndarray, place: int, final_obs: np.ndarray) -> None:
        for i in np.flatnonzero(truncated):
            self.final_obs[i * self.capacity + place] = np.array(final_obs[i], self.frames.dtype, order="C")
            self._require_memory_for_final_obs()

    def _let_sample(self, dones: np.ndarray) -> None:
        """A place may be sampled once its n steps are stored, or fewer where the episode has ended (`dones`, (n,))."""
        for age in range(1, min(self.n_step, self.time) + 1):
            places = self.envs * self.capacity + (self.time - age) % self.capacity
            waits = self.priorities.ravel()[self._at(places)] == 0.0
            complete = waits if age == self.n_step else waits & dones
            self._set_priorities(places[complete], self.new_priority)

    def _require_memory_for_final_obs(self) -> None:
        """Raise `Fault` once so many are kept that, at this rate, they and the unfilled rest will not fit."""
        kept, filled = len(self.final_obs), min(self.time + 1, self.capacity)
        if kept >= 1024 and kept & (kept - 1) == 0:  # at each doubling
            each, unfilled = next(iter(self.final_obs.values())).nbytes, 1 - filled / self.capacity
            needed = (kept * self.capacity / filled - kept) * each + self.nbytes * unfilled
            needed, free = needed * self.world.local_world_size / 1e9, free_memory() / 1e9
            if needed > free:
                fault = f"the rest and the last observations of truncated episodes will take {needed:.1f} GB more"
                raise Fault(f"--buffer-size: {fault}, of which {free:.1f} GB are free; set a smaller one.")

    def _at(self, indices: np.ndarray) -> np.ndarray:
        """Where the priorities of places are stored: each shard's begin a new block."""
        shards = indices // (self.size * self.capacity)
        return indices + shards * (self.blocks * BLOCK - self.size * self.capacity)

    def _set_priorities(self, indices: np.ndarray, values: np.ndarray | float) -> None:
        at = self._at(indices)
        self.priorities.reshape(-1)[at] = values
        self.touched.append(at // BLOCK)

    def sample(self, batch_size: int, generator: torch.Generator, beta: float = 1.0) -> list[Batch]:
        """`batch_size` stratified draws from the buffer of all ranks -> what each of this rank's shards has of them.

        Weights are (count p / sum p)^-beta, divided by the largest such weight in the buffer. Every rank must call.
        """
        filled, smallest, block_ends = min(self.time, self.capacity), 1.0, None
        if self.plain:
            masses = np.full(self.world.num_shards, float(filled * self.size))
        else:
            self._sum_blocks()
            block_ends = [sums.cumsum() for sums in self.block_sums.reshape(-1, self.blocks)]  # of each shard
            of_shards = [[ends[-1], self.block_minima.min(), self.largest] for ends in block_ends]
            masses, minima, maxima = self.world.gather_shards(of_shards).T  # collective
            smallest, self.new_priority = minima.min(), maxima.max()
        shard_ends = masses.cumsum()
        draws = torch.rand(batch_size, generator=generator, dtype=torch.float64).numpy()
        points = (np.arange(batch_size) + draws) * (shard_ends[-1] / batch_size)  # ascending
        points = np.minimum(points, np.nextafter(shard_ends[-1], 0))
        bounds = np.searchsorted(points, [0.0, *shard_ends])  # of each shard's part of the batch

        batches = []
        for local, shard in enumerate(self.world.shards):
            places = np.arange(bounds[shard], bounds[shard + 1])
            targets = points[places] - (shard_ends[shard] - masses[shard])
            if self.plain:
                targets = np.minimum(targets.clip(0.0), masses[0] - 1.0)
                env, place = np.divmod(targets.astype(np.int64), filled)
                indices, weights = (local * self.size + env) * self.capacity + place, np.ones(len(env))
            else:
                indices = self._find(targets, local, block_ends[local])
                weights = (self.priorities.reshape(-1)[self._at(indices)] / smallest) ** -beta
            batches.append(self._batch(places, indices, weights))
        return upload(batches, self.world.device)

    def _batch(self, places: np.ndarray, indices: np.ndarray, weights: np.ndarray) -> Batch:
        env, place = np.divmod(indices, self.capacity)
        # n-step returns, which stop at an end
        time = self.time - 1 - (self.time - 1 - place) % self.capacity
        at, last, rewards = indices, time, self.rewards.take(indices).astype(np.float64)
        running = np.ones(len(env), bool)
        for k in range(1, self.n_step):
            running &= ~(self.terminations.take(at) | self.truncations.take(at))
            last = np.where(running, time + k, last)
            at = env * self.capacity + last % self.capacity
            rewards += np.where(running, self.gamma**k * self.rewards.take(at), 0.0)
        discounts = np.where(self.terminations.take(at), 0.0, self.discounts.take(last - time))
        next_obs = self._observations(env, last + 1)
        for i in np.flatnonzero(self.truncations.take(at) & ~self.terminations.take(at)):
            next_obs[i] = self.final_obs[at[i]]

        float_dtype = torch.empty(0).numpy().dtype
        return Batch(
            places=places,
            indices=indices,
            weights=to_tensor(weights.astype(float_dtype)),
            obs=to_tensor(self._observations(env, time)),
            actions=to_tensor(self.actions[env, place]),
            rewards=to_tensor(rewards.astype(float_dtype)),
            discounts=to_tensor(discounts.astype(float_dtype)),
            next_obs=to_tensor(next_obs),
        )

    def _sum_blocks(self) -> None:
        """Update the sums and minima of those blocks whose priorities changed."""
        if self.touched:
            blocks = np.unique(np.concatenate(self.touched))
            self.touched, parts = [], self.priorities[blocks]
            self.block_sums[blocks] = parts.sum(1)
            minima = parts.min(1)
            self.block_minima[blocks] = minima if minima.all() else np.where(parts > 0, parts, np.inf).min(1)

    def _find(self, targets: np.ndarray, shard: int, block_ends: np.ndarray) -> np.ndarray:
        """The places where the running sum of a shard's priorities exceeds `targets` (b,), whatever rounding does."""
        targets = targets.clip(0.0, np.nextafter(block_ends[-1], 0))
        blocks = np.searchsorted(block_ends, targets, side="right")
        at = shard * self.blocks + blocks
        groups = self.priorities[at].reshape(-1, BLOCK // GROUP, GROUP)
        group, targets = descend(groups @ np.ones(GROUP), targets - (block_ends[blocks] - self.block_sums[at]))
        place, _ = descend(groups[np.arange(len(blocks)), group], targets)
        return shard * self.size * self.capacity + blocks * BLOCK + group * GROUP + place

    def _observations(self, env: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Observations of environments `env` (b,) at vector steps `time` (b,) -> (b, *shape), a copy."""
        if self.stack == 1:
            obs = self.frames.reshape(-1, *self.frames.shape[2:]).take(env * self.rows + time % self.rows, axis=0)
            return np.moveaxis(obs, -1, 1) if self.channels_last else obs
        rows = (time[:, None] + np.arange(1 - self.stack, 1)) % self.rows  # (b, stack), oldest first
        starts = self.first[env[:, None], rows[:, 1:]]  # what is before an episode's first frame is not of it
        known = ~np.logical_or.accumulate(starts[:, ::-1], 1)[:, ::-1]
        if self.repeats_first:
            oldest = (~known).sum(1, keepdims=True)
            return self.frames[env[:, None], np.take_along_axis(rows, np.maximum(np.arange(self.stack), oldest), 1)]
        frames = self.frames[env[:, None], rows]
        frames[:, :-1][~known] = 0
        return frames

    def state_dict(self) -> dict[str, float]:
        """What is equal on all ranks after `cut`; the rest is in `pieces`."""
        return {"time": self.time, "new_priority": float(self.new_priority), "largest": self.largest}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.time, self.new_priority, self.largest = state["time"], state["new_priority"], state["largest"]
        self.touched = [np.arange(len(self.priorities))]

    def pieces(self, shard: int) -> Iterator[np.ndarray]:
        """The memory of one of this rank's shards, array by array, to be written from or, after the state, read into.

        In the second case an array is to be filled before the next is asked for.
        """
        envs = range(shard * self.size, (shard + 1) * self.size)
        for i in envs:
            for array in (self.frames, self.first):
                yield array[i, : min(self.time + 1, self.rows)]
            for array in (self.actions, self.rewards, self.terminations, self.truncations):
                yield array[i, : min(self.time, self.capacity)]
        yield self.priorities[shard * self.blocks : (shard + 1) * self.blocks]
        start = envs.start * self.capacity
        kept = [place - start for place in self.final_obs if start <= place < envs.stop * self.capacity]
        count = np.array([len(kept)])
        yield count
        places = np.resize(np.array(kept, np.int64), count[0])
        yield places
        for place in places.tolist():
            yield self.final_obs.setdefault(start + place, np.empty(self.obs_shape, self.frames.dtype))

    def update_priorities(self, indices: np.ndarray, td_errors: torch.Tensor) -> None:
        """Set the priorities of places that `sample` drew on this rank to (|td_error| + 1e-6)^alpha, if not uniform."""
        if len(indices) and self.alpha > 0.0:
            values = (np.abs(td_errors.detach().double().cpu().numpy()) + 1e-6) ** self.alpha
            self._set_priorities(indices, values)
            self.largest = max(self.largest, float(values.max()))


def descend(parts: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the running sums of `parts` (b, k) exceed `targets` (b,), and how far targets are beyond the sum before."""
    ends = parts.cumsum(1)
    targets = np.minimum(targets.clip(0.0), np.nextafter(ends[:, -1], 0))  # rounding may have put them outside
    found = (ends <= targets[:, None]).sum(1)
    each = np.arange(len(parts))
    return found, targets - (ends[each, found] - parts[each, found])
