"""Means and variances over the transitions of all ranks, in float64."""

import numpy as np
import torch

from common.processes import World
from common.tensors import default_float


class RunningMoments:
    """Running moments of arrays of `shape`, the same on all ranks; if not `enabled`, nothing is done to them."""

    def __init__(self, shape: tuple[int, ...] = (), enabled: bool = True) -> None:
        self.shape = shape
        self.enabled = enabled
        self.count = 0.0
        self.mean = np.zeros(shape)
        self.m2 = np.zeros(shape)  # the sum of squared deviations

    def update(self, x: np.ndarray, world: World) -> None:
        """Add (T, n, *shape) of this rank's n environments. Every rank must call."""
        if not self.enabled:
            return
        of_shards = []
        for part in np.split(x, len(world.shards), axis=1):
            part = part.reshape(-1, *self.shape).astype(np.float64)
            mean = part.mean(0)
            of_shards.append([len(part), *mean.ravel(), *((part - mean) ** 2).sum(0).ravel()])
        # as by Chan et al. (1979): large squares do not cancel
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
        return ((x - self.mean) / self.std).clip(-10, 10).astype(default_float()) if self.enabled else x

    def scaled(self, x: np.ndarray) -> np.ndarray:
        """x / std, clipped at +-10, in torch's default dtype."""
        x = (x / self.std).clip(-10, 10) if self.enabled else x
        return x.astype(default_float())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies, as tensors, which `torch.load(weights_only=True)` reads."""
        names = ("count", "mean", "m2")
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in names}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.count = state["count"].item()
        self.mean = state["mean"].numpy()
        self.m2 = state["m2"].numpy()


def discounted_returns(
    rewards: np.ndarray, dones: np.ndarray, gamma: float, before: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """R_t = gamma R_{t-1} + r_t (T, n) within episodes, which end with `dones`; and the next call's `before` (n,)."""
    returns = np.empty(rewards.shape)
    for step, goes_on in enumerate(~dones):
        returns[step] = gamma * before + rewards[step]
        before = returns[step] * goes_on
    return returns, before


def standardized(x: torch.Tensor, world: World, dims: int = 1) -> torch.Tensor:
    """Mean 0, variance 1 (by N - 1) over all ranks and the last `dims` axes; shards have equal parts of the last."""
    kept = x.shape[: x.ndim - dims]
    count = x[(0,) * len(kept)].numel() * world.world_size
    sums = []
    for part in x.double().chunk(len(world.shards), -1):
        part = part.flatten(-dims)
        sums.append(torch.stack([part.sum(-1), (part**2).sum(-1)]).flatten().cpu().numpy())
    first, second = world.gather_shards(sums).sum(0).reshape(2, *kept, *[1] * dims)  # collective
    std = np.sqrt(np.maximum(second - first**2 / count, 0.0) / max(count - 1, 1))
    mean, std = (torch.from_numpy(moment).to(x) for moment in (first / count, std))
    return (x - mean) / (std + 1e-8)


def explained_variance(advantages: np.ndarray, values: np.ndarray, world: World) -> dict[str, float]:
    """The part of the variance of returns that values (T, n) explain; none where returns are equal."""
    sums = []
    for part in np.split(np.stack([advantages, values]).astype(np.float64), len(world.shards), axis=2):
        residuals = part[0].ravel()
        returns = part.sum(0).ravel()
        sums.append([returns.size, residuals.sum(), (residuals**2).sum(), returns.sum(), (returns**2).sum()])
    count, *moments = world.gather_shards(sums).sum(0)  # collective
    residual, target = [square - total**2 / count for total, square in np.reshape(moments, (2, 2))]
    rounding = 1e-12 * (moments[1] + moments[3])  # float32 makes equal returns differ by less
    return {"losses/explained_variance": 1 - residual / target} if target > rounding else {}
