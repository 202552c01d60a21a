"""The pieces against arithmetic by hand or an independent library; PPO's are PPG's (test_edits.py)."""

import math
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import distributions, nn

import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common import environments
from common.encoders import image_encoder
from common.environments import EVALUATION, TRAINING, environment_seeds, evaluate
from common.normalization import RunningMoments, discounted_returns, standardized
from common.processes import World
from common.replay import Batch
from common.tensors import check_equal
from runs import train

COUNTING = "tests.envs:Counting-v0"
VECTOR = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE, BOX = gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,), np.float32)


def test_gae_by_hand():
    """gamma 0.5, lambda 0.25; environment 0 runs on, 1 ends after its first step."""
    values, next_value = np.array([[2.0, 2.0], [4.0, 4.0]]), np.array([6.0, 6.0])
    dones = np.array([[0.0, 1.0], [0.0, 0.0]])
    # last row: 3 + 0.5 * 6 - 4 = 2; first row: 1 + 0.5 * 4 - 2 + 0.125 * 2, and 1 - 2 where an end cuts
    rewards = np.array([[1.0, 1.0], [3.0, 3.0]])
    advantages = ppo_ddp.compute_gae(rewards, values, next_value, dones, 0.5, 0.25)
    assert advantages.tolist() == [[1.25, -1.0], [2.0, 2.0]]


def test_a_truncated_step_is_worth_what_follows_it(tmp_path, monkeypatch):
    """Its reward has the discounted value of its own last observation, computed alone, as normalised as others."""
    sizes = []  # of all calls; in the first two the policy looks at its layers

    def forward(self, obs):  # the value is what is observed: 100 for each episode so far, and its steps
        sizes.append(len(obs))
        return self.actor(obs), obs[:, 0] / 2

    def stop(rewards, values, next_value, dones, *rates):
        episode, time = np.divmod(values, 100)
        assert np.array_equal(dones, time + 1 == 2 + episode % 4)  # as `Counting` says
        truncated = dones & (episode % 3 == 0)
        assert np.array_equal(rewards, 1 + 0.5 * (values + 1) * truncated) and rates == (0.5, 0.95)
        assert np.array_equal(next_value, np.where(dones[-1], next_value // 100 * 100, values[-1] + 1))
        assert sizes[2:].count(1) == truncated.sum() > 0 and {*(episode[dones] % 3)} == {0, 1, 2}
        raise InterruptedError

    monkeypatch.setattr(ppo_ddp.Agent, "forward", forward)
    monkeypatch.setattr(ppo_ddp.RunningMoments, "normalized", lambda self, x: 2 * x)
    monkeypatch.setattr(ppo_ddp, "compute_gae", stop)
    with pytest.raises(InterruptedError):
        train(ppo_ddp, tmp_path / "run", env_id=COUNTING, gamma=0.5, norm_reward=False)


def test_a_truncated_transition_is_followed_by_its_last_observation(tmp_path, watch):
    """In DQN's batches, and in SAC's, which has the same lines; a termination's value is 0."""
    calls = watch(dqn_ddp.ReplayBuffer, "sample")
    sizes = {"learning_starts": 40, "total_timesteps": 400, "batch_size": 40, "buffer_size": 200}
    train(dqn_ddp, tmp_path / "run", **sizes, env_id=COUNTING)
    names = ("obs", "next_obs", "discounts")
    obs, next_obs, discounts = (torch.cat([getattr(x.batch, name) for _, x in calls]) for name in names)
    episode, time = np.divmod(obs[:, 0].numpy(), 100)
    terminated = (time + 1 == 2 + episode % 4) & (episode % 3 != 0)
    assert np.array_equal(discounts == 0, terminated) and 0 < terminated.sum() < len(terminated)
    assert next_obs[~terminated].equal(obs[~terminated] + 1)


def test_clipped_losses_by_hand(float64):
    ratios, entropies, new_values = torch.tensor([[2, 2, 0.5, 0.25], [0.5, 0.7, 0.5, 0.7], [2.0, 1.1, 2.0, 1.1]])
    agent = mock.Mock(return_value=(None, new_values))
    agent.log_prob.return_value = (ratios.log(), entropies)
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
        pg_loss = -(1.2 - 2.0 + 0.5 - 0.8) / 4  # min(2, 1.2), min(-2, -1.2), min(0.5, 0.8), min(-0.25, -0.8)
        assert stats["policy_loss"].item() == pytest.approx(pg_loss, rel=1e-12)
        assert stats["value_loss"].item() == pytest.approx(v_loss, rel=1e-12)
        assert stats["entropy"].item() == pytest.approx(0.6, rel=1e-12)
        assert loss.item() == pytest.approx(pg_loss - 0.1 * 0.6 + 0.5 * v_loss, rel=1e-12)
        assert stats["clipfrac"].mean().item() == 1.0
        assert stats["old_approx_kl"].mean().item() == pytest.approx(math.log(2) / 4, rel=1e-12)
        kl = (2 + 2 + 0.5 + 0.25) / 4 - 1 + math.log(2) / 4
        assert stats["approx_kl"].mean().item() == pytest.approx(kl, rel=1e-12)


@pytest.mark.parametrize("space", [DISCRETE, BOX])
def test_policy_terms_agree_with_torch_distributions(space, float64):
    torch.manual_seed(0)
    agent = ppg_ddp.Agent(VECTOR, space)
    if space is BOX:
        agent.log_std.data = torch.tensor([0.3, -0.7])
    agent.actor[-1].weight.data *= 100
    obs = torch.randn(5, 3)
    out, _ = agent(obs)
    pi, old_pi = agent.pi(obs)[0], agent.pi(torch.randn(5, 3))[0].detach()
    if space is BOX:
        old_pi[:, 2:] -= 0.2
        reference, old = (
            distributions.Independent(distributions.Normal(p[:, :2], p[:, 2:].exp()), 1) for p in (pi, old_pi)
        )
    else:
        reference, old = distributions.Categorical(logits=pi), distributions.Categorical(logits=old_pi)
    actions = reference.sample()
    logprob, entropy = agent.log_prob(out, actions)
    torch.testing.assert_close(logprob, reference.log_prob(actions), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(entropy, reference.entropy(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        agent.kl_divergence(old_pi, pi), distributions.kl_divergence(old, reference), rtol=1e-10, atol=1e-10
    )
    assert agent.kl_divergence(pi, pi).abs().max() < 1e-12


def test_dqn_targets_by_hand():
    rewards, discounts = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0])
    target_q, online_q = torch.tensor([[4.0, 8.0], [4.0, 8.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    parts = {"rewards": rewards, "discounts": discounts, "next_obs": online_q, "weights": torch.ones(2)}
    parts |= {"obs": torch.zeros(2, 2), "actions": torch.tensor([0, 1])}
    for double_q, expected in ((False, [5.0, 2.0]), (True, [3.0, 2.0])):
        args = dqn_ddp.Args(double_q=double_q)
        loss = dqn_ddp.TDLoss(nn.Identity(), lambda obs: target_q, args, 1)  # values of 0 now
        _, stats = loss(Batch(**parts))
        assert (-stats["td_errors"]).tolist() == expected


def test_dueling_values_by_hand():
    network, obs = dqn_ddp.QNetwork(VECTOR, 4, True, "auto", True), torch.randn(6, 3)
    features = network.network(obs)
    assert {*network.head.parameters()}.isdisjoint(network.value_head.parameters()) and len(network.value_head) == 3
    q = network.head(features)
    mean = (q[:, :1] + q[:, 1:2] + q[:, 2:3] + q[:, 3:]) / 4
    torch.testing.assert_close(network(obs), network.value_head(features) + q - mean)


def test_log_probability_is_that_of_the_squashed_normal(float64):
    """Against torch's own terms, with the gradient, also where tanh is 1."""
    torch.manual_seed(0)
    actor, obs, noise = sac_ddp.Actor(VECTOR, 2), torch.randn(50, 3), torch.randn(50, 2)
    noise[:10] *= 1000
    actions, log_prob = actor(obs, noise)
    mean, squashed = actor.layers(obs).split(2, -1)
    std = (-5.0 + 3.5 * (squashed.tanh() + 1.0)).exp()
    u = mean + std * noise
    log_det = distributions.TanhTransform().log_abs_det_jacobian(u, u.tanh())
    expected = (distributions.Normal(mean, std).log_prob(u) - log_det).sum(-1)
    assert (u.tanh().abs() == 1).any()
    torch.testing.assert_close(actions, u.tanh())
    torch.testing.assert_close(log_prob, expected, rtol=1e-9, atol=1e-9)
    parameters = list(actor.parameters())
    gradients, by_torch = (torch.autograd.grad(x.mean(), parameters, retain_graph=True) for x in (log_prob, expected))
    torch.testing.assert_close(gradients, by_torch)


def test_sac_losses_by_hand(float64):
    torch.manual_seed(0)
    actor, critics, critics_target = sac_ddp.Actor(VECTOR, 2), sac_ddp.Critics(VECTOR, 2), sac_ddp.Critics(VECTOR, 2)
    critics.requires_grad_(False)
    log_alpha = nn.Parameter(torch.tensor(math.log(0.3)))
    obs, noise, next_noise = torch.randn(5, 3), torch.randn(5, 2), torch.randn(5, 2)
    actions, log_prob = actor(obs, noise)
    qf1, qf2 = critics(obs, actions)
    batch = Batch(obs, actions.detach(), *torch.rand(2, 5), torch.randn(5, 3), torch.rand(5))
    next_actions, next_logprob = actor(batch.next_obs, next_noise)
    worth = torch.min(*critics_target(batch.next_obs, next_actions)) - 0.3 * next_logprob
    target = batch.rewards + batch.discounts * worth
    loss, stats = sac_ddp.CriticLoss(critics, critics_target, actor, log_alpha, 1 / 5)(batch, next_noise)
    assert not loss.requires_grad  # these critics need none, and the target has none
    torch.testing.assert_close(loss, (batch.weights * ((qf1 - target) ** 2 + (qf2 - target) ** 2)).mean())
    torch.testing.assert_close(stats["td_errors"], ((qf1 - target).abs() + (qf2 - target).abs()) / 2)

    loss, stats = sac_ddp.ActorLoss(actor, log_alpha, critics, 1 / 5)(obs, noise)
    expected = (0.3 * log_prob - torch.min(qf1, qf2)).mean()
    torch.testing.assert_close(stats["actor_loss"], expected)
    parameters = list(actor.parameters())
    *gradients, of_log_alpha = torch.autograd.grad(loss, [*parameters, log_alpha])
    assert of_log_alpha.item() == pytest.approx(-0.3 * (log_prob.mean().item() - 2))
    torch.testing.assert_close(gradients, [*torch.autograd.grad(expected, parameters)])


def test_ppg_auxiliary_loss_by_hand(float64):
    """Its value loss reaches the policy network; the value network has its own."""
    torch.manual_seed(0)
    agent = ppg_ddp.Agent(VECTOR, DISCRETE)
    obs, returns, old_pi = torch.randn(8, 3), torch.randn(8), torch.randn(8, 3)
    loss_fn = ppg_ddp.AuxLoss(agent, ppg_ddp.Args(beta_clone=0.7))
    loss, _ = loss_fn(obs, returns, old_pi)
    errors = loss_fn.aux_critic(agent.actor[:-1](obs)).squeeze(-1) - returns, agent(obs)[1] - returns
    old, new = (distributions.Categorical(logits=x) for x in (old_pi, agent(obs)[0]))
    expected = sum(0.5 * x.square().mean() for x in errors) + 0.7 * distributions.kl_divergence(old, new).mean()
    torch.testing.assert_close(loss, expected)
    gradients, by_hand = (torch.autograd.grad(x, [*loss_fn.parameters()]) for x in (loss, expected))
    torch.testing.assert_close(gradients, by_hand, rtol=1e-10, atol=1e-12)


def test_sampling_inverts_the_distribution():
    agent = ppo_ddp.Agent(VECTOR, DISCRETE)
    out = np.log(np.array([[0.2, 0.3, 0.5]] * 6)) + 3.0
    noise = np.array([0.0, 0.19, 0.21, 0.49, 0.51, np.nextafter(1.0, 0.0)])
    assert agent.sample(out, noise).tolist() == [0, 0, 1, 1, 2, 2]
    assert agent.sample(out.astype(np.float32), np.full(6, np.nextafter(1, 0, dtype=np.float32))).max() == 2
    box = ppo_ddp.Agent(VECTOR, BOX)
    box.log_std.data = torch.tensor([0.0, math.log(3.0)])
    out = np.array([[1.0, 2.0]])
    assert box.sample(out, np.array([[0.5, -1.0]])).tolist() == [[1.5, pytest.approx(2.0 - 3.0)]]
    assert box.mode(out).tolist() == [[1.0, 2.0]] and agent.mode(np.array([[1.0, 3.0, 2.0]])).tolist() == [1]


def test_minibatches_hold_as_many_steps_of_every_environment():
    """In the order of environments, so that a shard's are neighbours."""
    draws = torch.rand(2, 6, 8)  # of 2 epochs, 6 environments, 8 steps
    whole = ppo_ddp.minibatch_inds(draws, 4)
    assert whole.shape == (2, 4, 12)
    for epoch in whole:
        assert sorted(epoch.flatten().tolist()) == list(range(48))
        for minibatch in epoch:
            assert (minibatch % 6).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert not (whole // 6).diff(dim=-1)[..., ::2].eq(1).all(), "steps are not shuffled"


def test_moments_in_parts_are_the_moments_of_the_whole():
    """Of two shards, far from zero: as numpy over all of it."""
    rng = np.random.default_rng(0)
    moments, seen = RunningMoments((3,)), []
    for steps in (5, 50, 7):
        x = np.concatenate([rng.normal(1e4, 0.1, (steps, 2, 3)), rng.normal(1e4 + 1, 2.0, (steps, 2, 3))], 1)
        moments.update(x, World(False, 2))
        seen += [x.reshape(-1, 3)]
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
    off = RunningMoments((3,), enabled=False)
    off.update(x, World(False, 2))
    assert off.normalized(far) is far and off.scaled(far).tolist() == far.tolist() and off.count == 0


def test_discounted_returns_by_hand():
    dones = np.array([[False, True], [False, False]])
    returns, last = discounted_returns(np.ones((2, 2)), dones, 0.5, np.array([8.0, 8.0]))
    assert returns.tolist() == [[5.0, 5.0], [3.5, 1.0]] and last.tolist() == [3.5, 1.0]


@pytest.mark.parametrize("num_shards", [1, 2])
def test_advantages_are_normalised_with_n_minus_1(num_shards, float64):
    """Over the last axis; or over both, of (steps, environments)."""
    rows = torch.tensor([[1.0, 2.0, 3.0, 6.0], [5.0, 5.0, 5.0, 5.0]])
    normalized = standardized(rows, World(False, num_shards))
    torch.testing.assert_close(normalized[0], (rows[0] - 3) / (math.sqrt(14 / 3) + 1e-8), rtol=1e-12, atol=0)
    assert normalized[1].tolist() == [0.0] * 4
    both = standardized(rows, World(False, num_shards), dims=2)
    torch.testing.assert_close(both, (rows - rows.mean()) / (rows.std() + 1e-8), rtol=1e-12, atol=0)


def test_streams_of_seeds_do_not_overlap():
    streams = [(seed, domain) for seed in range(50) for domain in (TRAINING, EVALUATION)]
    seeds = [int(s) for stream in streams for s in environment_seeds(*stream, range(20))]
    assert len(set(seeds)) == len(seeds) == 2000 and 0 <= min(seeds) and max(seeds) < 2**31


def test_an_episode_without_end_counts_as_it_stands(monkeypatch):
    """Evaluation stops after MAX_STEPS, meets other ranks every 100 until none plays, or is cut short."""
    monkeypatch.setattr(environments, "MAX_STEPS", 150)
    args = ppo_ddp.Args(cuda=False)
    world = World(False)
    met = []

    def balance(obs):
        return (obs[:, 2] + obs[:, 3] > 0).astype(int)

    def gather(values):
        met.append(np.array(values, float))
        return np.ones((world.world_size, 1)) * met[-1].reshape(1, -1)

    world.gather = gather
    row, _ = evaluate(balance, args, world)
    assert met[-1].tolist() == [[150.0, 150.0]] * 20  # this policy balances for 170 steps and more
    assert row["eval/episodic_return"] == row["eval/episodic_length"] == 150 and row["eval/episodes"] == 20
    assert [x.size for x in met] == [1, 40]
    evaluate(lambda obs: np.zeros(20, int), args, world)
    assert met[-1].max() < 15
    world.stop = 15
    row, _ = evaluate(balance, args, world)
    assert row["eval/episodic_length"] == 100
    world.stop, world.rank, world.world_size, world.num_shards = 0, 20, 21, 21
    world.shards = range(20, 21)  # a rank without episodes meets the others as often
    met.clear()
    evaluate(None, args, world)
    assert [x.size for x in met] == [1, 40]


CHANGES = {  # of what rank 1 has, and the name that is said
    r"network\S*weight": lambda s: s["network"].weight.data.mul_(1 + 1e-7),
    r"optimizer\S*state\S*1\S*exp_avg": lambda s: s["optimizer"].state[s["network"].bias]["exp_avg"].add_(1e-7),
    r"optimizer\S*state\S*1\S*step": lambda s: s["optimizer"].state.pop(s["network"].bias),
    "generator": lambda s: torch.rand(1, generator=s["generator"]),
    "normaliser": lambda s: s["normaliser"].update(np.ones((1, 1, 2)), World(False, 1)),
    "other": lambda s: s.update(other=1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_kind_of_state_is_compared(name, monkeypatch):
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        network, generator = nn.Linear(2, 1), torch.Generator().manual_seed(1)
        optimizer = torch.optim.Adam(network.parameters())
        network(torch.ones(2)).sum().backward()
        optimizer.step()
        modules = {"network": network, "optimizer": optimizer}
        states.append(modules | {"generator": generator, "normaliser": RunningMoments((2,))})
    CHANGES[name](states[1])
    tables, world = [], World()
    world.world_size = 2
    monkeypatch.setattr(world, "gather_objects", lambda mine: tables.append(mine) or [tables[0], mine])
    check_equal(0, states[0], world)
    with pytest.raises(RuntimeError, match=rf"step 7: \S*{name}\S* on rank 1"):
        check_equal(7, states[1], world)


IMAGES = [(84, np.uint8, 255, 255.0), (10, np.bool_, 1, 1.0), (10, np.uint8, 7, 7.0), (10, np.int64, 9, 9.0)]


@pytest.mark.parametrize("size, dtype, high, scale", [*IMAGES, (10, np.float32, 9, 1.0)])
def test_encoders_read_images_of_any_layout(size, dtype, high, scale, float64):
    """Whole numbers are divided by the space's largest; how they lie in memory does not matter."""
    space = gym.spaces.Box(0, high, (4, size, size), dtype)
    obs = torch.from_numpy(np.random.default_rng(0).integers(0, high + 1, (3, 4, size, size)).astype(dtype))
    for scaled in (True, False):
        encoder, num_features, width = image_encoder(space, scaled=scaled)
        assert (num_features, width) == ((3136, 512) if size == 84 else (1024, 128))
        features = encoder(obs)
        assert encoder(obs.contiguous(memory_format=torch.channels_last)).equal(features)
        torch.testing.assert_close(encoder[1:](obs.double() / (scale if scaled else 1.0)), features)


def test_impala_is_the_papers_network():
    """16, 32 and 32 channels, each a convolution, a pooling that halves, and two residual blocks."""
    space = gym.spaces.Box(0, 255, (3, 64, 64), np.uint8)
    encoder, num_features, width = image_encoder(space, "impala")
    assert (num_features, width) == (2048, 256)
    networks = [ppo_ddp.Agent(space, DISCRETE, "impala").network, ppg_ddp.Agent(space, DISCRETE, "impala").actor]
    for network in (*networks, dqn_ddp.QNetwork(space, 3, False, "impala", True).network):
        assert all(x.shape == y.shape for x, y in zip(encoder.parameters(), network.parameters(), strict=False))
    tensors = iter(encoder.parameters())

    def conv(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, next(tensors), next(tensors), padding=1)

    obs = torch.randint(0, 256, (5, 3, 64, 64), dtype=torch.uint8)
    x = obs.float() / 255
    for channels in (16, 32, 32):
        x = nn.functional.max_pool2d(conv(x), 3, 2, 1)
        assert x.shape[1] == channels
        for _ in range(2):
            x = x + conv(conv(x.relu()).relu())
    torch.testing.assert_close(encoder(obs), x.relu().flatten(1))
