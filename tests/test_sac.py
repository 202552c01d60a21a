"""SAC: its log-probability and losses by hand; and what SAC and DQN share: targets, beta, and no tensor that stays."""

import gc
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

import dqn_ddp
import sac_ddp
from common.replay import Batch

SPACES = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 5]))


def make_actor() -> sac_ddp.Actor:
    torch.manual_seed(0)
    return sac_ddp.Actor(*SPACES, torch.device("cpu"))


def test_log_probability_is_that_of_the_squashed_normal(float64):
    """Against torch's own transformed distribution, in two dimensions with other bounds."""
    actor, obs, noise = make_actor(), torch.randn(50, 3), torch.randn(50, 2)
    actions, log_prob = actor(obs, noise)
    mean, squashed = actor.layers(obs).split(2, -1)
    log_std = -5.0 + 3.5 * (squashed.tanh() + 1.0)
    affine = AffineTransform(torch.tensor([0.0, 2.5]), torch.tensor([2.0, 2.5]))
    pi = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform(cache_size=1), affine])
    torch.testing.assert_close(log_prob, pi.log_prob(actions).sum(-1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(actions, affine(torch.tanh(mean + log_std.exp() * noise)))


def test_log_probability_is_finite_where_tanh_is_one():
    """At u = 40, in float32, where 1 - tanh(u)^2 is 0: log(1 - tanh^2) is 2 (log 2 - u), and its gradient is -2."""
    actor = make_actor()
    with torch.no_grad():
        for parameter in actor.layers[-1].parameters():
            parameter.zero_()
        actor.layers[-1].bias[:2] = 40.0
    actions, log_prob = actor(torch.zeros(1, 3), torch.zeros(1, 2))
    log_std = -1.5
    by_hand = 2 * (-log_std - 0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - 40)) - math.log(2) - math.log(2.5)
    assert log_prob.item() == pytest.approx(by_hand, rel=1e-5)
    log_prob.sum().backward()
    assert actor.layers[-1].bias.grad[:2].tolist() == pytest.approx([2.0, 2.0])
    assert actions.tolist() == [[2.0, 5.0]]


@pytest.mark.parametrize("module", [sac_ddp, dqn_ddp])
def test_targets_stay_out_of_autograd(module, tmp_path, monkeypatch):
    """Target networks follow by tau and never carry a graph, which would grow with each update."""
    lerp, targets, weights = torch._foreach_lerp_, [], []
    monkeypatch.setattr(torch, "_foreach_lerp_", lambda t, *x: (targets.extend(t), weights.append(x[1]), lerp(t, *x)))
    flags = {"learning_starts": 40, "total_timesteps": 80, "batch_size": 8, "eval_every": 0, "cuda": False}
    module.main(module.Args(**flags, target_network_frequency=8, tau=0.3, run_dir=str(tmp_path / "run")))
    assert weights == [0.3] * 5 and not any(target.requires_grad or target.grad_fn for target in targets)


@pytest.mark.parametrize("module", [sac_ddp, dqn_ddp])
def test_beta_rises_to_one(module, tmp_path, monkeypatch):
    """Linearly over the budget, in transitions of all ranks."""
    sample, betas = module.ReplayBuffer.sample, []

    def record(self, batch_size, generator, beta):
        betas.append(beta)
        return sample(self, batch_size, generator, beta)

    monkeypatch.setattr(module.ReplayBuffer, "sample", record)
    flags = {"learning_starts": 40, "total_timesteps": 80, "batch_size": 8, "eval_every": 0, "cuda": False}
    module.main(module.Args(**flags, prioritized=True, per_beta=0.4, train_frequency=8, run_dir=str(tmp_path / "run")))
    assert betas == pytest.approx([0.4 + 0.6 * step / 80 for step in (48, 56, 64, 72, 80)])


@pytest.mark.parametrize("module", [sac_ddp, dqn_ddp])
def test_no_tensor_is_kept_from_step_to_step(module, tmp_path, monkeypatch):
    """Between two rows as many tensors live as 32 updates before: small ones that stay fragment the heap (glibc)."""
    sample, counts = module.ReplayBuffer.sample, []

    def count(*args):
        if len(counts) in (7, 39):
            gc.collect()
        counts.append(len(counts) in (7, 39) and sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
        return sample(*args)

    monkeypatch.setattr(module.ReplayBuffer, "sample", count)
    flags = {"learning_starts": 40, "total_timesteps": 80, "batch_size": 8, "eval_every": 0, "cuda": False}
    module.main(module.Args(**flags, train_frequency=1, log_every=10**6, run_dir=str(tmp_path / "run")))
    assert len(counts) == 40 and counts[39] == counts[7]


def test_losses_by_hand(float64):
    """Both squared errors by their weights; alpha log pi - min Q; and the gradient of log alpha, the critics' none."""
    actor, critics, critics_target = make_actor(), sac_ddp.Critics(*SPACES), sac_ddp.Critics(*SPACES)
    critics.requires_grad_(False)
    log_alpha = torch.nn.Parameter(torch.tensor(math.log(0.3)))
    obs, noise, next_noise = torch.randn(5, 3), torch.randn(5, 2), torch.randn(5, 2)
    actions, log_prob = actor(obs, noise)
    batch = Batch(obs, actions.detach(), *torch.rand(2, 5), torch.randn(5, 3), torch.rand(5))
    next_actions, next_logprob = actor(batch.next_obs, next_noise)
    worth = torch.min(*critics_target(batch.next_obs, next_actions)) - 0.3 * next_logprob
    target = batch.rewards + batch.discounts * worth
    qf1, qf2 = critics(obs, actions)
    loss, stats = sac_ddp.CriticLoss(critics, critics_target, actor, log_alpha, 1 / 5)(batch, next_noise)
    assert not loss.requires_grad  # these critics need none, and the target has none
    errors = zip(batch.weights, qf1, qf2, target, strict=True)
    torch.testing.assert_close(loss, sum(w * ((a - t) ** 2 + (b - t) ** 2) for w, a, b, t in errors) / 5)
    torch.testing.assert_close(stats["td_errors"], ((qf1 - target).abs() + (qf2 - target).abs()) / 2)

    loss, stats = sac_ddp.ActorLoss(actor, log_alpha, critics, 1 / 5)(obs, noise)
    torch.testing.assert_close(stats["actor_loss"], (0.3 * log_prob - torch.min(qf1, qf2)).mean())
    loss.backward()
    assert log_alpha.grad.item() == pytest.approx(-0.3 * (log_prob.mean().item() - 2))
    expected = torch.autograd.grad(actor_loss_of(actor, critics, obs, noise), list(actor.parameters()))
    for parameter, gradient in zip(actor.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def actor_loss_of(actor, critics, obs, noise):
    actions, log_prob = actor(obs, noise)
    return (0.3 * log_prob - torch.min(*critics(obs, actions))).mean()
