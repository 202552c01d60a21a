"""Evaluation shared by all ranks: the same episodes, and the same results, at every world size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.distributed import World
from common.environments import Environments, EpisodeStatistics

MAX_STEPS = 27_000  # of one episode: half an hour of an Atari game
BOUNDARY = 100  # steps


def evaluation_here(episodes: int, world: World) -> range:
    """The episodes that this rank plays: e with e mod world size = rank."""
    return range(world.rank, episodes, world.world_size)


def evaluate(
    act: Callable[[np.ndarray], np.ndarray], envs: Environments | None, episodes: int, world: World
) -> tuple[np.ndarray, np.ndarray]:
    """Play episode e from its own seed, always the same, on rank e mod world size -> returns, lengths: (episodes,).

    Every `BOUNDARY` steps the ranks meet, so that a long evaluation is no hang; a stop request cuts it short, and then
    its results count for nothing (`world.stop`).
    `act` maps observations (n, *shape) to actions for `envs`, which hold one environment for each of this rank's
    episodes (None where it has none). An episode of `MAX_STEPS` counts as it stands.
    """
    mine = evaluation_here(episodes, world)
    results = np.zeros((-(-episodes // world.world_size), 2))  # as long on every rank
    playing, statistics = np.ones(len(mine), dtype=bool), EpisodeStatistics(len(mine))
    if envs is not None:
        obs = envs.start()
    for step in range(1, MAX_STEPS + 1):
        if playing.any():
            obs, rewards, terminations, truncations, infos = envs.step(act(obs))
            statistics.step(rewards, terminations | truncations, infos)
            for episode_return, length, i in statistics.finished:
                if playing[i]:  # the first episode of each counts
                    results[i], playing[i] = (episode_return, length), False
            statistics.finished.clear()
        if step % BOUNDARY == 0 and (not world.gather([playing.sum()]).any() or world.stop):  # collective
            break
    for i in np.flatnonzero(playing):
        results[i] = statistics.returns[i], statistics.lengths[i]
    table = world.gather(results).reshape(world.world_size, -1, 2)  # collective
    by_episode = table.transpose(1, 0, 2).reshape(-1, 2)[:episodes]  # row e // world_size of rank e mod world_size
    return by_episode[:, 0], by_episode[:, 1]
