"""Soft Actor-Critic (arXiv:1812.05905), the same experiment on any number of processes (DDP).

    python sac_ddp.py --env-id Pendulum-v1 --total-timesteps 20000
    torchrun --nproc_per_node=2 sac_ddp.py --env-id HalfCheetah-v5
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 sac_ddp.py

To use it in a project of your own, copy this file and `common/`.

A shard is a group of environments whose arithmetic is done in arrays of its own, because sums and products
round differently in arrays of another shape. `--shards N` makes N shards on any number of processes, so
that results are the same; `run.backward` does this. A sample holds what this process has of a batch.
Every process must reach the lines marked `# collective`, in the same order.

Differences from the reference (CleanRL's sac_continuous_action.py; by flag prioritised replay
arXiv:1511.05952):
1. Sizes and periods are totals; `--num-envs` does not change the number of gradient steps per transition.
2. One buffer over all ranks. A batch is a stratified sample, also where it is uniform: one draw from
   each of `--batch-size` equal parts. Each rank serves the draws that fall on its transitions, and
   losses are scaled to give the mean over the batch. Transition i of the batch gets the same noise,
   whichever rank serves it.
3. Truncation bootstraps from the value of the last observation, termination does not (as in CleanRL).
4. Actor and temperature learn from the same sample (as in Stable-Baselines3), here in one backward
   pass.
5. The log-determinant of tanh is computed in its stable form, without an epsilon.
6. Logged losses are means over all gradient steps since the last row.
7. `--alpha` is 1.0 by default with `--no-autotune` too, where CleanRL takes 0.2.
8. By default 4 environments, where CleanRL takes 1, so that 4 gradient steps follow each vector step.
9. Actions, their log-probabilities and so the temperature are in units of [-1, 1], whatever the bounds are
   (as in Stable-Baselines3 and the authors' code); CleanRL's are in the environment's units.
10. In `common/`: new transitions get the largest priority that any rank has set; a checkpoint truncates
   all running episodes.
"""

import math
from copy import deepcopy
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from common.arguments import Count, Fraction, Positive, Rate, RunArgs, Whole, launch
from common.replay import Batch, ReplayBuffer
from common.run import Run, crossed, open_run
from common.tensors import default_float


@dataclass
class Args(RunArgs):
    eval_every: Whole = 10_000

    # environment; the flags that all scripts share are in common/arguments.py
    env_id: str = "Pendulum-v1"
    """gymnasium id, or module:id of your own"""
    total_timesteps: Whole = 1_000_000
    """budget in environment transitions, all ranks; rounded down to whole vector steps"""
    num_envs: Count = 4
    """parallel environments, all ranks"""
    log_every: Count = 1_000
    """write a row at each multiple of this many transitions (all ranks)"""

    # algorithm
    buffer_size: Count = 1_000_000
    """transitions kept, all ranks"""
    batch_size: Count = 256
    """transitions per gradient step, all ranks"""
    learning_starts: Whole = 5_000
    """transitions (all ranks) of uniform actions before the first gradient step"""
    train_frequency: Count = 1
    """transitions (all ranks) per gradient step"""
    policy_lr: Positive = 3e-4
    """Adam's learning rate of the actor"""
    q_lr: Positive = 1e-3
    """Adam's learning rate of the critics and of the temperature"""
    gamma: Fraction = 0.99
    """discount"""
    tau: Rate = 0.005
    """Polyak factor: target = tau * critics + (1 - tau) * target; 1: a copy"""
    target_network_frequency: Count = 1
    """transitions (all ranks) between updates of the target critics, at most one per gradient step"""
    policy_frequency: Count = 2
    """update the actor every N critic updates, N times"""
    autotune: bool = True
    """learn the temperature, for a mean entropy of minus the number of action dimensions"""
    alpha: Positive = 1.0
    """temperature, the weight of the entropy; at the start, where it is learned"""
    prioritized: bool = False
    """sample by the TD error's size to the power of --per-alpha, over all ranks"""
    per_alpha: Fraction = 0.6
    """0: uniform; 1: in proportion to the TD error"""
    per_beta: Fraction = 0.4
    """exponent of the importance weights at the start; it rises linearly to 1 at the end of the budget"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_multiple("buffer_size", self.num_envs, "--num-envs")
        self.require(self.batch_size <= self.buffer_size, "batch_size", f"at most --buffer-size ({self.buffer_size})")
        start = max(self.learning_starts, self.num_envs) // self.num_envs * self.num_envs
        period = self.train_frequency * self.policy_frequency
        due = math.ceil((start + 1) / period) * period
        self.require_budget(math.ceil(due / self.num_envs) * self.num_envs, "the actor's step after --learning-starts")


# ALGO LOGIC: networks

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """Layers of 256 and 256."""
    hidden = nn.Linear(num_inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(256, num_outputs))


class Actor(nn.Module):
    """Observations (B, size) -> actions of a normal distribution, squashed by tanh."""

    def __init__(self, obs_space: gym.spaces.Box, action_size: int) -> None:
        super().__init__()
        self.layers = mlp(obs_space.shape[0], 2 * action_size)  # means and squashed log standard deviations

    def forward(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """obs (B, size), normal noise (B, d) -> actions (B, d) and their log-probabilities (B,)."""
        mean, log_std = self.layers(obs.to(noise.dtype)).chunk(2, -1)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std.tanh() + 1)
        u = mean + log_std.exp() * noise
        log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        log_det = 2 * (math.log(2) - u - F.softplus(-2 * u))  # log(1 - tanh(u)^2), stable
        return u.tanh(), (log_prob - log_det).sum(-1)


class Critics(nn.Module):
    """Two networks, qf1 and qf2: observations (B, size) and actions (B, d) -> the values of both, (2, B)."""

    def __init__(self, obs_space: gym.spaces.Box, action_size: int) -> None:
        super().__init__()
        size = obs_space.shape[0] + action_size
        self.qf1, self.qf2 = mlp(size, 1), mlp(size, 1)

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        x = torch.cat([obs.to(actions.dtype), actions], -1)
        return torch.stack([self.qf1(x), self.qf2(x)]).squeeze(-1)


# ALGO LOGIC: losses


class CriticLoss(nn.Module):
    """The temporal-difference losses of one shard's rows of a batch, of which there may be none."""

    def __init__(
        self, critics: Critics, critics_target: Critics, actor: Actor, log_alpha: nn.Parameter, scale: float
    ) -> None:
        super().__init__()
        self.critics = critics
        self.critics_target = critics_target  # without gradients
        self.next_policy = (actor, log_alpha)  # in a tuple, so that these are none of the loss's parameters
        self.scale = scale  # num_shards / batch_size

    def forward(self, batch: Batch, next_noise: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns this shard's share of the loss and, detached, what is logged (scalars) and the TD errors (b,).

        `next_noise` (b, d): of the actions that follow.
        """
        with torch.no_grad():
            actor, log_alpha = self.next_policy
            next_actions, next_logprob = actor(batch.next_obs, next_noise)
            min_qf_next = torch.minimum(*self.critics_target(batch.next_obs, next_actions))
            alpha = log_alpha.exp()
            soft_value = min_qf_next - alpha * next_logprob  # arXiv:1812.05905 eq. 3
            td_target = batch.rewards + batch.discounts * soft_value
        qf = self.critics(batch.obs, batch.actions)  # (2, b)
        delta = qf - td_target
        qf_losses = (batch.weights * delta**2).sum(1) * self.scale
        qf1_loss, qf2_loss = qf_losses
        qf1_values, qf2_values = qf.sum(1) * self.scale
        stats = {"qf1_loss": qf1_loss, "qf2_loss": qf2_loss, "td_errors": delta.abs().mean(0)}
        stats["qf_loss"] = (qf1_loss + qf2_loss) / 2
        stats |= {"qf1_values": qf1_values, "qf2_values": qf2_values}
        return qf_losses.sum(), {name: x.detach() for name, x in stats.items()}


class ActorLoss(nn.Module):
    """The losses of actor and temperature on one shard's rows of a batch."""

    def __init__(self, actor: Actor, log_alpha: nn.Parameter, critics: Critics, scale: float) -> None:
        super().__init__()
        self.actor = actor
        self.log_alpha = log_alpha
        self.critics = critics  # without gradients
        self.scale = scale  # num_shards / batch_size

    def forward(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """obs (b, size), noise (b, d) -> this shard's share of the loss and, detached, its parts."""
        actions, log_prob = self.actor(obs, noise)
        min_qf = torch.minimum(*self.critics(obs, actions))
        actor_loss = (self.log_alpha.detach().exp() * log_prob - min_qf).sum() * self.scale
        target_entropy = -noise.shape[-1]  # of actions in units of [-1, 1]
        alpha_loss = -(self.log_alpha.exp() * (log_prob.detach() + target_entropy)).sum() * self.scale
        stats = {"actor_loss": actor_loss.detach()}
        if self.log_alpha.requires_grad:
            stats["alpha_loss"] = alpha_loss.detach()
        return actor_loss + alpha_loss, stats


COLUMNS = (
    "losses/qf_loss",
    "losses/qf1_loss",
    "losses/qf2_loss",
    "losses/qf1_values",
    "losses/qf2_values",
    "losses/actor_loss",
    "losses/alpha_loss",
    "losses/alpha",
)


def main(args: Args) -> None:
    """Train. Opens and closes all it needs; raises `BadInput` for settings that cannot work."""
    with open_run(args, __file__, COLUMNS, (gym.spaces.Box,)) as run:  # collective
        train(args, run)


def train(args: Args, run: Run) -> None:
    """`run` has processes, log and files. `args.num_envs` is a total, `envs.num_envs` its part here."""
    world = run.world
    envs = run.envs
    obs_space = envs.single_observation_space
    action_space = envs.single_action_space  # in units of [-1, 1] where its own has bounds
    args.require(len(obs_space.shape) == 1, "env_id", "an environment with vector observations, not images")
    bounded = (action_space.low == -1).all() and (action_space.high == 1).all()
    args.require(bounded, "env_id", "an environment whose actions have finite bounds")
    action_size = math.prod(action_space.shape)
    budget = args.total_timesteps // args.num_envs * args.num_envs
    local_envs = world.local_slice(args.num_envs)

    # one seed for all processes: the same networks and the same generator
    torch.manual_seed(args.seed)
    seed = int(torch.randint(2**62, ()))  # with --seed itself it would repeat the initial weights' numbers
    generator = torch.Generator().manual_seed(seed)
    actor = Actor(obs_space, action_size).to(run.device)
    critics = Critics(obs_space, action_size).to(run.device)
    critics_target = deepcopy(critics).requires_grad_(False)
    critics_frozen = deepcopy(critics).requires_grad_(False)
    parameters = list(critics.parameters())
    target_parameters = list(critics_target.parameters())
    for frozen, parameter in zip(critics_frozen.parameters(), parameters, strict=True):
        frozen.data = parameter.data  # the same memory, without gradients: for the actor's loss
    log_alpha = torch.tensor(math.log(args.alpha), device=run.device)
    log_alpha = nn.Parameter(log_alpha, requires_grad=args.autotune)
    q_optimizer = torch.optim.Adam(parameters, lr=args.q_lr, fused=True)
    groups = [{"params": actor.parameters(), "lr": args.policy_lr}]
    if args.autotune:
        groups.append({"params": [log_alpha], "lr": args.q_lr})
    actor_optimizer = torch.optim.Adam(groups, fused=True)
    rb = ReplayBuffer(
        args.buffer_size,
        args.num_envs,
        world,
        obs_space,
        action_shape=(action_size,),
        action_dtype=default_float(),
        gamma=args.gamma,
        alpha=args.per_alpha if args.prioritized else 0.0,
    )
    run.register(actor=actor, critics=critics, critics_target=critics_target, log_alpha=log_alpha)
    run.register(q_optimizer=q_optimizer, actor_optimizer=actor_optimizer, generator=generator, replay=rb)
    scale = world.num_shards / args.batch_size  # losses are sums, and `run.backward` gives their mean over shards
    critic_loss_fn = CriticLoss(critics, critics_target, actor, log_alpha, scale)
    actor_loss_fn = ActorLoss(actor, log_alpha, critics_frozen, scale)
    # DDP averages gradients of calls of its own `forward`: it wraps the losses; the bare actor acts
    ddp_critic_loss = DDP(critic_loss_fn, **world.ddp_options) if world.world_size > 1 else critic_loss_fn  # collective
    ddp_actor_loss = DDP(actor_loss_fn, **world.ddp_options) if world.world_size > 1 else actor_loss_fn  # collective

    def draw_noise(positions: slice) -> torch.Tensor:
        """Normal noise for the whole batch, drawn on every process, which takes that of its places."""
        return torch.randn(args.batch_size, action_size, generator=generator)[positions].to(run.device)

    def act(obs: np.ndarray) -> np.ndarray:
        """The actions of the means, for evaluation."""
        with torch.no_grad():
            obs = run.upload(obs)
            return actor(obs, obs.new_zeros(len(obs), action_size))[0].cpu().numpy()

    run.load_or_start(act, budget, args.batch_size)  # collective
    for global_step in range(run.global_step + args.num_envs, budget + 1, args.num_envs):
        # act; every process draws the noise of all environments and keeps that of its own
        if run.needs_reset:  # at the beginning, and after a checkpoint
            obs = run.reset_environments()
            rb.observe(obs)
        uniform = run.global_step < args.learning_starts
        draw = torch.rand if uniform else torch.randn
        noise = draw(args.num_envs, action_size, generator=generator)[local_envs].to(run.device)
        if uniform:
            actions = 2 * noise - 1
        else:
            [actions], _ = run.by_shard(actor, run.upload(obs)[None], noise[None])
        actions = actions.cpu().numpy()
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        rb.add(actions, rewards, terminations, truncations, obs, infos)

        # the updates that fell due in this vector step; `run.global_step` is that of the step before
        updates = range(run.global_step // args.train_frequency + 1, global_step // args.train_frequency + 1)
        if updates and global_step > max(args.learning_starts, args.num_envs):  # the buffer holds complete transitions
            beta = args.per_beta + (1.0 - args.per_beta) * (global_step / budget)
            for k in updates:
                sample = rb.sample(args.batch_size, generator, beta)  # collective
                noise = draw_noise(sample.positions)
                q_optimizer.zero_grad()
                stats = run.backward(ddp_critic_loss, sample.batch, noise, sizes=sample.sizes)  # collective
                q_optimizer.step()
                rb.update_priorities(sample.indices, stats["td_errors"])
                if k % args.policy_frequency == 0:
                    for _ in range(args.policy_frequency):  # makes up for the delay
                        noise = draw_noise(sample.positions)
                        actor_optimizer.zero_grad()
                        run.backward(ddp_actor_loss, sample.batch.obs, noise, sizes=sample.sizes)  # collective
                        actor_optimizer.step()
                trained = k * args.train_frequency
                if crossed(args.target_network_frequency, trained - args.train_frequency, trained):
                    with torch.no_grad():
                        torch._foreach_lerp_(target_parameters, parameters, args.tau)

        if run.row_due(global_step, args.log_every):  # collective
            row = {"charts/learning_rate": args.policy_lr, "losses/alpha": log_alpha.exp().item()}
            run.log(global_step, row)  # collective
        if run.evaluate_and_checkpoint(global_step):  # collective
            break


if __name__ == "__main__":
    launch(main, Args)
