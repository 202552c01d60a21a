"""Running mean and variance over the transitions of all ranks, in float64, moved once per iteration."""

from __future__ import annotations

import numpy as np
import torch


class RunningMoments:
    """Moments of a stream of arrays of `shape`; equal on all ranks, because only sums over all ranks move them."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.shape = shape
        self.count, self.mean, self.m2 = 0.0, np.zeros(shape), np.zeros(shape)

    def sums(self, x: np.ndarray) -> np.ndarray:
        """This rank's part of a batch (n, *shape) -> one packed vector to be summed over the ranks for `merge`.

        Deviations are taken from the current mean, which all ranks share, so that squares do not cancel.
        """
        deviation = x.reshape(-1, *self.shape).astype(np.float64) - self.mean
        return np.concatenate([[len(deviation)], deviation.sum(0).ravel(), (deviation**2).sum(0).ravel()])

    def merge(self, sums: np.ndarray) -> None:
        """Add the batch whose `sums`, over all ranks, are given (Chan et al. 1979, the pairwise update)."""
        count, (first, second) = sums[0], sums[1:].reshape(2, *self.shape)
        total = self.count + count
        self.m2 = self.m2 + second - first**2 / count + (first / count) ** 2 * self.count * count / total
        self.mean = self.mean + first / total
        self.count = total

    @property
    def std(self) -> np.ndarray:
        """Standard deviation, (*shape), of the population; 1 before the first batch."""
        return np.sqrt(self.m2 / self.count + 1e-8) if self.count else np.ones(self.shape)

    def normalize(self, x: np.ndarray) -> np.ndarray:
        """(x - mean) / std, clipped at +-10, in torch's default dtype."""
        normalized = ((x - self.mean) / self.std).clip(-10, 10)
        return normalized.astype(torch.empty(0).numpy().dtype)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies, as tensors, which `torch.load(weights_only=True)` takes."""
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("count", "mean", "m2")}


def discounted_returns(rewards: np.ndarray, dones: np.ndarray, gamma: float, carry: np.ndarray) -> np.ndarray:
    """Running sums R_t = gamma R_{t-1} + r_t, each environment's since its episode's start: (T, n) -> (T, n).

    `carry` (n,) holds gamma-less R of the step before and is moved in place. Their spread scales rewards (CleanRL,
    Baselines); `dones` (T, n) ends a sum after the step.
    """
    returns = np.empty(rewards.shape)
    for step in range(len(rewards)):
        carry *= gamma
        carry += rewards[step]
        returns[step] = carry
        carry[dones[step]] = 0.0
    return returns
