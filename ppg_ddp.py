"""Phasic Policy Gradient (arXiv:2009.04416), the same experiment on any number of processes (DDP).

    python ppg_ddp.py --env-id CartPole-v1
    torchrun --nproc_per_node=2 ppg_ddp.py --env-id CartPole-v1
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 ppg_ddp.py --num-envs 8

To use it in a project of your own, copy this file and `common/`.

PPG is PPO with separate policy and value networks, plus an auxiliary phase after every `--n-pi` iterations, where the
policy network learns the value function without changing its policy. With `--aux-epochs 0` and PPO's flags it is
`ppo_ddp.py`, bit for bit on vector observations.
Each phase has an Adam of its own, whose state persists; the auxiliary one moves all networks, as in the reference.
Keep rewards normalised: where returns are large, the value losses drown the KL term, and the policy is lost.

Differences from the reference (OpenAI's phasic-policy-gradient), beside those listed in `ppo_ddp.py`:
1. Policy and value losses share their epochs (`--update-epochs`), minibatches, and one Adam; at the paper's
   E_pi = E_V = 1 that is no difference. The value loss of the policy phase weighs half of the reference's
   (`--vf-coef 1` is the reference's).
2. Gradient norms are clipped in both phases, and learning rates are annealed.
3. The auxiliary phase shuffles single steps; the reference shuffles whole rollouts.
4. Layers start orthogonal, as PPO's; the reference's start as normal draws, normed by output.
5. Rewards are normalised with `--gamma`; the reference's normaliser keeps 0.99 whatever the discount.
6. Phases and batches are small by default, for small problems; the paper's, for Procgen, are the suite `procgen`'s
   (benchmark/suites.py): on each of four processes 64 environments, and 3,072 auxiliary updates a phase, of 1,024
   transitions each. There, a time limit is a truncation; the reference takes it for a termination.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from common.acting import Acting
from common.arguments import RunArgs, command_line, require, require_divisible, require_divisor
from common.checkpoint import Checkpoints, load_model
from common.distributed import World
from common.environments import Environments, open_environments
from common.episodes import EpisodeStatistics, episode_row, evaluate
from common.equality import check_equal
from common.graphs import given, graphed
from common.launch import BadInput, launch
from common.logger import Logger
from common.machine import require_compiler, require_memory, set_threads
from common.normalization import RunningMoments, discounted_returns, standardized
from common.periods import crossed
from common.ranges import Count, Fraction, Json, Norm, Positive, Weight, Whole
from common.shards import average_over_shards, per_shard, to_tensor


@dataclass
class Args(RunArgs):
    # flags of where and how it runs are RunArgs' (common/arguments.py); environment
    env_id: str = "CartPole-v1"
    """gymnasium id, ALE/..., MinAtar/..., envpool/..., or module:id of your own"""
    env_kwargs: Json = "{}"
    """JSON of options for the simulator, such as '{"num_levels": 200}'"""
    total_timesteps: Whole = 500_000
    """budget in environment transitions, all ranks; the whole iterations that fit are run"""
    num_envs: Count = 4
    """parallel environments, all ranks"""
    network: Literal["auto", "impala"] = "auto"
    """images: by their size, or IMPALA's residual network (on a CPU, 64 x 64 pixels take nine times as long)"""
    compile: bool = False
    """compile the loss (on CPU this needs g++): starts later, then small networks update up to 1.5 times faster"""
    life_loss: bool = True
    """Atari: a lost life ends the episode for learning (never for reported returns)"""
    norm_obs: bool = False
    """normalise vector observations by running moments over all ranks"""
    norm_reward: bool = True
    """divide rewards by the running standard deviation of discounted returns over all ranks"""

    # algorithm
    num_steps: Count = 128
    """steps of each environment per iteration"""
    num_minibatches: Count = 4
    """minibatches per epoch, each with as many steps of every environment"""
    update_epochs: Count = 1
    """epochs over an iteration's batch"""
    learning_rate: Positive = 5e-4
    """Adam's learning rate"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0 over the run"""
    adam_eps: Positive = 1e-8
    """Adam's epsilon"""
    gamma: Fraction = 0.99
    """discount"""
    gae_lambda: Fraction = 0.95
    """lambda of generalised advantage estimation"""
    clip_coef: Positive = 0.2
    """clipping of the probability ratio, and of the value's move with --clip-vloss"""
    clip_vloss: bool = False
    """clip the value loss"""
    norm_adv: Literal["minibatch", "batch", "none"] = "batch"
    """what advantages are normalised over, always on all ranks"""
    ent_coef: Weight = 0.01
    """weight of the entropy bonus"""
    vf_coef: Weight = 0.5
    """weight of the value loss"""
    max_grad_norm: Norm = 0.5
    """largest norm of the gradient, inf: unclipped"""
    target_kl: Positive | None = None
    """end an iteration's epochs once an epoch's mean approx_kl, over all ranks, exceeds this"""
    n_pi: Count = 16
    """iterations per policy phase; an auxiliary phase follows each, over all their transitions"""
    aux_epochs: Whole = 6
    """epochs of an auxiliary phase; 0: no auxiliary phases, which on vectors is PPO"""
    num_aux_minibatches: Count = 16
    """minibatches per auxiliary epoch, each with as many steps of every environment"""
    aux_learning_rate: Positive = 5e-4
    """the auxiliary phase's learning rate, annealed with the policy phase's"""
    beta_clone: Weight = 1.0
    """weight of the KL divergence from the policy before the auxiliary phase"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_divisible("--num-steps", self.num_steps, self.num_minibatches, "--num-minibatches")
        size = self.num_envs * self.num_steps
        normalized = {"minibatch": size // self.num_minibatches, "batch": size, "none": 2}[self.norm_adv]
        require(normalized > 1, "--norm-adv", self.norm_adv, "none, or over at least 2 samples")
        needed = f"at least one iteration: --num-envs {self.num_envs} x --num-steps {self.num_steps} = {size}"
        self.require_budget(size, needed)
        if self.aux_epochs:
            steps = self.n_pi * self.num_steps
            require_divisor("--num-aux-minibatches", self.num_aux_minibatches, steps, "--n-pi x --num-steps")
            needed = f"at least {self.n_pi * size}, which has one auxiliary phase (or set --aux-epochs 0)"
            self.require_budget(self.n_pi * size, needed)


# ALGO LOGIC: networks


def layer_init(layer: nn.Linear | nn.Conv2d, std: float = math.sqrt(2)) -> nn.Linear | nn.Conv2d:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


def is_large(space: gym.spaces.Box, channels_first: bool) -> bool:
    """True for images whose smaller side is at least 36: they take the large network, and several threads."""
    return len(space.shape) == 3 and min(space.shape[1:] if channels_first else space.shape[:2]) >= 36


class Residual(nn.Module):
    """(B, channels, H, W) plus two convolutions of it, which start so small that those of six blocks add up to it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        one, two = (layer_init(nn.Conv2d(channels, channels, 3, padding=1), 6**-0.25) for _ in range(2))
        self.layers = nn.Sequential(nn.ReLU(), one, nn.ReLU(), two)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Trunk(nn.Module):
    """Observations (B, *shape) in the space's own dtype -> features (B, num_features).

    Vector: two layers of 64. Image: by its smaller side, the network of the DQN Nature paper (36 and up) or of the
    MinAtar paper (arXiv:1903.03176), or IMPALA's (arXiv:1802.01561 figure 3) at PPG's sizes. Atari's images and many of
    EnvPool's are channels-first.
    """

    def __init__(self, space: gym.spaces.Box, channels_first: bool, network: str = "auto") -> None:
        super().__init__()
        self.image, self.channels_first = len(space.shape) == 3, channels_first
        # pixels of whole numbers are divided by the largest
        self.scale = max(1.0, float(space.high.max())) if self.image and np.issubdtype(space.dtype, np.integer) else 1.0
        if not self.image:
            size, self.num_features = space.shape[0], 64
            hidden = [layer_init(nn.Linear(size, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]
        else:
            channels, height, width = space.shape if channels_first else (space.shape[i] for i in (2, 0, 1))
            hidden, convolutions = [], []
            if network == "impala":
                out_channels, self.num_features = 32, 256
                for in_channels, out in ((channels, 16), (16, 32), (32, 32)):
                    hidden += [layer_init(nn.Conv2d(in_channels, out, 3, padding=1), 1.0), nn.MaxPool2d(3, 2, 1)]
                    hidden += [Residual(out), Residual(out)]
                    height, width = (height + 1) // 2, (width + 1) // 2
                hidden += [nn.ReLU()]
            elif is_large(space, channels_first):
                convolutions, self.num_features = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)], 512
            else:
                convolutions, self.num_features = [(channels, 16, 3, 1)], 128
            for in_channels, out_channels, kernel, stride in convolutions:
                hidden += [layer_init(nn.Conv2d(in_channels, out_channels, kernel, stride)), nn.ReLU()]
                height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            flat = nn.Linear(out_channels * height * width, self.num_features)
            hidden += [nn.Flatten(), layer_init(flat), nn.ReLU()]
        self.layers = nn.Sequential(*hidden).to(memory_format=torch.channels_last)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        if self.image:
            obs = obs if self.channels_first else obs.permute(0, 3, 1, 2)  # (B, C, H, W)
            obs = obs.contiguous(memory_format=torch.channels_last)
        obs = obs.to(torch.get_default_dtype())
        return self.layers(obs if self.scale == 1.0 else obs / self.scale)


class Agent(nn.Module):
    """Policy and value over separate trunks.

    The policy is a tensor `pi`: logits (B, n) of a `Discrete` space, or means and log standard deviations (B, 2 d) of a
    `Box` of d numbers.
    """

    def __init__(
        self, obs_space: gym.spaces.Box, action_space: gym.Space, channels_first: bool, network: str = "auto"
    ) -> None:
        super().__init__()
        self.discrete = isinstance(action_space, gym.spaces.Discrete)
        size = int(action_space.n) if self.discrete else math.prod(action_space.shape)
        self.trunk = Trunk(obs_space, channels_first, network)
        self.value_trunk = Trunk(obs_space, channels_first, network)
        self.actor = layer_init(nn.Linear(self.trunk.num_features, size), std=0.01)
        self.critic = layer_init(nn.Linear(self.trunk.num_features, 1), std=1.0)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(size))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations (B, *shape) -> pi (B, .): what acts, and what the losses take in two steps."""
        return self.policy(self.trunk(obs))

    def policy(self, features: torch.Tensor) -> torch.Tensor:
        out = self.actor(features)
        return out if self.discrete else torch.cat([out, self.log_std.expand_as(out)], -1)

    def value(self, obs: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Values (B,), of the policy's features (B, num_features), or of obs (B, *shape) by a trunk of their own."""
        return self.critic(self.value_trunk(obs)).squeeze(-1)

    def log_prob_entropy(self, pi: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """pi (B, .), actions (B,) or (B, d) -> log-probabilities (B,) and entropies (B,)."""
        if self.discrete:
            log_p = pi.log_softmax(-1)
            return log_p.gather(-1, actions.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
        mean, log_std = pi.chunk(2, -1)
        deviation = (actions - mean) * (-log_std).exp()
        constant = 0.5 * math.log(2 * math.pi)
        log_prob = (-0.5 * deviation**2 - log_std - constant).sum(-1)
        return log_prob, (0.5 + constant + log_std).sum(-1)

    def kl_divergence(self, old_pi: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """KL(old_pi || pi) of (B, .) -> (B,)."""
        if self.discrete:
            old_log_p, log_p = old_pi.log_softmax(-1), pi.log_softmax(-1)
            return (old_log_p.exp() * (old_log_p - log_p)).sum(-1)
        old_mean, old_log_std, mean, log_std = *old_pi.chunk(2, -1), *pi.chunk(2, -1)
        moved = ((2 * old_log_std).exp() + (old_mean - mean) ** 2) / (2 * (2 * log_std).exp())
        return (log_std - old_log_std + moved - 0.5).sum(-1)

    def sample(self, pi: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """pi (n, .) and noise, uniform (n,) or normal (n, d) -> actions (n,) by inverse CDF, or (n, d)."""
        if self.discrete:
            cdf = np.exp(pi - pi.max(-1, keepdims=True)).cumsum(-1)
            return (noise[:, None] * cdf[:, -1:] >= cdf[:, :-1]).sum(-1)
        mean, log_std = np.split(pi, 2, -1)
        return mean + np.exp(log_std) * noise

    def mode(self, pi: np.ndarray) -> np.ndarray:
        """pi (n, .) -> the most probable actions, (n,) or (n, d)."""
        return pi.argmax(-1) if self.discrete else np.split(pi, 2, -1)[0]


# ALGO LOGIC: losses


class PPOLoss(nn.Module):
    """The clipped objectives of one minibatch (arXiv:1707.06347 eq. 7 and 9); `forward` is what DDP reduces."""

    def __init__(self, agent: Agent, args: Args) -> None:
        super().__init__()
        self.agent, self.args = agent, args

    def forward(
        self,
        obs: torch.Tensor,  # (B, *shape)
        actions: torch.Tensor,  # (B,) or (B, d)
        logprobs: torch.Tensor,  # (B,), and so all below
        values: torch.Tensor,
        returns: torch.Tensor,
        advantages: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Returns the loss, a mean over the minibatch, and, detached, its three parts and the log-ratios (B,)."""
        args = self.args
        features = self.agent.trunk(obs)
        newlogprob, entropy = self.agent.log_prob_entropy(self.agent.policy(features), actions)
        newvalue = self.agent.value(obs, features)

        logratio = newlogprob - logprobs
        ratio = logratio.exp()
        clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        pg_loss = -torch.min(advantages * ratio, advantages * clipped).mean()
        if args.clip_vloss:
            v_clipped = values + (newvalue - values).clamp(-args.clip_coef, args.clip_coef)
            v_loss = 0.5 * torch.max((newvalue - returns) ** 2, (v_clipped - returns) ** 2).mean()
        else:
            v_loss = 0.5 * ((newvalue - returns) ** 2).mean()
        entropy_loss = entropy.mean()
        loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss
        return loss, (pg_loss.detach(), v_loss.detach(), entropy_loss.detach(), logratio.detach())


class AuxLoss(nn.Module):
    """The joint objective of the auxiliary phase (arXiv:2009.04416 section 2) plus the value loss."""

    def __init__(self, agent: Agent, aux_critic: nn.Linear, args: Args) -> None:
        super().__init__()
        self.agent, self.aux_critic, self.args = agent, aux_critic, args

    def forward(
        self,
        obs: torch.Tensor,  # (B, *shape)
        returns: torch.Tensor,  # (B,)
        old_pi: torch.Tensor,  # (B, .)
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Returns the loss, a mean over the minibatch, and, detached, its three parts."""
        features = self.agent.trunk(obs)
        aux_v_loss = 0.5 * ((self.aux_critic(features).squeeze(-1) - returns) ** 2).mean()
        kl_loss = self.agent.kl_divergence(old_pi, self.agent.policy(features)).mean()
        v_loss = 0.5 * ((self.agent.value(obs, features) - returns) ** 2).mean()
        loss = aux_v_loss + self.args.beta_clone * kl_loss + v_loss
        return loss, (aux_v_loss.detach(), kl_loss.detach(), v_loss.detach())


def gradient_step(
    ddp_loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float,
    lr: float | torch.Tensor,
    minibatches: list[tuple[torch.Tensor, ...]],
) -> list[tuple[torch.Tensor, ...]]:
    """One step on a minibatch of each shard here -> what the loss returned for each, apart from itself."""
    stats, (group,) = [], optimizer.param_groups
    for minibatch in minibatches:  # gradients are averaged at the last backward
        loss, mb_stats = ddp_loss(*minibatch)
        optimizer.zero_grad()
        loss.backward()  # collective
        stats.append(mb_stats)
    nn.utils.clip_grad_norm_(group["params"], max_grad_norm)
    group["lr"] = lr
    optimizer.step()
    return stats


# ALGO LOGIC: pure helpers


def compute_gae(
    rewards: np.ndarray, values: np.ndarray, next_value: np.ndarray, dones: np.ndarray, gamma: float, gae_lambda: float
) -> np.ndarray:
    """Generalised advantage estimates (arXiv:1506.02438 eq. 16): all (T, n), `next_value` (n,) what follows.

    `dones`: 1.0 where the episode ended after the step, which cuts the sum; where it was truncated, what its last
    observation is worth is in the reward.
    """
    advantages, nonterminal = np.empty_like(values), 1.0 - dones
    delta = rewards + gamma * np.concatenate([values[1:], next_value[None]]) * nonterminal - values
    decay = gamma * gae_lambda * nonterminal
    lastgaelam = np.zeros_like(next_value)
    for t in range(len(rewards) - 1, -1, -1):
        advantages[t] = lastgaelam = delta[t] + decay[t] * lastgaelam
    return advantages


def minibatch_inds(
    generator: torch.Generator, num_epochs: int, num_minibatches: int, num_steps: int, num_envs: int, world: World
) -> torch.Tensor:
    """Shuffled indices into a shard's flattened (num_steps, envs): (shards here, num_epochs, num_minibatches, size).

    The time indices of each environment are permuted by the shared generator and cut, so that a global minibatch
    holds as many steps of every environment, and the same ones at any world size.
    """
    local_envs, num_shards = world.here(num_envs), len(world.shards)
    order = torch.rand(num_epochs, num_envs, num_steps, generator=generator)[:, local_envs].argsort(stable=True)
    size = order.shape[1] // num_shards  # environments of a shard
    inds = order.view(num_epochs, num_shards, size, num_steps) * size + torch.arange(size)[:, None]
    inds = inds.view(num_epochs, num_shards, size, num_minibatches, -1).permute(1, 0, 3, 2, 4)
    return inds.reshape(num_shards, num_epochs, num_minibatches, -1)


LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def loss_sums(stats: list[tuple[torch.Tensor, ...]], clip_coef: float) -> dict[str, float]:
    """What `PPOLoss` returned for k minibatches -> sums over them, in float64, by the names in `LOSSES`."""
    *losses, logratio = (torch.stack(part).double() for part in zip(*stats, strict=True))  # (k,), ..., (k, B)
    ratio = logratio.exp()
    approx_kl = ratio - 1 - logratio  # http://joschu.net/blog/kl-approx.html
    clipped = ((ratio - 1).abs() > clip_coef).double()
    means = [*losses, -logratio.mean(-1), approx_kl.mean(-1), clipped.mean(-1)]
    return dict(zip(LOSSES, torch.stack(means).sum(-1).tolist(), strict=True))


AUX_LOSSES = ("aux/aux_value_loss", "aux/kl_loss", "aux/real_value_loss")
COLUMNS = (
    *("charts/episodic_return", "charts/episodic_length", "charts/episodes", "charts/learning_rate"),
    *("eval/episodic_return", "eval/episodic_length", "eval/episodes"),
    *(f"losses/{name}" for name in LOSSES),
    *("losses/explained_variance", "losses/epochs"),
    *(f"losses/{name}" for name in AUX_LOSSES),
    *("time/wall", "time/SPS", "time/rollout", "time/update", "time/eval"),
    "time/aux",
)


def main(args: Args) -> None:
    """Train. Opens and closes all it needs; raises `BadInput`, before it learns, for settings that cannot work."""
    world = World(args.cuda, args.shards)
    if args.compile:
        require_compiler(world)
    action_spaces = gym.spaces.Discrete, gym.spaces.Box
    with open_environments(args, world, action_spaces, args.life_loss) as (envs, eval_envs):
        obs_space = envs.single_observation_space
        if args.norm_obs and len(obs_space.shape) == 3:
            raise BadInput(f"--norm-obs: {args.env_id} has image observations; leave it off (--no-norm-obs).")
        if args.network != "auto" and len(obs_space.shape) == 1:
            raise BadInput(f"--network {args.network}: {args.env_id} has vector observations; leave it off.")
        transition = obs_space.dtype.itemsize * math.prod(obs_space.shape)
        nbytes = args.num_steps * envs.num_envs * (transition + 16 * args.update_epochs + 100)  # with draws, indices
        if args.aux_epochs:
            nbytes += args.n_pi * args.num_steps * envs.num_envs * (transition + 16 * args.aux_epochs + 100)
        require_memory("--num-steps", args.num_steps, nbytes, world)
        set_threads(args.num_threads, is_large(obs_space, envs.channels_first), world)
        with Logger(args, __file__, COLUMNS, world, eval_envs) as logger, world.process_group(args.timeout):
            train(args, world, envs, eval_envs, logger)


def train(args: Args, world: World, envs: Environments, eval_envs: Environments | None, logger: Logger) -> None:
    """The training loop. A function of its own, so that the DDP modules are gone before the process group is."""
    device = world.device
    local_envs, local_num_envs = world.here(args.num_envs), envs.num_envs  # which of all are here, and how many
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    shards = envs.shards  # the rows of each shard that is here: all, without --shards

    # the same networks and the same generator on all ranks
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))  # not the stream of the networks
    agent = Agent(obs_space, action_space, envs.channels_first, args.network).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True)
    loss_fn = PPOLoss(agent, args)
    # last: draws after PPO's networks
    aux_critic = layer_init(nn.Linear(agent.trunk.num_features, 1), std=1.0).to(device)
    aux_parameters = [*agent.parameters(), *aux_critic.parameters()]
    aux_optimizer = torch.optim.Adam(aux_parameters, lr=args.aux_learning_rate, eps=args.adam_eps, fused=True)
    aux_loss_fn = AuxLoss(agent, aux_critic, args)
    if args.compile:
        loss_fn.compile()
        aux_loss_fn.compile()
    # DDP: hooks `forward` and nothing else, so it wraps the loss; acting and bootstrapping use the bare agent
    # two wrappers over the same networks, each of exactly what its loss uses; `static_graph` would break the pair
    options = {"gradient_as_bucket_view": True}
    ddp_loss = DDP(loss_fn, **options) if world.wraps else loss_fn  # collective
    average_over_shards(ddp_loss, world)  # with --shards; without, DDP's own mean over processes
    ddp_aux_loss = DDP(aux_loss_fn, **options) if world.wraps else aux_loss_fn  # collective
    average_over_shards(ddp_aux_loss, world)
    obs_moments, return_moments = RunningMoments(obs_space.shape), RunningMoments()
    step_fn = partial(gradient_step, ddp_loss, optimizer, args.max_grad_norm)
    update = graphed(args.cuda_graphs, world, step_fn, optimizer)
    aux_step_fn = partial(gradient_step, ddp_aux_loss, aux_optimizer, args.max_grad_norm)
    aux_update = graphed(args.cuda_graphs, world, aux_step_fn, aux_optimizer)
    # equal on all ranks at all times: checked, and saved (in model.pt but optimisers and generators)
    state = {"agent": agent, "optimizer": optimizer, "generator": generator}
    state |= {"aux_critic": aux_critic, "aux_optimizer": aux_optimizer}
    state |= {"obs_moments": obs_moments, "return_moments": return_moments}

    # storage of one iteration; on the CPU, torch tensors share its memory
    shape, image = (args.num_steps, local_num_envs), agent.trunk.image
    action_shape = () if agent.discrete else (math.prod(action_space.shape),)
    np_dtype = torch.empty(0).numpy().dtype  # torch's default, as numpy's
    obs = np.zeros((*shape, *obs_space.shape), obs_space.dtype)
    actions = np.zeros((*shape, *action_shape), np.int64 if agent.discrete else np_dtype)
    features = torch.zeros((*shape, agent.trunk.num_features), device=device)  # used for images only
    rewards = np.zeros(shape)
    terminations, truncations = np.zeros(shape, bool), np.zeros(shape, bool)
    aux_obs = np.zeros((args.n_pi if args.aux_epochs else 0, *obs.shape), obs.dtype)  # of one policy phase
    aux_returns = np.zeros((args.n_pi, *shape), np_dtype)

    def normalized(raw: np.ndarray) -> np.ndarray:
        return obs_moments.normalize(raw) if args.norm_obs else raw

    def network_input(raw: np.ndarray) -> torch.Tensor:
        """Observations as the environment gives them -> what the networks read."""
        return to_tensor(normalized(raw), device)

    def features_pi(obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Observations as the networks read them -> features (n, num_features) and pi (n, .)."""
        features = agent.trunk(obs)
        return features, agent.policy(features)

    features_pi = graphed(args.cuda_graphs, world, features_pi)

    acting = Acting(agent, device, logger.note, graphed(args.cuda_graphs, world, agent))

    def env_actions(sampled: np.ndarray) -> np.ndarray:
        """Sampled actions -> what `step` takes: shifted to the space's start, or cast and clipped to its bounds."""
        if agent.discrete:
            return sampled + action_space.start
        cast = sampled.reshape(-1, *action_space.shape).astype(action_space.dtype)
        return cast.clip(action_space.low, action_space.high)

    def act(raw: np.ndarray) -> np.ndarray:
        """Greedy actions for evaluation."""
        return env_actions(agent.mode(acting.network(normalized(raw))))

    checkpoints, restart = Checkpoints(args, world, logger, state), True  # collective
    load_model(args, world, state, checkpoints)  # collective
    logger.start(f"{num_iterations} iterations of {batch_size} transitions on {world.world_size} process(es), {device}")

    for iteration in range(checkpoints.global_step // batch_size + 1, max(num_iterations, 1) + 1):
        if restart:  # at the start, and after each checkpoint
            next_obs, episodes = envs.start(checkpoints.number), EpisodeStatistics(shards)
            return_carry = np.zeros(local_num_envs)  # running discounted returns, moved in place
            if args.eval_every and not checkpoints.number:  # before anything is learned
                row = evaluate(act, eval_envs, args.eval_episodes, world)  # collective
                if not world.stop:
                    logger.log(0, row)
            if not num_iterations:  # --total-timesteps 0
                return

        global_step = iteration * batch_size
        fraction = 1.0 - (iteration - 1) / num_iterations if args.anneal_lr else 1.0
        learning_rate = fraction * args.learning_rate
        lr = given(learning_rate, device)
        aux_lr = given(fraction * args.aux_learning_rate, device)

        # rollout: all environments' noise is drawn on every rank, each takes its own
        rollout_start = time.perf_counter()
        draw = torch.rand if agent.discrete else torch.randn
        noise = draw(args.num_steps, args.num_envs, *action_shape, generator=generator)[:, local_envs].numpy()
        final_obs = {}  # of truncated episodes, by step and environment
        policy = per_shard(acting.refresh(normalized(next_obs)), shards, world)
        with torch.inference_mode():
            for step in range(args.num_steps):
                obs[step] = next_obs
                if image:  # whose features are kept, not computed twice
                    parts = []
                    for rows in shards:
                        features[step, rows], part = features_pi(network_input(next_obs[rows]))
                        parts.append(part.cpu().numpy())
                    pi = np.concatenate(parts)
                else:
                    pi = policy(normalized(next_obs))
                actions[step] = agent.sample(pi, noise[step])
                next_obs, reward, termination, truncation, infos = envs.step(env_actions(actions[step]))
                rewards[step], terminations[step], truncations[step] = reward, termination, truncation
                episodes.step(reward, termination | truncation, infos)
                if truncation.any():
                    for i in np.flatnonzero(truncation & ~termination):
                        final_obs[step, i] = infos["final_obs"][i].copy()

        # values and log-probabilities of the whole rollout at once, shard by shard
        dones, bootstrapped = terminations | truncations, truncations & ~terminations
        learning_rewards = np.sign(rewards) if envs.atari else rewards
        if args.norm_reward:
            returns = discounted_returns(learning_rewards, dones, args.gamma, return_carry)
            return_moments.update([returns[:, rows] for rows in shards], world)  # collective
            learning_rewards = (learning_rewards / return_moments.std).clip(-10, 10)
        learning_rewards = learning_rewards.astype(np_dtype)
        values, next_value, batches = np.empty(shape, np_dtype), np.empty(local_num_envs, np_dtype), []
        with torch.no_grad():
            for rows in shards:
                b_obs = network_input(obs[:, rows].reshape(-1, *obs_space.shape))
                b_actions = to_tensor(actions[:, rows].reshape(-1, *action_shape), device)
                b_features = features[:, rows].flatten(0, 1) if image else agent.trunk(b_obs)
                b_logprobs, _ = agent.log_prob_entropy(agent.policy(b_features), b_actions)
                # in parts, as the update: values may take convolutions of their own, as PPG's do
                parts = zip(b_obs.chunk(args.num_minibatches), b_features.chunk(args.num_minibatches), strict=True)
                b_values = torch.cat([agent.value(*part) for part in parts])
                finals = [final_obs[step, rows.start + i] for step, i in np.argwhere(bootstrapped[:, rows])]
                last_obs = network_input(np.stack([*next_obs[rows], *finals]))
                last_values = agent.value(last_obs, agent.trunk(last_obs)).cpu().numpy()
                values[:, rows] = b_values.cpu().numpy().reshape(args.num_steps, -1)
                next_value[rows], final_values = np.split(last_values, [rows.stop - rows.start])
                learning_rewards[:, rows][bootstrapped[:, rows]] += args.gamma * final_values  # truncation bootstraps
                batches.append((b_obs, b_actions, b_logprobs, b_values))
        advantages = compute_gae(
            learning_rewards, values, next_value, dones.astype(np_dtype), args.gamma, args.gae_lambda
        )
        b_advantages = [to_tensor(advantages[:, rows].ravel(), device) for rows in shards]
        batches = [(*batch, x + batch[-1]) for batch, x in zip(batches, b_advantages, strict=True)]  # and the returns
        update_start = time.perf_counter()

        # update
        mb_inds = minibatch_inds(
            generator, args.update_epochs, args.num_minibatches, args.num_steps, args.num_envs, world
        ).to(device)
        if args.norm_adv == "batch":
            b_advantages = standardized(b_advantages, world)  # collective
        # of all epochs: one collective normalises them
        mb_advantages = [x[inds] for x, inds in zip(b_advantages, mb_inds, strict=True)]
        if args.norm_adv == "minibatch":
            mb_advantages = standardized(mb_advantages, world)  # collective
        stats = [[] for _ in shards]
        for epoch in range(args.update_epochs):
            for i in range(args.num_minibatches):
                minibatches = []
                for batch, inds, of_shard in zip(batches, mb_inds, mb_advantages, strict=True):
                    minibatches.append((*(x[inds[epoch, i]] for x in batch), of_shard[epoch, i]))
                for part, mb_stats in zip(stats, update(lr, minibatches), strict=True):  # collective
                    part.append(mb_stats)
            if args.target_kl is not None:
                epoch_sums = [loss_sums(part[-args.num_minibatches :], args.clip_coef) for part in stats]
                approx_kl = world.gather_shards([[part["approx_kl"]] for part in epoch_sums]).mean()  # collective
                if approx_kl / args.num_minibatches > args.target_kl:
                    break
        if args.norm_obs:  # last, so that ratios start at 1
            obs_moments.update([obs[:, rows] for rows in shards], world)  # collective
        sums = [part | loss_sums(x, args.clip_coef) for part, x in zip(episodes.pop(), stats, strict=True)]
        update_end = time.perf_counter()

        # auxiliary phase
        aux_stats = [[] for _ in shards]
        if args.aux_epochs:
            slot = (iteration - 1) % args.n_pi
            aux_obs[slot] = obs
            for rows, batch in zip(shards, batches, strict=True):
                aux_returns[slot, :, rows] = batch[-1].cpu().numpy().reshape(args.num_steps, -1)
        if args.aux_epochs and iteration % args.n_pi == 0:
            steps, size = args.n_pi * args.num_steps, shards[0].stop  # of the store, and environments of a shard
            store, store_returns = (x.reshape(steps, *x.shape[2:]) for x in (aux_obs, aux_returns))
            aux_batches = []
            with torch.no_grad():  # the old policy of the whole store, before the first auxiliary update
                for rows in shards:
                    parts = (
                        x.reshape(-1, *obs_space.shape) for x in np.split(store[:, rows], args.num_aux_minibatches)
                    )
                    old_pi = torch.cat([agent.policy(agent.trunk(network_input(part))) for part in parts])
                    aux_batches.append((to_tensor(store_returns[:, rows].ravel(), device), old_pi))
            aux_inds = minibatch_inds(generator, args.aux_epochs, args.num_aux_minibatches, steps, args.num_envs, world)
            for epoch_inds in aux_inds.permute(1, 2, 0, 3):
                for mb_of_shards in epoch_inds:
                    minibatches = []
                    for mb, rows, batch in zip(mb_of_shards, shards, aux_batches, strict=True):
                        mb_obs = network_input(store[mb // size, rows.start + mb % size])
                        minibatches.append((mb_obs, *(x[mb.to(device)] for x in batch)))
                    for part, mb_stats in zip(aux_stats, aux_update(aux_lr, minibatches), strict=True):
                        part.append(mb_stats)  # collective
                world.gather([])  # collective; a boundary
                if world.stop:
                    break
        for part, x in zip(sums, aux_stats, strict=True):
            losses = torch.tensor(x or [[0.0] * len(AUX_LOSSES)], dtype=torch.float64).sum(0).tolist()
            part |= dict(zip(AUX_LOSSES, losses, strict=True))
        aux_end = time.perf_counter()

        # metrics: sums and counts of all ranks, divided once
        for part, rows in zip(sums, shards, strict=True):
            residuals = advantages[:, rows].astype(np.float64)  # returns - values
            for name, x in (("residual", residuals), ("target", values[:, rows] + residuals)):
                part |= {name: x.sum(), f"{name}^2": (x**2).sum()}
        times = {"time/rollout": update_start - rollout_start, "time/update": update_end - update_start}
        if aux_stats[0]:
            times["time/aux"] = aux_end - update_end
        total = world.reduce(sums, maxima=times)  # collective
        row = episode_row(total) | {name: total[name] for name in times}
        row |= {"charts/learning_rate": learning_rate, "losses/epochs": epoch + 1}
        row |= {f"losses/{name}": total[name] / (len(stats[0]) * world.num_shards) for name in LOSSES}
        if aux_stats[0]:
            row |= {f"losses/{name}": total[name] / (len(aux_stats[0]) * world.num_shards) for name in AUX_LOSSES}
        residual_var, target_var = (total[f"{x}^2"] - total[x] ** 2 / batch_size for x in ("residual", "target"))
        if target_var > 0:
            row["losses/explained_variance"] = 1 - residual_var / target_var
        logger.log(global_step, row)

        # what happens at multiples of a period
        before = global_step - batch_size
        if crossed(args.check_sync_every, before, global_step):
            check_equal(global_step, state, world)  # collective
        if world.stop:  # a signal that some rank got, known to all since a collective
            break
        if args.eval_every and (crossed(args.eval_every, before, global_step) or iteration == num_iterations):
            row = evaluate(act, eval_envs, args.eval_episodes, world)  # collective
            if world.stop:
                break
            logger.log(global_step, row)
            if args.stop_at_return is not None and row["eval/episodic_return"] >= args.stop_at_return:
                break
        phase = args.n_pi if args.aux_epochs else 1  # checkpoints stand at the ends of phases
        whole = iteration % phase == 0 and iteration < num_iterations
        restart = whole and crossed(args.checkpoint_every, global_step - phase * batch_size, global_step)
        if restart:
            checkpoints.write(global_step)  # collective

    if args.save_model:
        logger.save(global_step, state)
    checkpoints.finish()


if __name__ == "__main__":
    launch(main, lambda: tyro.cli(Args, args=command_line(Args)))
