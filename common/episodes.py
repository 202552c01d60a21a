"""Evaluations: the same at every world size."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from common.distributed import World
from common.environments import Environments, Episode
from common.tensors import to_tensor

MAX_STEPS = 27_000  # of one evaluation episode: half an hour of an Atari game
EVALUATION_BOUNDARY = 100  # steps of an evaluation


def evaluate(
    act: Callable[[np.ndarray], np.ndarray],
    envs: Environments | None,
    episodes: int,
    world: World,
    checkpoint: int = 0,
) -> dict[str, float]:
    """Play episode e from its own seed, always the same, on the rank that has it -> a row of means and seconds.

    `act` maps a shard's observations (n, *shape) to actions for `envs`: an environment for each of this
    rank's episodes (None if it has none). `checkpoint`: the number of the last one, or 0. An episode of
    `MAX_STEPS` counts as it stands. A stop request cuts it short (`world.stop`); then its row means nothing.
    """
    start = time.perf_counter()
    results = np.zeros((episodes, 2))  # returns and lengths; those of other ranks stay 0
    first_actions = []  # of episode 0, on rank 0
    playing = np.zeros(0, dtype=bool)
    if envs is not None:
        obs = envs.start(checkpoint)
        playing = np.ones(envs.num_envs, dtype=bool)
    for step in range(1, MAX_STEPS + 1):
        if playing.any():
            actions = np.concatenate([act(to_tensor(obs[shard]).numpy()) for shard in envs.shards])
            if playing[0] and envs.indices[0] == 0:
                first_actions.append(np.array(envs.clip_to_action_space(actions)[0]))
            obs, *_ = envs.step(actions)
            for episode_return, length, i in envs.episodes.finished:
                if playing[i]:  # the first episode of each counts
                    results[envs.indices[i]] = episode_return, length
                    playing[i] = False
            envs.episodes.finished.clear()
        if step % EVALUATION_BOUNDARY == 0:  # so that a long evaluation is no hang
            num_playing = world.gather([playing.sum()]).sum()  # collective
            if num_playing == 0 or world.stop:
                break
    for i in np.flatnonzero(playing):
        results[envs.indices[i]] = envs.episodes.returns[i], envs.episodes.lengths[i]
    if first_actions:
        envs.first_episode = Episode(int(envs.seeds[0]), first_actions, results[0, 0])
    returns, lengths = world.gather(results).sum(0).reshape(episodes, 2).T  # collective
    return {
        "eval/episodic_return": returns.mean(),
        "eval/episodic_length": lengths.mean(),
        "eval/episodes": episodes,
        "time/eval": time.perf_counter() - start,
    }
