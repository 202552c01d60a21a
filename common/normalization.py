"""Means and variances over the transitions of all ranks, in float64."""

from __future__ import annotations

import numpy as np
import torch

from common.distributed import World
from common.tensors import default_float, upload


class RunningMoments:
    """Running moments of arrays of `shape`, the same on all ranks. `m2`: the sum of squared deviations.

    If not `enabled`, nothing is counted, and `normalized` and `scaled` return their arguments.
    """

    def __init__(self, shape: tuple[int, ...] = (), enabled: bool = True) -> None:
        self.shape = shape
        self.enabled = enabled
        self.count = 0.0
        self.mean = np.zeros(shape)
        self.m2 = np.zeros(shape)

    def update(self, parts: list[np.ndarray], world: World) -> None:
        """Add a batch: (..., *shape) of each of this rank's shards, in order. Every rank must call.

        Moments are merged as by Chan et al. (1979), so that large squares do not cancel.
        """
        if not self.enabled:
            return
        of_shards = []
        for x in parts:
            x = x.reshape(-1, *self.shape).astype(np.float64)
            mean = x.mean(0)
            of_shards.append([len(x), *mean.ravel(), *((x - mean) ** 2).sum(0).ravel()])
        for count, *moments in world.gather_shards(of_shards):  # collective
            mean, m2 = np.reshape(moments, (2, *self.shape))
            total = self.count + count
            delta = mean - self.mean
            self.m2 = self.m2 + m2 + delta**2 * self.count * count / total
            self.mean = self.mean + delta * count / total
            self.count = total

    @property
    def std(self) -> np.ndarray:
        """Standard deviation, (*shape), of the population; 1 before the first batch."""
        return np.sqrt(self.m2 / self.count + 1e-8) if self.count else np.ones(self.shape)

    def normalized(self, x: np.ndarray) -> np.ndarray:
        """(x - mean) / std, clipped at +-10, in torch's default dtype."""
        if not self.enabled:
            return x
        return ((x - self.mean) / self.std).clip(-10, 10).astype(default_float())

    def scaled(self, x: np.ndarray) -> np.ndarray:
        """x / std, clipped at +-10."""
        return (x / self.std).clip(-10, 10) if self.enabled else x

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies, as tensors, which `torch.load(weights_only=True)` reads."""
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("count", "mean", "m2")}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.count = state["count"].item()
        self.mean = state["mean"].numpy()
        self.m2 = state["m2"].numpy()


def discounted_returns(rewards: np.ndarray, dones: np.ndarray, gamma: float, carry: np.ndarray) -> np.ndarray:
    """Sums R_t = gamma R_{t-1} + r_t since the episode's start: (T, n) -> (T, n). Their deviation scales rewards.

    `carry` (n,): R of the step before, updated in place. `dones` (T, n): a sum ends after that step.
    """
    returns = np.empty(rewards.shape)
    for step in range(len(rewards)):
        carry *= gamma
        carry += rewards[step]
        returns[step] = carry
        carry[dones[step]] = 0.0
    return returns


def standardized(parts: list[torch.Tensor], world: World) -> list[torch.Tensor]:
    """(..., size) of each shard here -> mean 0 and variance 1 (by N - 1) over `size` and all shards."""
    sums = []
    shape = parts[0].shape[:-1]
    count = parts[0].shape[-1] * world.num_shards
    for x in parts:
        x = x.double()
        sums.append(torch.stack([x.sum(-1), (x**2).sum(-1)]).flatten().cpu().numpy())
    first, second = world.gather_shards(sums).sum(0).reshape(2, *shape, 1)  # collective
    std = np.sqrt(np.maximum(second - first**2 / count, 0.0) / max(count - 1, 1))
    moments = [torch.from_numpy(x).to(parts[0].dtype) for x in (first / count, std)]
    mean, std = upload(moments, parts[0].device)
    return [(x - mean) / (std + 1e-8) for x in parts]


def explained_variance(parts: list[tuple[torch.Tensor, torch.Tensor]], world: World) -> dict[str, float]:
    """Advantages, values (B,) of each shard here -> the part of the returns' variance that the values explain.

    Over all shards, as a column; no column where all returns are equal.
    """
    sums = []
    for advantages, values in parts:
        residuals = advantages.double().cpu().numpy()
        values = values.double().cpu().numpy()
        returns = values + residuals
        sums.append([returns.size, residuals.sum(), (residuals**2).sum(), returns.sum(), (returns**2).sum()])
    count, *moments = world.gather_shards(sums).sum(0)  # collective
    residual, target = [square - total**2 / count for total, square in np.reshape(moments, (2, 2))]
    rounding = 1e-12 * (moments[1] + moments[3])  # float32 makes equal returns differ by less
    return {"losses/explained_variance": 1 - residual / target} if target > rounding else {}
