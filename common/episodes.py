"""Episodes of all ranks: those that end while learning, and evaluations, the same at every world size."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from common.distributed import World
from common.environments import Environments, Episode
from common.shards import per_shard

MAX_STEPS = 27_000  # of one evaluation episode: half an hour of an Atari game
EVALUATION_BOUNDARY = 100  # steps of an evaluation


class EpisodeStatistics:
    """Return (rewards as the environment gives them) and length of every whole episode of the local environments.

    A lost life does not end an Atari game: there EnvPool says where it ended, and of ALE the frame counter, which
    falls at real resets only.
    """

    def __init__(self, shards: list[slice]) -> None:
        self.shards, num_envs = shards, shards[-1].stop
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs, dtype=np.int64)
        self.frames = np.zeros(num_envs, dtype=np.int64)
        self.finished: list[tuple[float, int, int]] = []  # (return, length, local environment), in order of their end

    def step(self, rewards: np.ndarray, dones: np.ndarray, infos: dict) -> np.ndarray:
        """Count one vector step: rewards (n,), dones (n,) -> where whole episodes ended (n,)."""
        self.returns += rewards
        self.lengths += 1
        if "game_over" in infos:  # EnvPool
            dones = infos["game_over"]
        elif "episode_frame_number" in infos:  # ALE
            dones = dones & (infos["episode_frame_number"] < self.frames)
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


def episode_row(total: dict[str, float]) -> dict[str, float]:
    """The sums of `EpisodeStatistics.pop` over all ranks -> a row's columns; no means where no episode ended."""
    row = {"charts/episodes": int(total["episodes"])}
    if total["episodes"]:
        row["charts/episodic_return"] = total["return"] / total["episodes"]
        row["charts/episodic_length"] = total["length"] / total["episodes"]
    return row


def evaluate(
    act: Callable[[np.ndarray], np.ndarray], envs: Environments | None, episodes: int, world: World
) -> dict[str, float]:
    """Play episode e from its own seed, always the same, on the rank that has it -> a row of means and seconds.

    Every `EVALUATION_BOUNDARY` steps the ranks meet, so that a long evaluation is no hang; a stop request cuts it
    short, and then its row counts for nothing (`world.stop`).
    `act` maps a shard's observations (n, *shape) to actions for `envs`, which hold one environment for each of this
    rank's episodes (None where it has none). An episode of `MAX_STEPS` counts as it stands.
    """
    start, results = time.perf_counter(), np.zeros((episodes, 2))  # returns and lengths; those of other ranks stay 0
    first = []  # actions of episode 0, on rank 0
    playing = np.zeros(0, dtype=bool)
    if envs is not None:
        obs, act = envs.start(), per_shard(act, envs.shards, world)
        playing, statistics = np.ones(envs.num_envs, dtype=bool), EpisodeStatistics(envs.shards)
    for step in range(1, MAX_STEPS + 1):
        if playing.any():
            actions = act(obs)
            if playing[0] and envs.indices[0] == 0:
                first.append(np.array(envs.in_space(actions)[0]))
            obs, rewards, terminations, truncations, infos = envs.step(actions)
            statistics.step(rewards, terminations | truncations, infos)
            for episode_return, length, i in statistics.finished:
                if playing[i]:  # the first episode of each counts
                    results[envs.indices[i]], playing[i] = (episode_return, length), False
            statistics.finished.clear()
        if step % EVALUATION_BOUNDARY == 0 and (not world.gather([playing.sum()]).any() or world.stop):  # collective
            break
    for i in np.flatnonzero(playing):
        results[envs.indices[i]] = statistics.returns[i], statistics.lengths[i]
    if first:
        envs.first = Episode(int(envs.seeds[0]), first, results[0, 0])
    returns, lengths = world.gather(results).sum(0).reshape(episodes, 2).T  # collective
    row = {"eval/episodic_return": returns.mean(), "eval/episodic_length": lengths.mean(), "eval/episodes": episodes}
    return row | {"time/eval": time.perf_counter() - start}
