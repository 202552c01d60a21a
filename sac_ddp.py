"""Soft Actor-Critic (arXiv:1812.05905) over one replay buffer of all ranks, the same at any number of processes (DDP).

    python sac_ddp.py --env-id Pendulum-v1 --total-timesteps 20000
    torchrun --nproc_per_node=2 sac_ddp.py --env-id HalfCheetah-v5
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 sac_ddp.py --num-envs 8

To use it in a project of your own, copy this file and `common/`.

Differences from the reference (CleanRL's sac_continuous_action.py; by flag prioritised replay arXiv:1511.05952):
1. Sizes and periods are global; `--train-frequency` keeps the gradient steps per transition at any `--num-envs`.
2. One buffer over all ranks, sampled by stratified points; each rank serves what it holds, and the losses are weighted
   so that DDP's mean over ranks is the mean over the batch. Noise belongs to the place in the batch.
3. Truncation bootstraps from the value of the last observation, termination does not.
4. Actor and temperature learn from the same sample, in one backward pass and so one reduction (as Stable-Baselines3).
5. The log-determinant of tanh is computed in its stable form, without an epsilon.
6. Logged losses are means over all gradient steps since the last row.
7. `--alpha` is 1.0 by default with `--no-autotune` too, where CleanRL takes 0.2.
"""

from __future__ import annotations

import math
import time
from copy import deepcopy
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from common.acting import Acting
from common.arguments import RunArgs, command_line, require, require_divisible
from common.checkpoint import Checkpoints, load_model
from common.distributed import World
from common.environments import Environments, open_environments
from common.episodes import EpisodeStatistics, episode_row, evaluate
from common.equality import check_equal
from common.graphs import graphed
from common.launch import BadInput, Fault, launch
from common.logger import Logger
from common.machine import set_threads
from common.periods import crossed
from common.ranges import Count, Fraction, Json, Period, Positive, Rate, Threads, Whole
from common.replay import ReplayBuffer
from common.shards import average_over_shards, per_shard


@dataclass
class Args(RunArgs):
    eval_every: Period = 10_000
    num_threads: Threads = 0
    """threads per rank, of torch and of EnvPool; 0: one, EnvPool's the cores divided by the local ranks"""

    # flags of where and how it runs are RunArgs' (common/arguments.py); environment
    env_id: str = "Pendulum-v1"
    """gymnasium id, envpool/..., or module:id of your own"""
    env_kwargs: Json = "{}"
    """JSON of options for the simulator, such as '{"forward_reward_weight": 2.0}'"""
    total_timesteps: Whole = 1_000_000
    """budget in environment transitions, all ranks; the whole vector steps that fit are run"""
    num_envs: Count = 4
    """parallel environments, all ranks"""
    log_every: Count = 1_000
    """write a row at each multiple of so many transitions (all ranks)"""

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
    """how far the target critics move to the others at each update; 1: a copy"""
    target_network_frequency: Count = 1
    """transitions (all ranks) between updates of the target critics, at most one per gradient step"""
    policy_frequency: Count = 2
    """gradient steps of the critics from one update of the actor to the next, which then makes up for as many"""
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
        require_divisible("--buffer-size", self.buffer_size, self.num_envs, "--num-envs")
        fits = self.batch_size <= self.buffer_size
        require(fits, "--batch-size", self.batch_size, f"at most --buffer-size ({self.buffer_size})")
        start = max(self.learning_starts, self.num_envs) // self.num_envs * self.num_envs
        period = self.train_frequency * self.policy_frequency
        first = -(-(start // period + 1) * period // self.num_envs) * self.num_envs
        needed = f"at least {first}, which has an update of the actor (--learning-starts {self.learning_starts})"
        self.require_budget(first, needed)


# ALGO LOGIC: networks

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


def mlp(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """Layers of 256 and 256."""
    hidden = nn.Linear(num_inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(256, num_outputs))


class Actor(nn.Module):
    """Observations (B, size) -> a normal distribution, squashed by tanh and scaled to the action space's bounds.

    An action is `bias + scale * tanh(u)`, with u normal; `scale` and `bias` are (d,).
    """

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.spaces.Box, device: torch.device) -> None:
        super().__init__()
        low, high = action_space.low.astype(np.float64).ravel(), action_space.high.astype(np.float64).ravel()
        self.layers = mlp(obs_space.shape[0], 2 * len(low)).to(device)  # means and squashed log standard deviations
        options = {"dtype": torch.get_default_dtype(), "device": device}
        self.scale = torch.tensor((high - low) / 2, **options)  # not buffers: those DDP would broadcast at each step
        self.bias = torch.tensor((high + low) / 2, **options)

    def forward(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """obs (B, size), normal noise (B, d) -> actions (B, d) and their log-probabilities (B,)."""
        mean, log_std = self.layers(obs.to(noise.dtype)).chunk(2, -1)
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std.tanh() + 1)
        u = mean + log_std.exp() * noise
        log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        log_det = 2 * (math.log(2) - u - F.softplus(-2 * u)) + self.scale.log()  # log(1 - tanh(u)^2), stable
        return self.bias + self.scale * u.tanh(), (log_prob - log_det).sum(-1)


class Critics(nn.Module):
    """Observations (B, size) and actions (B, d) -> the values of both critics, (2, B).

    The weights of both are stacked, (2, in, out): not for speed, but because the recorded curves are of these bits.
    """

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.spaces.Box) -> None:
        super().__init__()
        twins = [mlp(obs_space.shape[0] + math.prod(action_space.shape), 1) for _ in range(2)]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.activations = []  # what stands in each layer's place: None is the next of the stacked ones
        for pair in zip(*twins, strict=True):
            if isinstance(pair[0], nn.Linear):
                self.weights.append(torch.stack([layer.weight.T for layer in pair]))
                self.biases.append(torch.stack([layer.bias[None] for layer in pair]))
            elif list(pair[0].parameters()):
                raise Fault(f"Critics stacks Linear layers and takes others without parameters, not {pair[0]}.")
            self.activations.append(None if isinstance(pair[0], nn.Linear) else pair[0])

    def forward(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        x = torch.cat([obs.to(actions.dtype), actions], -1).expand(2, -1, -1)
        stacked = zip(self.weights, self.biases, strict=True)
        for activation in self.activations:
            if activation is None:
                weight, bias = next(stacked)
                x = torch.baddbmm(bias, x, weight)
            else:
                x = activation(x)
        return x.squeeze(-1)


# ALGO LOGIC: losses


class CriticLoss(nn.Module):
    """The temporal-difference losses of this rank's part of a batch; `forward` is what DDP reduces."""

    def __init__(self, critics: Critics, scale: float) -> None:
        super().__init__()
        self.critics = critics
        self.scale = scale  # world_size / batch_size: then the mean over ranks is the mean over the batch

    def forward(
        self,
        obs: torch.Tensor,  # (b, size)
        actions: torch.Tensor,  # (b, d)
        td_target: torch.Tensor,  # (b,)
        weights: torch.Tensor,  # (b,)
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Returns this rank's share of the loss and, detached, its parts (2,), the TD errors (b,) and values (2, b)."""
        qf = self.critics(obs, actions)
        delta = qf - td_target
        qf_losses = (weights * delta**2).sum(1) * self.scale
        return qf_losses.sum(), (qf_losses.detach(), delta.detach().abs().mean(0), qf.detach())


class ActorLoss(nn.Module):
    """The losses of actor and temperature on this rank's part of a batch; `forward` is what DDP reduces.

    `critics` are read with their parameters frozen, and are not part of this module.
    """

    def __init__(self, actor: Actor, log_alpha: nn.Parameter, critics: Critics, scale: float) -> None:
        super().__init__()
        self.actor, self.log_alpha, self.frozen = actor, log_alpha, (critics,)  # a tuple's modules are not registered
        self.scale = scale  # world_size / batch_size
        self.target_entropy = -len(actor.scale)

    def forward(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """obs (b, size), noise (b, d) -> this rank's share of the loss and, detached, its two parts."""
        actions, log_prob = self.actor(obs, noise)
        min_qf = torch.minimum(*self.frozen[0](obs, actions))
        actor_loss = (self.log_alpha.detach().exp() * log_prob - min_qf).sum() * self.scale
        alpha_loss = -(self.log_alpha.exp() * (log_prob.detach() + self.target_entropy)).sum() * self.scale
        return actor_loss + alpha_loss, (actor_loss.detach(), alpha_loss.detach())


# ALGO LOGIC: pure helpers


def linear_schedule(start: float, end: float, fraction: float) -> float:
    """From `start` at fraction 0 to `end` at 1, and `end` after."""
    return start + (end - start) * min(fraction, 1.0)


def compute_td_target(
    rewards: torch.Tensor,  # (b,), and so all below but the temperature
    discounts: torch.Tensor,
    min_qf_next_target: torch.Tensor,
    next_logprob: torch.Tensor,
    alpha: torch.Tensor,
) -> torch.Tensor:
    """The reward and the discounted soft value of what follows (arXiv:1812.05905 eq. 3): targets (b,)."""
    return rewards + discounts * (min_qf_next_target - alpha * next_logprob)


CRITIC_LOSSES = ("qf1_loss", "qf2_loss", "qf1_values", "qf2_values")
ACTOR_LOSSES = ("actor_loss", "alpha_loss")
BOUNDARY = 500  # transitions (all ranks) after which a stop request is heard, however seldom rows are written
COLUMNS = (
    *("charts/episodic_return", "charts/episodic_length", "charts/episodes", "charts/learning_rate"),
    *("eval/episodic_return", "eval/episodic_length", "eval/episodes"),
    *(f"losses/{name}" for name in ("qf_loss", *CRITIC_LOSSES, *ACTOR_LOSSES, "alpha")),
    *("time/wall", "time/SPS", "time/rollout", "time/update", "time/eval"),
)


def main(args: Args) -> None:
    """Train. Opens and closes all it needs; raises `BadInput`, before it learns, for settings that cannot work."""
    world = World(args.cuda, args.shards)
    with open_environments(args, world, (gym.spaces.Box,)) as (envs, eval_envs):
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        if len(obs_space.shape) != 1:
            raise BadInput(f"--env-id {args.env_id}: has image observations; this script needs vectors.")
        low, high = action_space.low, action_space.high
        if not ((low < high) & (low >= -1e6) & (high <= 1e6)).all():  # beyond, float32 overflows in the losses
            needed = "must have distinct bounds, within -1e6 and 1e6 (gymnasium.wrappers.TransformAction gives such)"
            raise BadInput(f"--env-id {args.env_id}: action space {' '.join(str(action_space).split())} {needed}.")
        sizes, alpha = (args.buffer_size, args.num_envs), args.per_alpha if args.prioritized else 0.0
        d, np_dtype = math.prod(action_space.shape), torch.empty(0).numpy().dtype
        rb = ReplayBuffer(*sizes, world, obs_space, (d,), np_dtype, gamma=args.gamma, alpha=alpha)
        set_threads(args.num_threads, False, world)
        with Logger(args, __file__, COLUMNS, world, eval_envs) as logger, world.process_group(args.timeout):
            train(args, world, envs, eval_envs, rb, logger)


def train(
    args: Args, world: World, envs: Environments, eval_envs: Environments | None, rb: ReplayBuffer, logger: Logger
) -> None:
    """The training loop. A function of its own, so that the DDP modules are gone before the process group is."""
    device = world.device
    local_envs, shards = world.here(args.num_envs), envs.shards  # which of all are here; without --shards, one shard
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    d, budget = math.prod(action_space.shape), args.total_timesteps // args.num_envs * args.num_envs

    # the same networks and the same generator on all ranks
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))  # not the stream of the networks
    actor, critics = Actor(obs_space, action_space, device), Critics(obs_space, action_space).to(device)
    critics_target, critics_frozen = (deepcopy(critics).requires_grad_(False) for _ in range(2))
    parameters, target_parameters = list(critics.parameters()), list(critics_target.parameters())
    for frozen, parameter in zip(critics_frozen.parameters(), parameters, strict=True):
        frozen.data = parameter.data  # the same memory, without a gradient: what the actor learns from
    log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha), device=device), requires_grad=args.autotune)
    q_optimizer = torch.optim.Adam(parameters, lr=args.q_lr, fused=True)
    groups = [{"params": actor.parameters(), "lr": args.policy_lr}, {"params": [log_alpha], "lr": args.q_lr}]
    actor_optimizer = torch.optim.Adam(groups[: 1 + args.autotune], fused=True)
    scale = world.num_shards / args.batch_size
    critic_loss_fn, actor_loss_fn = CriticLoss(critics, scale), ActorLoss(actor, log_alpha, critics_frozen, scale)
    # DDP: hooks `forward` and nothing else, so it wraps the losses; acting and targets use the bare networks
    options = {"gradient_as_bucket_view": True, "static_graph": True}
    ddp_critic_loss = DDP(critic_loss_fn, **options) if world.wraps else critic_loss_fn  # collective
    ddp_actor_loss = DDP(actor_loss_fn, **options) if world.wraps else actor_loss_fn  # collective
    average_over_shards(ddp_critic_loss, world)  # with --shards; without, DDP's own mean over processes
    average_over_shards(ddp_actor_loss, world)
    critics_target.load_state_dict(critics.state_dict())  # after DDP has made all ranks' parameters rank 0's
    # equal on all ranks at all times: checked, and saved (in model.pt but optimisers and generators)
    state = {"actor": actor, "critics": critics, "critics_target": critics_target, "log_alpha": log_alpha}
    state |= {"q_optimizer": q_optimizer, "actor_optimizer": actor_optimizer, "generator": generator}

    # sums since the last row; small tensors kept until then would fragment the heap by a batch's memory each
    critic_sums = torch.zeros(len(shards), len(CRITIC_LOSSES), dtype=torch.float64, device=device)
    actor_sums = torch.zeros(len(shards), len(ACTOR_LOSSES), dtype=torch.float64, device=device)

    def critic_update(batches: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        """A gradient step on each shard's part of a batch (`Batch.tensors`) with noise -> their TD errors (b,)."""
        td_errors, alpha = [], log_alpha.detach().exp()
        for shard, (obs, actions, rewards, discounts, next_obs, weights, noise) in enumerate(batches):
            with torch.no_grad():
                next_actions, next_logprob = actor(next_obs, noise)
                min_qf_next = torch.minimum(*critics_target(next_obs, next_actions))
                td_target = compute_td_target(rewards, discounts, min_qf_next, next_logprob, alpha)
            loss, (qf_losses, errors, qf) = ddp_critic_loss(obs, actions, td_target, weights)
            q_optimizer.zero_grad()
            loss.backward()  # collective
            critic_sums[shard] += torch.cat([qf_losses, scale * qf.sum(1)])
            td_errors.append(errors)
        q_optimizer.step()
        return td_errors

    def actor_update(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """A gradient step of actor and temperature on each shard's observations and noise."""
        for shard, (obs, noise) in enumerate(batches):
            loss, parts = ddp_actor_loss(obs, noise)
            actor_optimizer.zero_grad()
            loss.backward()  # collective
            actor_sums[shard] += torch.stack(parts)
        actor_optimizer.step()

    critic_update = graphed(args.cuda_graphs, world, critic_update, q_optimizer)
    actor_update = graphed(args.cuda_graphs, world, actor_update, actor_optimizer)

    acting = Acting(actor, device, logger.note)

    def as_taken(actions: np.ndarray) -> np.ndarray:
        """Actions (n, d) as the environments take them."""
        cast = actions.reshape(-1, *action_space.shape).astype(action_space.dtype)
        return cast.clip(action_space.low, action_space.high)

    def act(obs: np.ndarray) -> np.ndarray:
        """The actions of the means, for evaluation."""
        return as_taken(policy(obs, np.zeros((len(obs), d), ones.dtype)))

    checkpoints, restart = Checkpoints(args, world, logger, state, rb), True  # collective
    load_model(args, world, state, checkpoints)  # collective
    ones = np.ones((envs.num_envs, d), torch.empty(0).numpy().dtype)
    logger.start(f"{budget} transitions by {args.num_envs} environments on {world.world_size} process(es), {device}")
    critic_updates, actor_updates, update_time, row_start = 0, 0, 0.0, time.perf_counter()

    for global_step in range(checkpoints.global_step + args.num_envs, max(budget, args.num_envs) + 1, args.num_envs):
        before = global_step - args.num_envs
        if restart:  # at the start, and after each checkpoint
            obs, episodes = envs.start(checkpoints.number), EpisodeStatistics(shards)
            rb.start(obs)
            policy = acting.refresh(obs, ones)
            if args.eval_every and not checkpoints.number:  # before anything is learned
                row = evaluate(act, eval_envs, args.eval_episodes, world)  # collective
                if not world.stop:
                    logger.log(0, row)
                row_start = time.perf_counter()
            if not budget:  # --total-timesteps 0
                return

        # collect: all environments' noise is drawn on every rank, each takes its own
        if before < args.learning_starts:
            uniform = torch.rand(args.num_envs, d, generator=generator)[local_envs].to(device)
            actions = (actor.bias + actor.scale * (2 * uniform - 1)).cpu().numpy()
        else:
            noise = torch.randn(args.num_envs, d, generator=generator)[local_envs].numpy()
            actions = per_shard(policy, shards, world)(obs, noise)
        obs, rewards, terminations, truncations, infos = envs.step(as_taken(actions))
        ended = episodes.step(rewards, terminations | truncations, infos)
        rb.add(actions, rewards, terminations, truncations, obs, infos, ended)

        # update
        update_start = time.perf_counter()
        if global_step > max(args.learning_starts, args.num_envs):  # something can be sampled
            beta = linear_schedule(args.per_beta, 1.0, global_step / budget)
            updates = range(before // args.train_frequency + 1, global_step // args.train_frequency + 1)
            for k in updates:
                batches = rb.sample(args.batch_size, generator, device, beta)  # collective
                noise = torch.randn(args.batch_size, d, generator=generator)
                errors = critic_update([(*x.tensors, noise[x.places].to(device)) for x in batches])  # collective
                for batch, td_errors in zip(batches, errors, strict=True):
                    if args.prioritized:
                        rb.update_priorities(batch.indices, td_errors)
                critic_updates += 1
                if k % args.policy_frequency == 0:
                    for _ in range(args.policy_frequency):  # makes up for the delay
                        noise = torch.randn(args.batch_size, d, generator=generator)
                        actor_update([(x.obs, noise[x.places].to(device)) for x in batches])  # collective
                        actor_updates += 1
                if crossed(args.target_network_frequency, (k - 1) * args.train_frequency, k * args.train_frequency):
                    with torch.no_grad():
                        torch._foreach_lerp_(target_parameters, parameters, args.tau)
            if updates:
                acting.copy_parameters()
        update_time += time.perf_counter() - update_start
        if crossed(BOUNDARY, before, global_step):
            world.gather([])  # collective: stop requests, and a sign of life
            policy = acting.refresh(obs, ones)

        # metrics: sums and counts of all ranks, divided once
        last = global_step == budget or world.stop
        restart = not last and crossed(args.checkpoint_every, before, global_step)
        if crossed(args.log_every, before, global_step) or restart or last:
            losses, names = torch.cat([critic_sums, actor_sums], 1).tolist(), (*CRITIC_LOSSES, *ACTOR_LOSSES)
            sums = [part | dict(zip(names, x, strict=True)) for part, x in zip(episodes.pop(), losses, strict=True)]
            times = {"time/rollout": time.perf_counter() - row_start - update_time, "time/update": update_time}
            total = world.reduce(sums, maxima=times)  # collective
            row = episode_row(total) | {name: total[name] for name in times} | {"charts/learning_rate": args.policy_lr}
            for names, updates in ((CRITIC_LOSSES, critic_updates), (ACTOR_LOSSES[: 1 + args.autotune], actor_updates)):
                row |= {f"losses/{name}": total[name] / updates / world.num_shards for name in names if updates}
            if critic_updates:
                row["losses/qf_loss"] = (row["losses/qf1_loss"] + row["losses/qf2_loss"]) / 2
            row["losses/alpha"] = log_alpha.exp().item()
            logger.log(global_step, row)
            critic_sums.zero_()
            actor_sums.zero_()
            critic_updates, actor_updates, update_time, row_start = 0, 0, 0.0, time.perf_counter()
            if world.stop:
                break

        # what happens at multiples of a period
        if crossed(args.check_sync_every, before, global_step):
            check_equal(global_step, state, world)  # collective
        if args.eval_every and (crossed(args.eval_every, before, global_step) or last):
            row = evaluate(act, eval_envs, args.eval_episodes, world)  # collective
            if world.stop:
                break
            logger.log(global_step, row)
            row_start += row["time/eval"]  # evaluation is not rollout
            if args.stop_at_return is not None and row["eval/episodic_return"] >= args.stop_at_return:
                break
        if restart:
            rb.cut(obs)  # collective
            checkpoints.write(global_step)  # collective
            row_start = time.perf_counter()

    if args.save_model:
        logger.save(global_step, state | {"action_scale": actor.scale, "action_bias": actor.bias})
    checkpoints.finish()


if __name__ == "__main__":
    launch(main, lambda: tyro.cli(Args, args=command_line(Args)))
