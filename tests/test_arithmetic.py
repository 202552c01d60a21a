"""The pieces against arithmetic written out by hand or an independent library."""

import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence

import dqn_ddp
import ppg_ddp
import ppo_ddp
from common import episodes
from common.distributed import World
from common.environments import EVALUATION, TRAINING, Environments, environment_seeds, make_envs
from common.episodes import evaluate
from common.errors import Fault
from common.normalization import RunningMoments, discounted_returns, standardized
from common.state import check_equal

VECTOR = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE, BOX = gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,), np.float32)


def test_gae_by_hand():
    """gamma 0.5, lambda 0.5; environment 0 runs on, 1 ends after its first step."""
    values, next_value = np.array([[2.0, 2.0], [4.0, 4.0]]), np.array([6.0, 6.0])
    dones = np.array([[0.0, 1.0], [0.0, 0.0]])
    advantages = ppo_ddp.compute_gae(np.ones((2, 2)), values, next_value, dones, 0.5, 0.5)
    # last row: 1 + 0.5 * 6 - 4 = 0; first row: 1 + 0.5 * 4 - 2 = 1 (+ 0.25 * 0), 1 - 2 = -1
    assert advantages.tolist() == [[1.0, -1.0], [0.0, 0.0]]
    # with a later advantage that is not 0: rewards 3 in the last row give 2 there, and 0.25 * 2 more where no end cuts
    rewards = np.array([[1.0, 1.0], [3.0, 3.0]])
    advantages = ppo_ddp.compute_gae(rewards, values, next_value, dones, 0.5, 0.5)
    assert advantages.tolist() == [[1.5, -1.0], [2.0, 2.0]]


@pytest.mark.parametrize("module", [ppo_ddp, ppg_ddp])
def test_a_truncated_step_is_worth_what_follows_it(module, tmp_path, monkeypatch):
    """The rewards that `compute_gae` gets in a run have the discounted value of a truncation's own last observation."""
    expected, ends, step = [], [], Environments.step

    def noted(self, actions):
        inner = self.env.step
        self.env.step = lambda actions: ends.append(inner(actions)) or ends[-1]
        obs, rewards, terminations, truncations, infos = step(self, actions)
        self.env.step = inner
        of_simulator = [(bool(x), bool(y)) for x, y in zip(*ends.pop()[2:4], strict=True)]
        ends.extend(of_simulator)
        for i, (terminated, truncated) in enumerate(of_simulator):
            assert terminations[i] == terminated and truncations[i] == (truncated and not terminated)
        worth = [0.5 * infos["final_obs"][i][0] if truncations[i] else 0.0 for i in range(4)]
        expected.append((rewards + worth).astype(np.float32))
        return obs, rewards, terminations, truncations, infos

    def stop(rewards, *_):
        assert np.array_equal(rewards, expected)
        raise InterruptedError

    monkeypatch.setattr(Environments, "step", noted)
    monkeypatch.setattr(module.Agent, "value", lambda self, obs, features: obs[:, 0])
    monkeypatch.setattr(module, "compute_gae", stop)
    args = {"env_id": "tests.envs:Counting-v0", "gamma": 0.5, "norm_reward": False, "eval_every": 0}
    with pytest.raises(InterruptedError):
        module.main(module.Args(**args, run_dir=str(tmp_path / "run"), cuda=False))
    assert set(ends) == {(False, False), (False, True), (True, False), (True, True)}


SHARDS = SimpleNamespace(gather_shards=np.asarray)  # a process that holds all


class FixedAgent(nn.Module):
    """Gives chosen log-probabilities, entropies and values."""

    def __init__(self, logprob, entropy, value):
        super().__init__()
        self.forward = lambda obs: (obs, obs)
        self.log_prob_entropy = lambda pi, actions: (torch.tensor(logprob), torch.tensor(entropy))
        self.value = lambda obs, features: torch.tensor(value)


def test_clipped_losses_by_hand(float64):
    """Ratios 2, 2, 0.5, 0.5 with advantages 1, -1, 1, -1 and clip 0.2; values 1 -> 2 or 1.1 with returns 3."""
    agent = FixedAgent([math.log(r) for r in (2, 2, 0.5, 0.5)], [0.5, 0.7, 0.5, 0.7], [2.0, 1.1, 2.0, 1.1])
    zeros, ones, threes = torch.zeros(4), torch.ones(4), torch.full((4,), 3.0)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    for clip_vloss, v_loss in (
        # value moves clipped to 1.2 and 1.1: squares max(1, 1.8^2) and 1.9^2
        (True, 0.5 * (3.24 + 3.61) / 2),
        (False, 0.5 * (1.0 + 3.61) / 2),
    ):
        args = SimpleNamespace(clip_coef=0.2, clip_vloss=clip_vloss, ent_coef=0.1, vf_coef=0.5)
        minibatch = ppo_ddp.Batch(zeros, zeros, zeros, values=ones, advantages=advantages, returns=threes)
        loss, stats = ppo_ddp.PPOLoss(agent, args)(minibatch)
        pg_loss = -(1.2 - 2.0 + 0.5 - 0.8) / 4  # min(2, 1.2), min(-2, -1.2), min(0.5, 0.8), min(-0.5, -0.8)
        assert stats["policy_loss"].item() == pytest.approx(pg_loss, rel=1e-12)
        assert stats["value_loss"].item() == pytest.approx(v_loss, rel=1e-12)
        assert stats["entropy"].item() == pytest.approx(0.6, rel=1e-12)
        assert loss.item() == pytest.approx(pg_loss - 0.1 * 0.6 + 0.5 * v_loss, rel=1e-12)
        assert stats["clipfrac"].all() and stats["old_approx_kl"].mean().item() == pytest.approx(0.0, abs=1e-12)
        kl = ((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 2
        assert stats["approx_kl"].mean().item() == pytest.approx(kl, rel=1e-12)


@pytest.mark.parametrize("space", [DISCRETE, BOX])
def test_policy_terms_agree_with_torch_distributions(space, float64):
    torch.manual_seed(0)
    agent = ppg_ddp.Agent(VECTOR, space)
    if space is BOX:
        agent.log_std.data = torch.tensor([0.3, -0.7])
    features, other = torch.randn(5, 64), torch.randn(5, 64)
    pi, old_pi = 100 * agent.policy(features), 100 * agent.policy(other)
    if space is BOX:
        pi[:, 2:], old_pi[:, 2:] = agent.log_std, agent.log_std - 0.2
        reference, old = (Independent(Normal(p[:, :2], p[:, 2:].exp()), 1) for p in (pi, old_pi))
    else:
        reference, old = Categorical(logits=pi), Categorical(logits=old_pi)
    actions = reference.sample()
    logprob, entropy = agent.log_prob_entropy(pi, actions)
    torch.testing.assert_close(logprob, reference.log_prob(actions), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(entropy, reference.entropy(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(agent.kl_divergence(old_pi, pi), kl_divergence(old, reference), rtol=1e-10, atol=1e-10)
    assert agent.kl_divergence(pi, pi).abs().max() < 1e-12


def test_sampling_inverts_the_distribution():
    agent = ppo_ddp.Agent(VECTOR, DISCRETE)
    pi = np.log(np.array([[0.2, 0.3, 0.5]] * 6)) + 3.0
    noise = np.array([0.0, 0.19, 0.21, 0.49, 0.51, np.nextafter(1.0, 0.0)])
    assert agent.sample(pi, noise).tolist() == [0, 0, 1, 1, 2, 2]
    assert agent.sample(pi.astype(np.float32), np.full(6, np.nextafter(1, 0, dtype=np.float32))).max() == 2
    box = ppo_ddp.Agent(VECTOR, BOX)
    pi = np.array([[1.0, 2.0, 0.0, math.log(3.0)]])
    assert box.sample(pi, np.array([[0.5, -1.0]])).tolist() == [[1.5, pytest.approx(2.0 - 3.0)]]
    assert box.mode(pi).tolist() == [[1.0, 2.0]]


def test_minibatches_hold_as_many_steps_of_every_environment():
    """And a rank's are the same steps of the same environments as at world size 1."""

    draws = torch.rand(2, 6, 8)  # of 2 epochs, 6 environments, 8 steps
    whole = ppo_ddp.minibatch_inds(draws, 4)
    assert whole.shape == (2, 4, 12)
    for epoch in whole:
        assert sorted(epoch.flatten().tolist()) == list(range(48))
        for minibatch in epoch:
            assert torch.bincount(minibatch % 6).tolist() == [2] * 6
    for rank in range(3):
        part = ppo_ddp.minibatch_inds(draws[:, 2 * rank : 2 * rank + 2], 4)
        local = whole[(whole % 6 >= 2 * rank) & (whole % 6 < 2 * rank + 2)].view(2, 4, 4)
        assert (part // 2).equal(local // 6) and (part % 2 + 2 * rank).equal(local % 6)


def test_moments_in_parts_are_the_moments_of_the_whole():
    """Batches in two ranks' parts, far from zero: as numpy over all of it."""
    rng = np.random.default_rng(0)
    moments, seen = RunningMoments((3,)), []
    for size in (5, 50, 7):
        parts = [rng.normal(1e4, 0.1, (size, 3)), rng.normal(1e4 + 1, 2.0, (2 * size, 3))]
        moments.update(parts, SHARDS)
        seen += parts
        whole = np.concatenate(seen)
        np.testing.assert_allclose(moments.mean, whole.mean(0), rtol=1e-12)
        np.testing.assert_allclose(moments.m2 / moments.count, whole.var(0), rtol=1e-12)
    np.testing.assert_allclose(
        moments.normalized(whole[:4]), np.clip((whole[:4] - whole.mean(0)) / whole.std(0), -10, 10), rtol=1e-4
    )
    assert RunningMoments((3,)).normalized(np.full((1, 3), 4.0)).tolist() == [[4.0] * 3]
    far = np.array([[1e9, -1e9, 1.0]])
    assert moments.normalized(far)[0, :2].tolist() == [10.0, -10.0]
    assert moments.scaled(far)[0].tolist() == [10.0, -10.0, pytest.approx(1 / whole[:, 2].std())]


def test_discounted_returns_by_hand():
    carry = np.array([8.0, 8.0])
    dones = np.array([[False, True], [False, False]])
    returns = discounted_returns(np.array([[1.0, 1.0], [1.0, 1.0]]), dones, 0.5, carry)
    assert returns.tolist() == [[5.0, 5.0], [3.5, 1.0]] and carry.tolist() == [3.5, 1.0]


def test_advantages_are_normalised_with_n_minus_1(float64):
    world = World(cuda=False)
    with world.process_group(60):
        rows = torch.tensor([[1.0, 2.0, 3.0, 6.0], [5.0, 5.0, 5.0, 5.0]])
        (normalized,) = standardized([rows], world)
    torch.testing.assert_close(normalized[0], (rows[0] - 3) / (math.sqrt(14 / 3) + 1e-8), rtol=1e-12, atol=0)
    assert normalized[1].tolist() == [0.0] * 4


def test_streams_of_seeds_do_not_overlap():
    streams = [(seed, domain) for seed in range(50) for domain in (TRAINING, EVALUATION)]
    seeds = [int(s) for stream in streams for s in environment_seeds(*stream, range(20))]
    assert len(set(seeds)) == len(seeds) == 2000 and 0 <= min(seeds) and max(seeds) < 2**31


def test_an_episode_without_end_counts_as_it_stands(monkeypatch):
    """Evaluation stops after MAX_STEPS: an unfinished episode's return so far, a finished one's whole return.

    It meets the other ranks every 100 steps, is done once no rank plays, and ends sooner when asked to stop.
    """
    monkeypatch.setattr(episodes, "MAX_STEPS", 150)
    met, played = [], []

    def gather(values):
        met.append(np.size(values))
        played[:] = np.asarray(values, dtype=float).tolist()
        return np.asarray(values, dtype=float).reshape(1, -1)

    world = SimpleNamespace(rank=0, world_size=1, sharded=False, gather=gather, stop=0)
    envs = make_envs("CartPole-v1", 1, EVALUATION, range(20), (gym.spaces.Discrete,))
    row = evaluate(lambda obs: (obs[:, 2] + obs[:, 3] > 0).astype(int), envs, 20, world)
    envs.close()
    assert played == [[150.0, 150.0]] * 20  # this policy balances for 170 steps and more
    assert row["eval/episodic_return"] == row["eval/episodic_length"] == 150 and row["eval/episodes"] == 20
    assert met == [1, 40]
    envs = make_envs("CartPole-v1", 1, EVALUATION, range(20), (gym.spaces.Discrete,))
    evaluate(lambda obs: np.zeros(20, int), envs, 20, world)
    assert max(returns for returns, _ in played) < 15
    world.stop = 15
    row = evaluate(lambda obs: (obs[:, 2] + obs[:, 3] > 0).astype(int), envs, 20, world)
    assert row["eval/episodic_length"] == 100
    world.stop, world.rank, world.world_size = 0, 20, 21  # a rank without episodes meets the others as often
    met.clear()
    world.gather = lambda values: met.append(np.size(values)) or np.ones((21, np.size(values)))
    evaluate(None, None, 20, world)
    assert met == [1, 40]
    envs.close()


@pytest.mark.parametrize("change", ["weight", "moment", "generator", "normaliser", "missing", "extra"])
def test_every_kind_of_state_is_compared(change, monkeypatch):
    """`check_equal` names what differs on rank 1, be it of a network, an optimiser, a generator, or there alone."""

    def state(changed: str = "") -> dict:
        torch.manual_seed(0)
        network, generator = nn.Linear(2, 1), torch.Generator().manual_seed(1)
        optimizer = torch.optim.Adam(network.parameters())
        network(torch.ones(2)).sum().backward()
        optimizer.step()
        if changed == "weight":
            network.weight.data[0, 1] += 1e-7
        if changed == "moment":
            optimizer.state[network.bias]["exp_avg"] += 1e-7
        if changed == "generator":
            torch.rand(1, generator=generator)
        if changed == "missing":
            del optimizer.state[network.bias]
        other = {"other": 1.0} if changed == "extra" else {}
        normaliser = RunningMoments((2,))
        normaliser.update([np.array([[1.0, 2.0], [3.0, 4.0 + 1e-9 * (changed == "normaliser")]])], World())
        state = {"network": network, "optimizer": optimizer, "generator": generator, "normaliser": normaliser}
        return state | other

    world, tables = World(), []
    world.world_size = 2
    monkeypatch.setattr(World, "gather_objects", lambda _, mine: tables.append(mine) or [mine, mine])
    check_equal(0, state(change), world)
    monkeypatch.setattr(World, "gather_objects", lambda _, mine: [mine, tables[0]])
    named = {"weight": "network.*weight", "moment": "optimizer.*state.*1.*exp_avg", "generator": "generator"}
    named |= {"normaliser": "normaliser", "missing": "optimizer.*state.*1.*step", "extra": "other"}
    with pytest.raises(Fault, match=rf"step 7: \S*{named[change]}\S* on rank 1"):
        check_equal(7, state(), world)


def test_both_trunks_read_images_of_any_layout(float64):
    """Whole-number pixels are divided by the space's largest; how they lie in memory does not matter."""
    agent = ppo_ddp.Agent(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), DISCRETE)
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    features = agent.trunk(obs)
    assert agent.trunk(obs.contiguous(memory_format=torch.channels_last)).equal(features)
    layers = nn.Sequential(*agent.trunk.layers)
    torch.testing.assert_close(layers(obs.double() / 255), features)
    assert features.shape == (3, 512)
    for scaled, scale in ((True, 255), (False, 1)):
        trunk = dqn_ddp.QNetwork(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), 6, False, "auto", scaled).trunk
        torch.testing.assert_close(trunk(obs), trunk.layers(obs.double() / scale))
    small = ppo_ddp.Agent(gym.spaces.Box(0, 1, (6, 10, 10), np.bool_), DISCRETE)
    assert [tuple(p.shape) for p in small.trunk.parameters()] == [(16, 6, 3, 3), (16,), (128, 1024), (128,)]
    for module in (ppo_ddp, ppg_ddp, dqn_ddp):
        for high, dtype, scale in ((1, np.uint8, 1.0), (7, np.uint8, 7.0), (9, np.int64, 9.0), (9, np.float32, 1.0)):
            trunk = module.Trunk(gym.spaces.Box(0, high, (6, 10, 10), dtype))
            obs = torch.from_numpy(np.random.default_rng(0).integers(0, high + 1, (3, 6, 10, 10)).astype(dtype))
            expected = trunk.layers(obs.double() / scale)
            torch.testing.assert_close(trunk(obs), expected)
    assert small.value_trunk is None and small.trunk(torch.ones(2, 6, 10, 10, dtype=torch.bool)).shape == (2, 128)


@pytest.mark.parametrize("module", [ppo_ddp, ppg_ddp, dqn_ddp])
def test_impala_is_the_papers_network(module):
    """16, 32 and 32 channels, each a convolution, a pooling that halves, and two residual blocks; then 256."""
    torch.manual_seed(1)
    trunk = module.Trunk(gym.spaces.Box(0, 255, (3, 64, 64), np.uint8), "impala")
    obs = torch.randint(0, 256, (5, 3, 64, 64), dtype=torch.uint8)
    tensors = iter(trunk.parameters())

    def conv(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, next(tensors), next(tensors), padding=1)

    x = obs.float() / 255
    for channels in (16, 32, 32):
        x = nn.functional.max_pool2d(conv(x), 3, 2, 1)
        assert x.shape[1] == channels
        for _ in range(2):
            x = x + conv(conv(x.relu()).relu())
    x = x.relu().flatten(1)
    assert x.shape[1] == 2048
    if module is not dqn_ddp:  # whose hidden layers of 256 are the streams'
        x = nn.functional.linear(x, next(tensors), next(tensors)).relu()
    assert next(tensors, None) is None
    torch.testing.assert_close(trunk(obs), x)
    assert (module is dqn_ddp and trunk.width == 256) or x.shape == (5, 256)
    small = module.Trunk(gym.spaces.Box(0, 1, (6, 10, 11), np.bool_), "impala")
    assert small(torch.ones(2, 6, 10, 11, dtype=torch.bool)).shape == (2, small.num_features)
