"""Deep Q-Network (Nature 518, 2015) over one replay buffer of all ranks, the same at any number of processes (DDP).

    python dqn_ddp.py --env-id CartPole-v1
    torchrun --nproc_per_node=2 dqn_ddp.py --env-id CartPole-v1
    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 dqn_ddp.py --num-envs 8

To use it in a project of your own, copy this file and
    common/acting.py common/arguments.py common/distributed.py common/environments.py common/evaluation.py
    common/logger.py common/replay.py

Differences from the reference (CleanRL's dqn.py; by flag double Q-learning arXiv:1509.06461, dueling networks
arXiv:1511.06581, n-step returns, and prioritised replay arXiv:1511.05952):
1. Sizes and periods are global; `--train-frequency` keeps the gradient steps per transition at any `--num-envs`.
2. One buffer over all ranks, sampled by stratified points; each rank serves what it holds, and the loss is weighted so
   that DDP's mean over ranks is the mean over the batch.
3. Truncation bootstraps from the value of the last observation, termination does not.
4. Logged losses are means over all gradient steps since the last row.
5. By default 4 environments and a gradient step per 8 transitions, where CleanRL takes 1 and one per 10.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from common.acting import checked, numpy_layers
from common.arguments import command_line, crossed, flag, require, require_divisible
from common.distributed import Diverged, World, launch
from common.environments import EVALUATION, TRAINING, Environments, EpisodeStatistics, close, is_native_atari, make_envs
from common.evaluation import evaluate, evaluation_here
from common.logger import Logger
from common.replay import ReplayBuffer


@dataclass
class Args:
    # run
    seed: int = 1
    """seed of everything random, from 0 to 2**32 - 1"""
    total_timesteps: int = 500_000
    """budget in environment transitions, all ranks; the whole vector steps that fit are run"""
    run_dir: str | None = None
    """where config.json and metrics.csv go (default: runs/{env_id}__{script}__{seed}__{time})"""
    track: bool = False
    """log to Weights & Biases too (offline with WANDB_MODE=offline)"""
    wandb_project_name: str = "lockstep"
    """wandb's project"""
    wandb_entity: str | None = None
    """wandb's user or team"""
    cuda: bool = True
    """use GPUs where there are any"""
    num_threads: int = 0
    """threads per rank, of torch and of Atari; 0: one, or for large images the cores divided by the local ranks"""
    eval_every: int = 50_000
    """evaluate at each multiple of so many transitions (all ranks), and at the end; 0: never"""
    eval_episodes: int = 20
    """episodes per evaluation, shared among the ranks; one of 27,000 steps counts as it stands"""
    stop_at_return: float | None = None
    """end the run once an evaluation reaches this mean return"""
    save_model: bool = False
    """write model.pt at the end"""
    log_every: int = 1_000
    """write a row at each multiple of so many transitions (all ranks)"""
    check_sync_every: int = 100_000
    """check at each multiple of so many transitions (all ranks) that the ranks hold equal bits; 0: never"""
    timeout: float = 600.0
    """seconds without a boundary (500 transitions, 100 steps of an evaluation); then ranks print stacks and end"""

    # environment
    env_id: str = "CartPole-v1"
    """gymnasium id, ALE/..., MinAtar/..., or module:id of your own"""
    num_envs: int = 4
    """parallel environments, all ranks"""
    vectorization: Literal["sync", "async"] = "sync"
    """async: a process for each environment, those of evaluation too, if slow; Atari always uses its own threads"""
    life_loss: bool = True
    """Atari: a lost life ends the episode for learning (never for reported returns)"""

    # algorithm
    buffer_size: int = 10_000
    """transitions kept, all ranks"""
    batch_size: int = 128
    """transitions per gradient step, all ranks"""
    learning_starts: int = 10_000
    """transitions (all ranks) before the first gradient step"""
    train_frequency: int = 8
    """transitions (all ranks) per gradient step"""
    learning_rate: float = 2.5e-4
    """Adam's learning rate"""
    gamma: float = 0.99
    """discount"""
    tau: float = 1.0
    """how far the target network moves to the other at each update; 1: a copy"""
    target_network_frequency: int = 500
    """transitions (all ranks) between updates of the target network, at most one per gradient step"""
    start_e: float = 1.0
    """probability of a random action at the start"""
    end_e: float = 0.05
    """and after its decay"""
    exploration_fraction: float = 0.5
    """part of the budget over which it decays linearly"""
    loss: Literal["mse", "huber"] = "mse"
    """squared or Huber loss of the TD error"""
    max_grad_norm: float = math.inf
    """largest norm of the gradient, inf: unclipped"""
    double_q: bool = False
    """choose the next action by the online network, value it by the target network"""
    dueling: bool = False
    """separate streams, of a hidden layer each, for the state's value and the actions' advantages"""
    n_step: int = 1
    """steps of reward before the bootstrapped value, fewer where the episode ends"""
    prioritized: bool = False
    """sample by the TD error's size to the power of --per-alpha, over all ranks"""
    per_alpha: float = 0.6
    """0: uniform; 1: in proportion to the TD error"""
    per_beta: float = 0.4
    """exponent of the importance weights at the start; it rises linearly to 1 at the end of the budget"""

    def __post_init__(self) -> None:
        positive = ("total_timesteps", "eval_episodes", "num_envs", "log_every", "buffer_size", "batch_size")
        for name in (*positive, "train_frequency", "target_network_frequency", "n_step"):
            require(getattr(self, name) >= 1, flag(name), getattr(self, name), "an integer of at least 1")
        for name in ("seed", "num_threads", "eval_every", "check_sync_every", "learning_starts"):
            require(getattr(self, name) >= 0, flag(name), getattr(self, name), "an integer of at least 0")
        require(self.num_threads <= 1024, "--num-threads", self.num_threads, "at most 1024")
        for name in ("learning_rate", "timeout"):
            require(0 < getattr(self, name) < math.inf, flag(name), getattr(self, name), "a number above 0")
        require(self.seed < 2**32, "--seed", self.seed, "below 2**32")
        require(self.timeout <= 1e6, "--timeout", self.timeout, "at most 1e6 seconds")
        for name in ("gamma", "start_e", "end_e", "exploration_fraction", "per_alpha", "per_beta"):
            require(0 <= getattr(self, name) <= 1, flag(name), getattr(self, name), "a number from 0 to 1")
        require(0 < self.tau <= 1, "--tau", self.tau, "a number above 0, at most 1")
        require(self.max_grad_norm > 0, "--max-grad-norm", self.max_grad_norm, "a number above 0 (inf: no clipping)")
        if self.stop_at_return is not None:
            require(self.stop_at_return > -math.inf, "--stop-at-return", self.stop_at_return, "a number")
            require(self.eval_every > 0, "--eval-every", self.eval_every, "at least 1 with --stop-at-return")
        require_divisible("--buffer-size", self.buffer_size, self.num_envs, "--num-envs")
        fits = self.batch_size <= self.buffer_size
        require(fits, "--batch-size", self.batch_size, f"at most --buffer-size ({self.buffer_size})")
        smallest = self.num_envs * self.n_step
        require(self.buffer_size >= smallest, "--buffer-size", self.buffer_size, f"at least {smallest} with --n-step")
        start = max(self.learning_starts, self.num_envs * self.n_step) // self.num_envs * self.num_envs
        first = -(-(start // self.train_frequency + 1) * self.train_frequency // self.num_envs) * self.num_envs
        needed = f"at least {first}, which has a gradient step (--learning-starts {self.learning_starts})"
        require(self.total_timesteps >= first, "--total-timesteps", self.total_timesteps, needed)


# ALGO LOGIC: networks


def is_large(space: gym.spaces.Box, channels_first: bool) -> bool:
    """True for images whose smaller side is at least 36: they take the large network, and several threads."""
    return len(space.shape) == 3 and min(space.shape[1:] if channels_first else space.shape[:2]) >= 36


class Trunk(nn.Module):
    """Observations (B, *shape) in the space's own dtype -> features (B, num_features), for hidden layers of `width`.

    Vector: a layer of 120, then a width of 84. Image: by its smaller side, the convolutions of the DQN Nature paper (36
    and up), then 512, or of the MinAtar paper (arXiv:1903.03176), then 128. Only native Atari images are
    channels-first.
    """

    def __init__(self, space: gym.spaces.Box, channels_first: bool) -> None:
        super().__init__()
        self.image, self.channels_first = len(space.shape) == 3, channels_first
        # pixels of whole numbers are divided by the largest
        self.scale = max(1.0, float(space.high.max())) if self.image and np.issubdtype(space.dtype, np.integer) else 1.0
        if not self.image:
            self.num_features, self.width = 120, 84
            hidden = [nn.Linear(space.shape[0], self.num_features), nn.ReLU()]
        else:
            channels, height, width = space.shape if channels_first else (space.shape[i] for i in (2, 0, 1))
            if is_large(space, channels_first):
                convolutions, self.width = [(channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)], 512
            else:
                convolutions, self.width = [(channels, 16, 3, 1)], 128
            hidden = []
            for in_channels, out_channels, kernel, stride in convolutions:
                hidden += [nn.Conv2d(in_channels, out_channels, kernel, stride), nn.ReLU()]
                height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            self.num_features = out_channels * height * width
            hidden += [nn.Flatten()]
        self.layers = nn.Sequential(*hidden).to(memory_format=torch.channels_last)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        if self.image:
            obs = obs if self.channels_first else obs.permute(0, 3, 1, 2)  # (B, C, H, W)
            obs = obs.contiguous(memory_format=torch.channels_last)
        obs = obs.to(torch.get_default_dtype())
        return self.layers(obs if self.scale == 1.0 else obs / self.scale)


class QNetwork(nn.Module):
    """Observations (B, *shape) -> values of all actions (B, num_actions).

    Dueling: two streams of a hidden layer each over the same features (arXiv:1511.06581 eq. 9), otherwise one.
    """

    def __init__(self, obs_space: gym.spaces.Box, num_actions: int, channels_first: bool, dueling: bool) -> None:
        super().__init__()
        self.trunk = Trunk(obs_space, channels_first)
        self.head = self._stream(num_actions)
        self.value_head = self._stream(1) if dueling else None

    def _stream(self, size: int) -> nn.Sequential:
        hidden = nn.Linear(self.trunk.num_features, self.trunk.width)
        return nn.Sequential(hidden, nn.ReLU(), nn.Linear(self.trunk.width, size))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        features = self.trunk(obs)
        q = self.head(features)
        return q if self.value_head is None else self.value_head(features) + q - q.mean(-1, keepdim=True)

    def numpy_q(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Vector observations (n, size) -> values (n, num_actions), in numpy: on a few rows five times faster.

        It must do what `forward` does, and is compared with it from the start on. None: `forward` itself acts.
        """
        if self.trunk.image:
            return None
        if self.value_head is None:
            return numpy_layers(self.trunk.layers, self.head)
        trunk, head, value_head = map(numpy_layers, (self.trunk.layers, self.head, self.value_head))

        def q(obs: np.ndarray) -> np.ndarray:
            features = trunk(obs)
            advantages = head(features)
            return value_head(features) + advantages - advantages.mean(-1, keepdims=True)

        return q


# ALGO LOGIC: losses


class TDLoss(nn.Module):
    """The temporal-difference loss of this rank's part of a batch; `forward` is what DDP reduces."""

    def __init__(self, q_network: QNetwork, huber: bool, scale: float) -> None:
        super().__init__()
        self.q_network, self.huber = q_network, huber
        self.scale = scale  # world_size / batch_size: then the mean over ranks is the mean over the batch

    def forward(
        self,
        obs: torch.Tensor,  # (b, *shape)
        actions: torch.Tensor,  # (b,), and so all below
        td_target: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Returns this rank's share of the loss and, detached, the TD errors (b,) and the values (b,)."""
        old_val = self.q_network(obs).gather(1, actions.unsqueeze(1)).squeeze(1)
        if self.huber:
            td_loss = F.smooth_l1_loss(old_val, td_target, reduction="none")
        else:
            td_loss = (old_val - td_target) ** 2
        loss = (weights * td_loss).sum() * self.scale
        return loss, ((old_val - td_target).detach(), old_val.detach())


# ALGO LOGIC: pure helpers


def linear_schedule(start: float, end: float, fraction: float) -> float:
    """From `start` at fraction 0 to `end` at 1, and `end` after."""
    return start + (end - start) * min(fraction, 1.0)


def compute_td_target(
    rewards: torch.Tensor, discounts: torch.Tensor, next_target_q: torch.Tensor, next_q: torch.Tensor | None
) -> torch.Tensor:
    """rewards, discounts (b,) + the target network's values (b, n) of what follows -> targets (b,).

    The action is the target network's best, or that of the online values `next_q` (b, n) where given (double Q).
    """
    chooser = next_target_q if next_q is None else next_q
    best = chooser.argmax(1, keepdim=True)
    return rewards + discounts * next_target_q.gather(1, best).squeeze(1)


NOISE_STEPS = 64  # vector steps of exploration noise in one draw
BOUNDARY = 500  # transitions (all ranks) after which a stop request is heard, however seldom rows are written
STATS = ("td_loss", "q_values")
COLUMNS = (
    *("charts/episodic_return", "charts/episodic_length", "charts/episodes", "charts/learning_rate", "charts/epsilon"),
    *("eval/episodic_return", "eval/episodic_length", "eval/episodes"),
    *(f"losses/{name}" for name in STATS),
    *("time/wall", "time/SPS", "time/rollout", "time/update", "time/eval"),
)


def main(args: Args) -> None:
    """Train. Opens and closes all it needs; raises `BadInput` before anything starts for settings that cannot work."""
    world = World(args.cuda)
    require_divisible("--num-envs", args.num_envs, world.world_size, "the number of processes")
    with ExitStack() as stack:
        here, spaces = range(args.num_envs)[world.here(args.num_envs)], (gym.spaces.Discrete,)
        atari, threads = is_native_atari(args.env_id), args.num_threads or world.cores
        options = spaces, args.vectorization, threads
        envs = make_envs(args.env_id, args.seed, TRAINING, here, *options, args.life_loss)
        stack.callback(close, envs)
        episodes_here, eval_envs = evaluation_here(args.eval_episodes, world), None
        if args.eval_every and episodes_here:
            eval_envs = make_envs(args.env_id, args.seed, EVALUATION, episodes_here, *options)
            stack.callback(close, eval_envs)
        rb = ReplayBuffer(
            args.buffer_size,
            args.num_envs,
            world,
            envs.single_observation_space,
            (),
            np.dtype(np.int64),
            args.n_step,
            args.gamma,
            stack=4 if atari else 1,
            alpha=args.per_alpha if args.prioritized else 0.0,
        )
        logger = stack.enter_context(Logger(args, __file__, COLUMNS, world))
        large = is_large(envs.single_observation_space, channels_first=atari)
        torch.set_num_threads(threads if large or args.num_threads else 1)
        with world.process_group(args.timeout):
            train(args, world, envs, eval_envs, atari, rb, logger)


def train(
    args: Args,
    world: World,
    envs: Environments,
    eval_envs: Environments | None,
    atari: bool,
    rb: ReplayBuffer,
    logger: Logger,
) -> None:
    """The training loop, inside the process group; leaving it drops the DDP modules."""
    device = world.device
    here, local_num_envs = world.here(args.num_envs), envs.num_envs
    num_vector_steps = args.total_timesteps // args.num_envs
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    budget = num_vector_steps * args.num_envs
    logger.note(f"{budget} transitions by {args.num_envs} environments on {world.world_size} process(es), {device}")

    # the same networks and the same generator on all ranks
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))  # not the stream of the networks
    num_actions = int(action_space.n)
    q_network = QNetwork(obs_space, num_actions, atari, args.dueling).to(device)
    target_network = QNetwork(obs_space, num_actions, atari, args.dueling).to(device).requires_grad_(False)
    parameters, target_parameters = list(q_network.parameters()), list(target_network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, fused=True)
    scale = world.world_size / args.batch_size
    loss_fn = TDLoss(q_network, args.loss == "huber", scale)
    # DDP: hooks `forward` and nothing else, so it wraps the loss; acting and targets use the bare networks
    options = {"gradient_as_bucket_view": True, "static_graph": True}
    ddp_loss = DDP(loss_fn, **options) if world.world_size > 1 else loss_fn  # collective
    target_network.load_state_dict(q_network.state_dict())  # after DDP has made all ranks' parameters rank 0's

    def network_q(obs: np.ndarray) -> np.ndarray:
        """Observations -> values of all actions (n, num_actions)."""
        with torch.inference_mode():
            return q_network(torch.from_numpy(obs).to(device)).cpu().numpy()

    def act(obs: np.ndarray) -> np.ndarray:
        """Greedy actions for evaluation."""
        return network_q(obs).argmax(-1) + action_space.start

    obs = envs.start()
    rb.start(obs)
    statistics = EpisodeStatistics(local_num_envs)
    q_values = checked(q_network.numpy_q, network_q, obs, thorough=True)  # what acts
    # sums since the last row; small tensors kept until then would fragment the heap by a batch's memory each
    stats = torch.zeros(len(STATS), dtype=torch.float64, device=device)
    num_updates, update_time, eval_time, start_time = 0, 0.0, 0.0, time.perf_counter()
    row_start = start_time

    for vector_step in range(1, num_vector_steps + 1):
        global_step, before = vector_step * args.num_envs, (vector_step - 1) * args.num_envs

        # collect: all environments' noise is drawn on every rank, for many steps at once, and each takes its own
        epsilon = linear_schedule(args.start_e, args.end_e, before / max(1.0, args.exploration_fraction * budget))
        if before % (NOISE_STEPS * args.num_envs) == 0:
            noise = torch.rand(NOISE_STEPS, 2, args.num_envs, generator=generator)[:, :, here].numpy()
        explore, choice = noise[(vector_step - 1) % NOISE_STEPS]
        actions = (choice * num_actions).astype(np.int64)
        if (explore >= epsilon).any():
            actions = np.where(explore < epsilon, actions, q_values(obs).argmax(-1))
        obs, rewards, terminations, truncations, infos = envs.step(actions + action_space.start)
        ended = statistics.step(rewards, terminations | truncations, infos)
        learning_rewards = np.sign(rewards) if atari else rewards
        rb.add(actions, learning_rewards, terminations, truncations, obs, infos, ended)

        # update
        update_start = time.perf_counter()
        if global_step > max(args.learning_starts, args.num_envs * args.n_step):  # something can be sampled
            beta = linear_schedule(args.per_beta, 1.0, global_step / budget)
            for k in range(before // args.train_frequency + 1, global_step // args.train_frequency + 1):
                data = rb.sample(args.batch_size, generator, device, beta)  # collective
                with torch.no_grad():
                    next_q = q_network(data.next_obs) if args.double_q else None
                    td_target = compute_td_target(data.rewards, data.discounts, target_network(data.next_obs), next_q)
                loss, (td_errors, old_val) = ddp_loss(data.obs, data.actions, td_target, data.weights)
                for parameter in parameters:  # as zero_grad does, which takes longer
                    parameter.grad = None
                loss.backward()  # collective
                if args.max_grad_norm < math.inf:
                    nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                optimizer.step()
                if args.prioritized:
                    rb.update_priorities(data.indices, td_errors)
                stats += torch.stack([loss.detach(), scale * old_val.sum()])
                num_updates += 1
                if crossed(args.target_network_frequency, (k - 1) * args.train_frequency, k * args.train_frequency):
                    with torch.no_grad():
                        torch._foreach_lerp_(target_parameters, parameters, args.tau)
            if device.type != "cpu":
                q_values = q_network.numpy_q() or network_q
        update_time += time.perf_counter() - update_start

        if crossed(BOUNDARY, before, global_step):
            world.gather([])  # collective: stop requests, and a sign of life
            q_values = checked(q_network.numpy_q, network_q, obs)

        # metrics: sums and counts of all ranks, divided once
        last = vector_step == num_vector_steps or world.stop
        if crossed(args.log_every, before, global_step) or last:
            sums = statistics.pop() | dict(zip(STATS, stats.tolist(), strict=True))
            times = {"time/rollout": time.perf_counter() - row_start - update_time, "time/update": update_time}
            total = world.reduce(sums, maxima=times)  # collective
            wall = time.perf_counter() - start_time
            row = {"global_step": global_step, "charts/learning_rate": args.learning_rate, "charts/epsilon": epsilon}
            row["charts/episodes"] = int(total["episodes"])
            if total["episodes"]:
                row["charts/episodic_return"] = total["return"] / total["episodes"]
                row["charts/episodic_length"] = total["length"] / total["episodes"]
            if num_updates:
                row |= {f"losses/{name}": total[name] / num_updates / world.world_size for name in STATS}
            row |= {"time/wall": wall, "time/SPS": global_step / (wall - eval_time)}
            row |= {name: total[name] for name in times}
            logger.log(row)
            if not math.isfinite(total["td_loss"]):
                raise Diverged(f"step {global_step}: a loss is not finite; try a lower --learning-rate.")
            stats.zero_()
            num_updates, update_time, row_start = 0, 0.0, time.perf_counter()
            if world.stop:
                break

        # what happens at multiples of a period
        if crossed(args.check_sync_every, before, global_step):
            world.check_equal(
                global_step,
                q_network=q_network,
                target_network=target_network,
                optimizer=optimizer,
                generator=generator,
            )  # collective
        if args.eval_every and (crossed(args.eval_every, before, global_step) or last):
            eval_start = time.perf_counter()
            eval_returns, eval_lengths = evaluate(act, eval_envs, args.eval_episodes, world)  # collective
            if world.stop:
                break
            eval_time += time.perf_counter() - eval_start
            row = {"global_step": global_step, "eval/episodic_return": eval_returns.mean()}
            row |= {"eval/episodic_length": eval_lengths.mean(), "eval/episodes": args.eval_episodes}
            row |= {"time/wall": time.perf_counter() - start_time, "time/eval": time.perf_counter() - eval_start}
            logger.log(row)
            row_start = time.perf_counter() - (eval_start - row_start)  # evaluation is not rollout
            if args.stop_at_return is not None and eval_returns.mean() >= args.stop_at_return:
                break

    if args.save_model:
        networks = {"q_network": q_network.state_dict(), "target_network": target_network.state_dict()}
        logger.save(networks | {"args": asdict(args), "global_step": global_step})


if __name__ == "__main__":
    launch(main, lambda: tyro.cli(Args, args=command_line(Args)))
