"""One replay buffer over all ranks: the same draws, whatever the number of shards; n-step returns and frame stacks."""

from importlib.util import find_spec

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.environments import TRAINING, make_envs
from common.replay import ReplayBuffer

ENVPOOL = pytest.mark.skipif(find_spec("envpool") is None, reason="pip install envpool==1.2.5")
VECTOR = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)


class FakeWorld:
    """A rank of a world that lives in this process: `gather_shards` gives what the test has collected."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.local_world_size = rank, world_size, 1
        self.num_shards, self.shards = world_size, range(rank, rank + 1)
        self.tables = iter([])
        self.device = torch.device("cpu")

    def local_slice(self, num: int) -> slice:
        return slice(self.rank * num // self.world_size, (self.rank + 1) * num // self.world_size)

    def gather_shards(self, rows):
        for table in self.tables:
            return table
        raise Waiting(np.array(rows, dtype=np.float64))


class Waiting(Exception):
    """With a rank's rows of the first table that is not there yet."""


def shards(world_size: int, **settings) -> list[ReplayBuffer]:
    defaults = {"buffer_size": 64, "num_envs": 4, "obs_space": VECTOR, "action_shape": (), "action_dtype": np.int64}
    buffers = [ReplayBuffer(world=FakeWorld(r, world_size), **defaults | settings) for r in range(world_size)]
    for buffer in buffers:
        buffer.start(np.zeros((len(buffer.envs), 2)))
    return buffers


def sample_all(buffers: list[ReplayBuffer], batch_size: int, seed: int, beta: float = 0.5) -> list:
    """`sample` on every rank, each with the generator of the same seed, with the collectives played by hand."""
    tables = []
    while True:
        rows, batches = [], []
        for buffer in buffers:
            buffer.world.tables = iter(tables)
            try:
                batches += buffer.sample(batch_size, torch.Generator().manual_seed(seed), beta)
            except Waiting as waiting:
                rows += [*waiting.args[0]]
        if not rows:
            return batches
        tables.append(np.array(rows))


def indices_of(buffer: ReplayBuffer) -> np.ndarray:
    """Of all places, environment by environment."""
    return (buffer.envs[:, None] * buffer.width + np.arange(buffer.capacity)).ravel()


def fill(buffers: list[ReplayBuffer], steps: int, seed: int = 0, end: float = 0.1) -> None:
    """Random transitions, the same ones for the same environment whatever the shards."""
    rng, n = np.random.default_rng(seed), sum(len(buffer.envs) for buffer in buffers)
    for _ in range(steps):
        actions, rewards, next_obs = rng.integers(0, 9, n), rng.normal(size=n), rng.normal(size=(n, 2))
        terminations, truncations, final_obs = rng.random(n) < end, rng.random(n) < end, rng.normal(size=(n, 2))
        for buffer in buffers:
            e = buffer.world.local_slice(n)
            infos = {"final_obs": final_obs[e], "episode_ended": terminations[e] | truncations[e]}
            buffer.add(actions[e], rewards[e], terminations[e], truncations[e], next_obs[e], infos)


@pytest.mark.parametrize("alpha, n_step", [(0.0, 1), (0.0, 3), (0.6, 1), (0.6, 3)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_are_one_buffer(alpha, n_step, world_size):
    """Place by place; and draw after draw, with updates between, the same global indices, weights and transitions.

    Priorities drift apart; in the last draws the last rank holds nearly all the mass, and the first holds none.
    """
    whole, parts = shards(1, alpha=alpha, n_step=n_step), shards(world_size, alpha=alpha, n_step=n_step)
    local = 64 // world_size  # places of a rank
    for draw in range(25):
        if draw < 20:
            fill(whole, 3, seed=draw)
            fill(parts, 3, seed=draw)
        elif alpha:
            mass = np.where(np.arange(64) < local, 0.0, np.where(np.arange(64) < 64 - local, 1e-6, 1.0))
            for buffer, values in zip([*whole, *parts], [mass, *np.split(mass, world_size)], strict=True):
                buffer._set_priorities(indices_of(buffer), values)
        for name in ("actions", "rewards", "terminations", "truncations", "frames"):
            pieces = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(pieces, getattr(whole[0], name))
        pieces = np.concatenate([part.priorities for part in parts])
        np.testing.assert_allclose(pieces, whole[0].priorities, rtol=1e-12)
        (one,), many = sample_all(whole, 16, draw), sample_all(parts, 16, draw)
        places = np.concatenate([batch.positions for batch in many])
        assert places.tolist() == list(range(16)), "every row of the batch is served by exactly one rank, in order"
        first = [r * parts[0].rewards.size for r in range(world_size)]
        indices = np.concatenate([batch.indices + x for x, batch in zip(first, many, strict=True)])
        assert indices.tolist() == one.indices.tolist()
        for name in ("weights", "obs", "actions", "rewards", "discounts", "next_obs"):
            torch.testing.assert_close(torch.cat([getattr(batch, name) for batch in many]), getattr(one, name))
        if alpha:
            errors = torch.from_numpy(10.0 ** (indices % 5 - 4.0) * (1 + indices % 7))
            whole[0].update_priorities(one.indices, errors)
            for batch, part, error in zip(many, parts, errors.split([len(b.indices) for b in many]), strict=True):
                part.update_priorities(batch.indices, error)
    if alpha:
        assert len(many[0].indices) == 0 and len(many[-1].indices) >= 14


def test_new_transitions_get_the_largest_priority_of_any_rank():
    """As of the last draw: 1 before any; then the largest that some rank has given out, on all ranks."""
    buffers = shards(2, alpha=0.5)
    fill(buffers, 2)
    assert [set(buffer.priorities.ravel()) - {0.0} for buffer in buffers] == [{1.0}, {1.0}]
    buffers[1].update_priorities(np.array([0]), torch.tensor([16.0], dtype=torch.float64))
    fill(buffers, 1)  # nothing was gathered since
    assert buffers[0].priorities.max() == 1.0
    sample_all(buffers, 4, seed=0)
    fill(buffers, 1)
    largest = (16.0 + 1e-6) ** 0.5
    for buffer in buffers:
        assert buffer.priorities[:, buffer.time - 1].tolist() == [largest] * 2


def test_exponent_zero_is_uniform():
    """With one step no priorities are kept, with more all are 1; both take updates and go on."""
    for n_step in (1, 2):
        (buffer,) = shards(1, alpha=0.0, n_step=n_step)
        fill([buffer], 16)
        buffer.update_priorities(np.arange(8), torch.arange(8.0))
        (batch,) = sample_all([buffer], 16, seed=1)
        assert (batch.weights == 1).all() and len(set(batch.indices)) > 8


@pytest.mark.parametrize("env_id", ["ALE/Breakout-v5", pytest.param("envpool/Breakout-v5", marks=ENVPOOL)])
def test_atari_games_are_whole_and_stacks_rebuilt(env_id):
    """The same games whether a lost life is an end or not; the buffer gives what the simulator gave."""
    finished, ends = {}, {}
    for flag in (True, False):
        envs = make_envs(env_id, 1, TRAINING, range(2), (gym.spaces.Discrete,), life_loss=flag)
        assert envs.atari and not envs.channels_last and envs.stack == 4
        space, rng = envs.single_observation_space, np.random.default_rng(0)
        buffer = ReplayBuffer(240, 2, FakeWorld(0, 1), space, (), np.int64, stack=4, repeats_first=envs.repeats_first)
        obs, seen, ends[flag] = envs.start(), [], 0
        buffer.start(obs)
        for step in range(1, 701):
            seen.append(obs.copy())
            actions = rng.integers(0, 4, 2)
            obs, rewards, terminations, truncations, infos = envs.step(actions)
            ends[flag] += terminations.sum()
            buffer.add(actions, rewards, terminations, truncations, obs, infos)
            if step % 50 == 0:
                times = np.arange(max(0, step - buffer.capacity), step)
                for env in (0, 1):
                    rebuilt = buffer._observations(np.full(len(times), env), times)
                    np.testing.assert_array_equal(rebuilt, np.stack([seen[t][env] for t in times]))
        finished[flag] = envs.episodes.finished
        envs.close()
    assert finished[True] == finished[False] and len(finished[True]) == ends[False] >= 3
    assert ends[True] >= 5 * ends[False]


@pytest.mark.parametrize("env_id", ["ALE/SpaceInvaders-v5", pytest.param("envpool/SpaceInvaders-v5", marks=ENVPOOL)])
def test_scores_are_not_clipped(env_id):
    envs = make_envs(env_id, 1, TRAINING, range(2), (gym.spaces.Discrete,))
    envs.start()
    rng = np.random.default_rng(0)
    assert max(envs.step(rng.integers(0, 6, 2))[1].max() for _ in range(300)) >= 5
    envs.close()


def test_frequencies_follow_priorities():
    """In the long run a place is drawn in proportion to its priority; weights undo that at beta 1."""
    (buffer,) = shards(1, alpha=1.0)
    fill([buffer], 16)
    buffer.update_priorities(indices_of(buffer), torch.arange(64, dtype=torch.float64))
    counts = np.zeros(buffer.priorities.size)
    for seed in range(3000):
        (batch,) = sample_all([buffer], 4, seed, beta=1.0)
        np.add.at(counts, batch.indices, 1)
    counts, expected = counts[indices_of(buffer)], 12_000 * np.arange(64) / np.arange(64).sum()
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected + 1)).all() and counts[0] == 0
    for beta in (1.0, 0.5):
        (batch,) = sample_all([buffer], 4, seed=1, beta=beta)
        priorities = buffer.priorities.take(batch.indices)
        np.testing.assert_allclose(batch.weights, (priorities.min() / priorities) ** beta, rtol=1e-5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), n_step=st.integers(1, 4), capacity=st.integers(4, 9), stack=st.sampled_from([1, 3]))
def test_against_a_slow_reference(data, n_step, capacity, stack):
    """Every place that may be sampled, and only those, with n-step return, discount, stack and bootstrap observation.

    Random episodes: shorter than n and than the stack, terminated, truncated, lives lost, and wrapping round.
    """
    gamma, obs_shape = 0.9, (stack, 1, 1) if stack > 1 else (1,)
    space = gym.spaces.Box(0, 255, obs_shape, np.int64)
    ends = data.draw(st.lists(st.sampled_from("....lTtb"), min_size=1, max_size=30))
    buffer = ReplayBuffer(capacity, 1, FakeWorld(0, 1), space, (), np.int64, n_step, gamma, stack)
    history, frame, window = [], 1, [0] * (stack - 1) + [1]

    def obs(frames):
        return np.array(frames[-stack:]).reshape(1, *obs_shape)

    buffer.start(obs(window))
    for step, end in enumerate(ends):
        before, frame = list(window), frame + 1
        final = [*window, frame][-stack:]
        terminated, truncated, reset = end in "lTb", end in "tb", end in "Ttb"  # l: a life lost, the game goes on
        if reset:
            frame += 1
            window = [0] * (stack - 1) + [frame]
        else:
            window = final
        reward = float(step + 1)
        history.append((before, reward, terminated, truncated, final, list(window)))
        infos = {"final_obs": obs(final), "episode_ended": np.array([reset])}
        flags = [np.array([flag]) for flag in (terminated, truncated)]
        buffer.add(np.array([step]), np.array([reward]), *flags, obs(window), infos)

    expected = {}
    for t in range(max(0, len(history) - capacity), len(history)):
        total, discount, after = 0.0, 1.0, None
        for k in range(n_step):
            if t + k >= len(history):
                break
            _, reward, terminated, truncated, final, following = history[t + k]
            total, discount = total + gamma**k * reward, gamma ** (k + 1)
            if terminated or truncated:
                after = final
                discount = 0.0 if terminated else discount
                break
            if k == n_step - 1:
                after = following
        if after is not None:
            expected[t % capacity] = (history[t][0], t, total, discount, after)
    if buffer.plain:  # all that is stored
        assert min(buffer.time, buffer.capacity) == len(expected)
    else:
        places = set(np.flatnonzero(buffer.priorities.reshape(-1)))
        assert places == set(expected)
    if not expected:
        return
    for seed in range(3):
        (batch,) = sample_all([buffer], 8, seed)
        for i, place in enumerate(batch.indices):
            first, t, total, discount, after = expected[place]
            assert batch.obs[i].flatten().tolist() == first[-stack:] and batch.actions[i] == t
            assert batch.rewards[i].item() == pytest.approx(total) and batch.discounts[i].item() == pytest.approx(
                discount
            )
            if discount:
                assert batch.next_obs[i].flatten().tolist() == after
