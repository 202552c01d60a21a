"""One replay buffer over all ranks: draws, n-step returns, frame stacks; when learning begins."""

import gc

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_simulators import ENVPOOL

import dqn_ddp
import sac_ddp
from common.environments import TRAINING, Environments
from common.processes import BadInput, World
from common.replay import ReplayBuffer
from runs import run, train

VECTOR = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)


class Waiting(Exception):
    """With a rank's rows of the first table that is not there yet."""


class FakeWorld(World):
    """A rank of a world that lives in this process: `gather` gives what the test has collected."""

    def __init__(self, rank: int, world_size: int, num_shards: int) -> None:
        super().__init__(False)
        self.rank, self.world_size, self.num_shards = rank, world_size, num_shards
        self.shards = range(num_shards)[self.local_slice(num_shards)]
        self.tables = iter([])

    def gather(self, values):
        for table in self.tables:
            return table
        raise Waiting(np.ravel(values))


def ranks(world_size: int, num_shards: int | None = None, **settings) -> list[ReplayBuffer]:
    defaults = {"buffer_size": 64, "num_envs": 4, "obs_space": VECTOR, "action_shape": (), "action_dtype": np.int64}
    worlds = [FakeWorld(rank, world_size, num_shards or world_size) for rank in range(world_size)]
    buffers = [ReplayBuffer(world=world, **defaults | settings) for world in worlds]
    for buffer in buffers:
        buffer.observe(np.zeros((len(buffer.envs), 2)))
    return buffers


def on_all(buffers: list[ReplayBuffer], method) -> list:
    """What `method` gives on every rank, with the collectives played by hand."""
    tables = []
    while True:
        rows, results = [], []
        for buffer in buffers:
            buffer.world.tables = iter(tables)
            try:
                results.append(method(buffer))
            except Waiting as waiting:
                rows.append(waiting.args[0])
        if not rows:
            return results
        tables.append(np.array(rows))


def sample_all(buffers: list[ReplayBuffer], batch_size: int, seed: int, beta: float = 0.5) -> list:
    return on_all(buffers, lambda buffer: buffer.sample(batch_size, torch.Generator().manual_seed(seed), beta))


def indices_of(buffer: ReplayBuffer) -> np.ndarray:
    return (buffer.envs[:, None] * buffer.width + np.arange(buffer.capacity)).ravel()


def fill(buffers: list[ReplayBuffer], steps: int, seed: int = 0, end: float = 0.1) -> None:
    """Random transitions, the same ones for the same environment whatever the shards."""
    rng, n = np.random.default_rng(seed), sum(len(buffer.envs) for buffer in buffers)
    for _ in range(steps):
        actions, rewards, next_obs = rng.integers(0, 9, n), rng.normal(size=n), rng.normal(size=(n, 2))
        terminations, truncations, final_obs = rng.random(n) < end, rng.random(n) < end, rng.normal(size=(n, 2))
        for buffer in buffers:
            e = buffer.world.local_slice(n)
            truncated = truncations[e] & ~terminations[e]
            infos = {"final_obs": {i: final_obs[e][i] for i in truncated.nonzero()[0]}}
            infos["episode_ended"] = terminations[e] | truncations[e]
            buffer.add(actions[e], rewards[e], terminations[e], truncated, next_obs[e], infos)


@pytest.mark.parametrize("alpha, n_step", [(0.0, 1), (0.0, 3), (0.6, 1), (0.6, 3)])
@pytest.mark.parametrize("world_size, num_shards", [(2, 2), (4, 4), (1, 4), (2, 4)])
def test_shards_are_one_buffer(alpha, n_step, world_size, num_shards):
    whole, parts = ranks(1, alpha=alpha, n_step=n_step), ranks(world_size, num_shards, alpha=alpha, n_step=n_step)
    local = 64 // num_shards  # places of a shard
    for draw in range(25):
        if draw < 20:
            fill(whole, 3, seed=draw)
            fill(parts, 3, seed=draw)
        elif alpha:  # the last shard holds nearly all the mass, the first none
            mass = np.where(np.arange(64) < local, 0.0, np.where(np.arange(64) < 64 - local, 1e-6, 1.0))
            for buffer, values in zip([*whole, *parts], [mass, *np.split(mass, world_size)], strict=True):
                buffer._set_priorities(indices_of(buffer), values)
        for name in ("actions", "rewards", "terminations", "truncations", "frames", "priorities"):
            pieces = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_allclose(pieces, getattr(whole[0], name), rtol=1e-12)
        (one,), many = sample_all(whole, 16, draw), sample_all(parts, 16, draw)
        places = [list(range(16))[sample.positions] for sample in many]
        assert sum(places, []) == list(range(16)), "every row of the batch is served by exactly one rank, in order"
        indices = np.concatenate([x.indices + rank * parts[0].rewards.size for rank, x in enumerate(many)])
        assert indices.tolist() == one.indices.tolist()
        sizes = np.concatenate([sample.sizes for sample in many])
        assert sizes.tolist() == np.histogram(indices, num_shards, (0, whole[0].rewards.size))[0].tolist()
        for name in one.batch._fields:
            torch.testing.assert_close(torch.cat([getattr(x.batch, name) for x in many]), getattr(one.batch, name))
        errors = torch.from_numpy(10.0 ** (indices % 5 - 4.0) * (1 + indices % 7))
        whole[0].update_priorities(one.indices, errors)
        for sample, part in zip(many, parts, strict=True):
            part.update_priorities(sample.indices, errors[sample.positions])
    if alpha:
        assert sizes[0] == 0 and sizes[-1] >= 14
    else:
        assert (one.batch.weights == 1).all() and whole[0].priorities.size == 0


def test_new_transitions_get_the_largest_priority_of_any_rank():
    """As of the last draw; 1 before any; kept by `cut`."""
    buffers = ranks(2, alpha=0.5)
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
    on_all(buffers, lambda buffer: buffer.cut())
    assert [buffer.state_dict()["largest"] for buffer in buffers] == [largest] * 2


@pytest.mark.parametrize("env_id", ["ALE/SpaceInvaders-v5", pytest.param("envpool/SpaceInvaders-v5", marks=ENVPOOL)])
def test_atari_games_are_whole_and_stacks_rebuilt(env_id):
    """The same games whether a lost life is an end or not; observations are the simulator's."""
    finished, ends = {}, {}
    for flag in (True, False):
        args = dqn_ddp.Args(env_id=env_id, life_loss=flag, num_threads=1)
        envs = Environments(args, TRAINING, [range(2)], World(False))
        assert envs.atari and not envs.channels_last
        rng, world = np.random.default_rng(0), FakeWorld(0, 1, 1)
        buffer = ReplayBuffer(240, 2, world, envs.single_observation_space, (), np.int64, stack=envs.stack)
        obs, seen, ends[flag] = envs.reset(), [], 0
        buffer.observe(obs)
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
        finished[flag] = envs.episodes
        envs.close()
    assert np.array_equal(finished[True], finished[False]) and finished[True][:, 2].sum() == ends[False] >= 2
    assert ends[True] >= 3 * ends[False] and buffer.rewards.max() >= 5


def test_frequencies_follow_priorities():
    (buffer,) = ranks(1, alpha=1.0)
    fill([buffer], 16)
    buffer.update_priorities(indices_of(buffer), torch.arange(64, dtype=torch.float64))
    counts = np.zeros(buffer.priorities.size)
    for seed in range(1000):
        (sample,) = sample_all([buffer], 4, seed, beta=1.0)
        np.add.at(counts, sample.indices, 1)
    counts, expected = counts[indices_of(buffer)], 4_000 * np.arange(64) / np.arange(64).sum()
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected + 1)).all() and counts[0] == 0
    for beta in (1.0, 0.5):
        (sample,) = sample_all([buffer], 4, seed=1, beta=beta)
        priorities = buffer.priorities.take(sample.indices)
        np.testing.assert_allclose(sample.batch.weights, (priorities.min() / priorities) ** beta, rtol=1e-5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ends=st.lists(st.sampled_from("....lTt!X"), min_size=1, max_size=30),
    n_step=st.integers(1, 4),
    capacity=st.integers(4, 9),
    stack=st.sampled_from([1, 3]),
    alpha=st.sampled_from([0.0, 0.5]),
)
def test_against_a_slow_reference(ends, n_step, capacity, stack, alpha):
    """A transition is sampled once n steps after it are stored, with its n-step return, discount, stack and bootstrap.

    Episodes are short or wrap round: terminated (T), truncated (t), with lives lost (l), cut by a checkpoint (!), also
    just after an end (X). Simulators may reuse their array.
    """
    gamma, obs_shape = 0.9, (stack, 1, 1) if stack > 1 else (1,)
    space = gym.spaces.Box(0, 255, obs_shape, np.int64)
    buffer = ReplayBuffer(capacity, 1, FakeWorld(0, 1, 1), space, (), np.int64, n_step, gamma, stack, alpha)
    history, frame, window, array = [], 1, [0] * (stack - 1) + [1], np.zeros((1, *obs_shape), np.int64)

    def obs(frames):
        array[:] = np.reshape(frames, array.shape)
        return array

    buffer.observe(obs(window))
    for step, end in enumerate(ends):
        before, frame = window, frame + 1
        window = final = [*window, frame][-stack:]
        if end in "Tt!X":
            frame += 1
            window = [0] * (stack - 1) + [frame]
        terminated, truncated = end in "lTX", end == "t"
        infos = {"final_obs": {0: np.reshape(final, obs_shape)} if truncated else {}}
        infos["episode_ended"] = np.array([end in "TtX"])
        after = final if end in "l.!" else window
        flags = [np.array([flag]) for flag in (terminated, truncated)]
        buffer.add(np.array([step]), np.array([step + 1.0]), *flags, obs(after), infos)
        if end in "!X":
            on_all([buffer], ReplayBuffer.cut)
            buffer.observe(obs(window))
        history.append((before, terminated, truncated or end == "!", final))

    expected = {}
    for t in range(max(0, len(history) - capacity), len(history) - n_step + 1):
        total, k = 0.0, 0
        for k in range(n_step):
            total += gamma**k * (t + k + 1.0)
            _, terminated, truncated, after = history[t + k]
            if terminated or truncated:
                break
        discount = 0.0 if terminated else gamma ** (k + 1)
        expected[t] = (history[t][0], total, discount, after)
    if not expected:
        return
    (sample,) = sample_all([buffer], 3 * len(expected), seed=len(ends))
    batch = sample.batch
    assert set(batch.actions.tolist()) == set(expected)
    assert [t % capacity for t in batch.actions.tolist()] == sample.indices.tolist()
    for i, t in enumerate(batch.actions.tolist()):
        first, total, discount, after = expected[t]
        assert batch.obs[i].flatten().tolist() == first
        assert [batch.rewards[i].item(), batch.discounts[i].item()] == pytest.approx([total, discount])
        if discount:
            assert batch.next_obs[i].flatten().tolist() == after


@pytest.mark.parametrize("module", [sac_ddp, dqn_ddp])
def test_what_updates_read_and_what_they_leave(module, tmp_path, monkeypatch):
    """Beta rises linearly to 1; targets follow by tau, without a graph; no tensor stays."""
    sample, lerp = module.ReplayBuffer.sample, torch._foreach_lerp_
    betas, alive, targets, weights = [], [], [], []

    def noted_sample(*inputs):
        betas.append(inputs[-1])
        if len(betas) in (8, 40):
            gc.collect()
            alive.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
        return sample(*inputs)

    def noted_lerp(moved, *inputs):
        lerp(moved, *inputs)
        targets.extend(moved)
        weights.append(inputs[1])

    monkeypatch.setattr(module.ReplayBuffer, "sample", noted_sample)
    monkeypatch.setattr(torch, "_foreach_lerp_", noted_lerp)
    sizes = {"learning_starts": 40, "total_timesteps": 80, "batch_size": 8, "train_frequency": 1, "log_every": 10**6}
    more = {"target_network_frequency": 8, "tau": 0.3, "prioritized": True, "per_beta": 0.4}
    train(module, tmp_path / "run", **sizes, **more)
    assert betas == pytest.approx([0.4 + 0.6 * step / 80 for step in range(44, 81, 4) for _ in range(4)])
    assert weights == [0.3] * 5 and not any(target.requires_grad or target.grad_fn for target in targets)
    assert alive[0] == alive[1]


def test_no_gradient_step_before_something_can_be_sampled(tmp_path):
    flags = "--num-envs 2 --n-step 20 --learning-starts 4 --train-frequency 2 --total-timesteps 60 --log-every 2"
    result = run("dqn_ddp.py", 1, f"{flags} --eval-every 0 --batch-size 8", tmp_path / "run")
    assert [int(row["global_step"]) for row in result.rows if row["losses/td_loss"]] == list(range(42, 61, 2))


def test_the_smallest_budget_has_a_gradient_step(tmp_path):
    sizes = {"num_envs": 8, "train_frequency": 3, "learning_starts": 20, "buffer_size": 80, "batch_size": 4}
    with pytest.raises(BadInput, match="--total-timesteps 23: must be at least 24,"):
        dqn_ddp.Args(total_timesteps=23, log_every=1, **sizes)
    done = train(dqn_ddp, tmp_path / "run", total_timesteps=24, log_every=1, **sizes)
    assert len(done.column("losses/td_loss")) == 1
