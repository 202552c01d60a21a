"""Deep Q-Network (Nature 518, 2015), the same experiment on any number of processes (DDP).

    python dqn_ddp.py --env-id CartPole-v1
    torchrun --nproc_per_node=2 dqn_ddp.py --env-id CartPole-v1
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 dqn_ddp.py

To use it in a project of your own, copy this file and `common/`.

A shard is a group of environments whose arithmetic is done in arrays of its own, because sums and products
round differently in arrays of another shape. `--shards N` makes N shards on any number of processes, so
that results are the same; `run.backward` does this. A sample holds what this process has of a batch.
Every process must reach the lines marked `# collective`, in the same order.

Differences from the reference (CleanRL's dqn.py; by flag double Q-learning arXiv:1509.06461, dueling
networks arXiv:1511.06581, n-step returns, and prioritised replay arXiv:1511.05952):
1. Sizes and periods are totals; `--num-envs` does not change the number of gradient steps per transition.
2. One buffer over all ranks. A batch is a stratified sample, also where it is uniform: one draw from
   each of `--batch-size` equal parts. Each rank serves the draws that fall on its transitions, and
   losses are scaled to give the mean over the batch.
3. Truncation bootstraps from the value of the last observation, termination does not (as in CleanRL).
4. Logged losses are means over all gradient steps since the last row.
5. By default 4 environments and a gradient step per 8 transitions (CleanRL: 1, and 10). The learning
   rate falls to 0; where it is constant, as in CleanRL, four CartPole seeds of ten ended below 470.
6. In `common/`: no sticky actions in Atari; n-step returns stop where an episode ends; new transitions
   get the largest priority that any rank has set; a checkpoint truncates all running episodes.
"""

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from common.arguments import Count, Fraction, Norm, Positive, Rate, RunArgs, Whole, launch
from common.encoders import image_encoder
from common.replay import Batch, ReplayBuffer
from common.run import Run, crossed, open_run


@dataclass
class Args(RunArgs):
    # environment; the flags that all scripts share are in common/arguments.py
    env_id: str = "CartPole-v1"
    """gymnasium id, ALE/..., MinAtar/..., or module:id of your own"""
    total_timesteps: Whole = 500_000
    """budget in environment transitions, all ranks; rounded down to whole vector steps"""
    num_envs: Count = 4
    """parallel environments, all ranks"""
    network: Literal["auto", "impala"] = "auto"
    """images: auto (Nature's from 36 x 36 pixels, else MinAtar's) or impala (nine times slower at 64 x 64)"""
    scale_pixels: bool = True
    """divide integer pixels by the space's largest value; Pong is learned sooner without"""
    log_every: Count = 1_000
    """write a row at each multiple of this many transitions (all ranks)"""
    life_loss: bool = True
    """Atari: a lost life ends the episode for learning (never for reported returns)"""

    # algorithm
    buffer_size: Count = 10_000
    """transitions kept, all ranks"""
    batch_size: Count = 128
    """transitions per gradient step, all ranks"""
    learning_starts: Whole = 10_000
    """transitions (all ranks) before the first gradient step"""
    train_frequency: Count = 8
    """transitions (all ranks) per gradient step"""
    learning_rate: Positive = 2.5e-4
    """Adam's learning rate"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0 over the run"""
    adam_eps: Positive = 1e-8
    """Adam's epsilon"""
    gamma: Fraction = 0.99
    """discount"""
    tau: Rate = 1.0
    """Polyak factor: target = tau * online + (1 - tau) * target; 1: a copy"""
    target_network_frequency: Count = 500
    """transitions (all ranks) between updates of the target network, at most one per gradient step"""
    start_e: Fraction = 1.0
    """probability of a random action at the start"""
    end_e: Fraction = 0.05
    """final probability of a random action"""
    exploration_fraction: Fraction = 0.5
    """part of the budget over which that probability falls linearly to its final value"""
    loss: Literal["mse", "huber"] = "mse"
    """squared or Huber loss of the TD error"""
    max_grad_norm: Norm = math.inf
    """largest gradient norm; inf: no clipping"""
    double_q: bool = False
    """choose the next action by the online network, value it by the target network"""
    dueling: bool = False
    """separate streams, of a hidden layer each, for the state's value and the actions' advantages"""
    n_step: Count = 1
    """steps of reward before the bootstrapped value, fewer where the episode ends"""
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
        smallest = self.num_envs * self.n_step
        self.require(self.buffer_size >= smallest, "buffer_size", f"at least {smallest}, --num-envs x --n-step")
        start = max(self.learning_starts, smallest) // self.num_envs * self.num_envs
        due = math.ceil((start + 1) / self.train_frequency) * self.train_frequency
        self.require_budget(math.ceil(due / self.num_envs) * self.num_envs, "a step after --learning-starts")


# ALGO LOGIC: networks


class QNetwork(nn.Module):
    """Observations (B, *shape) -> values of all actions (B, num_actions).

    Vector: layers of 120 and 84. Image: the convolutions of common/encoders.py and a layer.
    Dueling: two streams of a hidden layer each over the same features (arXiv:1511.06581 eq. 9).
    """

    def __init__(self, space: gym.spaces.Box, num_actions: int, dueling: bool, network: str, scaled: bool) -> None:
        super().__init__()
        if len(space.shape) == 3:
            self.network, num_features, width = image_encoder(space, network, scaled=scaled)
        else:
            num_features, width = 120, 84
            self.network = nn.Sequential(nn.Linear(space.shape[0], num_features), nn.ReLU())

        def stream(size: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(num_features, width), nn.ReLU(), nn.Linear(width, size))

        self.head = stream(num_actions)
        self.value_head = stream(1) if dueling else None

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        features = self.network(obs)
        q = self.head(features)
        return q if self.value_head is None else self.value_head(features) + q - q.mean(-1, keepdim=True)


# ALGO LOGIC: losses


class TDLoss(nn.Module):
    """The temporal-difference loss of one shard's rows of a batch, of which there may be none."""

    def __init__(self, q_network: QNetwork, target_network: QNetwork, args: Args, num_shards: int) -> None:
        super().__init__()
        self.q_network = q_network
        self.target_network = target_network  # without gradients
        self.double_q = args.double_q
        self.td_loss = F.smooth_l1_loss if args.loss == "huber" else F.mse_loss
        self.scale = num_shards / args.batch_size  # losses are sums, and `run.backward` gives their mean over shards

    def forward(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns this shard's share of the loss and, detached, what is logged (scalars) and the TD errors (b,)."""
        with torch.no_grad():
            next_target_q = self.target_network(batch.next_obs)
            next_q = self.q_network(batch.next_obs) if self.double_q else next_target_q
            best = next_q.argmax(1, keepdim=True)
            td_target = batch.rewards + batch.discounts * next_target_q.gather(1, best).squeeze(1)
        old_val = self.q_network(batch.obs).gather(1, batch.actions.unsqueeze(1)).squeeze(1)
        loss = (batch.weights * self.td_loss(old_val, td_target, reduction="none")).sum() * self.scale
        stats = {"td_loss": loss, "q_values": old_val.sum() * self.scale, "td_errors": old_val - td_target}
        return loss, {name: x.detach() for name, x in stats.items()}


# ALGO LOGIC: pure helpers


def linear_schedule(start: float, end: float, fraction: float) -> float:
    """From `start` at fraction 0 to `end` at 1, and `end` after."""
    return start + (end - start) * min(fraction, 1.0)


NOISE_STEPS = 64  # vector steps of exploration noise in one draw
COLUMNS = (
    "charts/epsilon",
    "losses/td_loss",
    "losses/q_values",
)


def main(args: Args) -> None:
    """Train. Opens and closes all it needs; raises `BadInput` for settings that cannot work."""
    with open_run(args, __file__, COLUMNS, (gym.spaces.Discrete,)) as run:  # collective
        train(args, run)


def train(args: Args, run: Run) -> None:
    """`run` has processes, log and files. `args.num_envs` is a total, `envs.num_envs` its part here."""
    world = run.world
    envs = run.envs
    obs_space = envs.single_observation_space
    num_actions = int(envs.single_action_space.n)
    image = len(obs_space.shape) == 3
    args.require(args.network == "auto" or image, "network", "left off for vector observations")
    whole_numbers = image and np.issubdtype(obs_space.dtype, np.integer)
    args.require(args.scale_pixels or whole_numbers, "scale_pixels", "left on, except for images of whole numbers")
    budget = args.total_timesteps // args.num_envs * args.num_envs
    local_envs = world.local_slice(args.num_envs)

    # one seed for all processes: the same networks and the same generator
    torch.manual_seed(args.seed)
    seed = int(torch.randint(2**62, ()))  # with --seed itself it would repeat the initial weights' numbers
    generator = torch.Generator().manual_seed(seed)
    q_network = QNetwork(obs_space, num_actions, args.dueling, args.network, args.scale_pixels).to(run.device)
    target_network = deepcopy(q_network).requires_grad_(False)
    parameters = list(q_network.parameters())
    target_parameters = list(target_network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, eps=args.adam_eps, fused=True)
    rb = ReplayBuffer(
        args.buffer_size,
        args.num_envs,
        world,
        obs_space,
        action_shape=(),
        action_dtype=np.int64,
        n_step=args.n_step,
        gamma=args.gamma,
        stack=envs.stack,
        alpha=args.per_alpha if args.prioritized else 0.0,
    )
    run.register(q_network=q_network, target_network=target_network, optimizer=optimizer)
    run.register(generator=generator, replay=rb)
    loss_fn = TDLoss(q_network, target_network, args, world.num_shards)
    # DDP averages gradients of calls of its own `forward`: it wraps the loss; the bare network acts
    ddp_loss = DDP(loss_fn, **world.ddp_options) if world.world_size > 1 else loss_fn  # collective
    policy = run.policy(q_network)  # by numpy for vectors

    def act(obs: np.ndarray) -> np.ndarray:
        """Greedy actions for evaluation."""
        with torch.no_grad():
            return q_network(run.upload(obs)).argmax(-1).cpu().numpy()

    run.load_or_start(act, budget, args.batch_size)  # collective
    for global_step in range(run.global_step + args.num_envs, budget + 1, args.num_envs):
        # act; every process draws the noise of all environments and keeps that of its own
        step = run.global_step // args.num_envs
        if run.needs_reset or step % NOISE_STEPS == 0:
            noise = torch.rand(NOISE_STEPS, 2, args.num_envs, generator=generator).numpy()
            random_actions = (noise[:, 1, local_envs] * num_actions).astype(np.int64)
        if run.needs_reset:  # at the beginning, and after a checkpoint
            obs = run.reset_environments()
            rb.observe(obs)
        explored = run.global_step / max(1.0, args.exploration_fraction * budget)
        epsilon = linear_schedule(args.start_e, args.end_e, explored)
        greedy = noise[step % NOISE_STEPS, 0] >= epsilon
        actions = random_actions[step % NOISE_STEPS]
        if greedy.any():  # in any process: all call `policy` equally often
            [q_values] = policy(obs)
            actions = np.where(greedy[local_envs], q_values.argmax(-1), actions)
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        learned_rewards = np.sign(rewards) if envs.atari else rewards
        rb.add(actions, learned_rewards, terminations, truncations, obs, infos)

        # the updates that fell due in this vector step; `run.global_step` is that of the step before
        updates = range(run.global_step // args.train_frequency + 1, global_step // args.train_frequency + 1)
        fraction = 1.0 - run.global_step / budget if args.anneal_lr else 1.0
        smallest = max(args.learning_starts, args.num_envs * args.n_step)
        if updates and global_step > smallest:  # the buffer holds complete transitions
            beta = linear_schedule(args.per_beta, 1.0, global_step / budget)
            for group in optimizer.param_groups:
                group["lr"] = fraction * args.learning_rate
            for k in updates:
                sample = rb.sample(args.batch_size, generator, beta)  # collective
                optimizer.zero_grad()
                stats = run.backward(ddp_loss, sample.batch, sizes=sample.sizes)  # collective: the mean gradient
                if args.max_grad_norm < math.inf:
                    nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                optimizer.step()
                rb.update_priorities(sample.indices, stats["td_errors"])
                trained = k * args.train_frequency
                if crossed(args.target_network_frequency, trained - args.train_frequency, trained):
                    with torch.no_grad():
                        torch._foreach_lerp_(target_parameters, parameters, args.tau)

        if run.row_due(global_step, args.log_every):  # collective
            row = {"charts/learning_rate": fraction * args.learning_rate, "charts/epsilon": epsilon}
            run.log(global_step, row)  # collective
        if run.evaluate_and_checkpoint(global_step):  # collective
            break


if __name__ == "__main__":
    launch(main, Args)
