"""Proximal Policy Optimization (arXiv:1707.06347), the same experiment on any number of processes (DDP).

    python ppo_ddp.py --env-id CartPole-v1
    torchrun --nproc_per_node=2 ppo_ddp.py --env-id CartPole-v1
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 ppo_ddp.py

To use it in a project of your own, copy this file and `common/`.

A shard is a group of environments whose arithmetic is done in arrays of its own, because sums and products
round differently in arrays of another shape. `--shards N` makes N shards on any number of processes, so
that results are the same, and a process may hold several. Without it, each process is one shard.
In `train`, `rollouts`, `batches`, `inds`, `advantages`, `minibatches` and `stats` are lists with an entry for
each shard of this process. Every process must reach the lines marked `# collective`, in the same order.

Differences from the reference (OpenAI Baselines' ppo2, as CleanRL's ppo.py lays it out):
1. Sizes are totals over all ranks (`--num-steps`: per environment). Environment i draws the same noise
   and fills the same places of minibatches, whichever rank holds it.
2. A minibatch holds the same number of steps of every environment.
3. Truncation bootstraps from the value of the last observation, termination does not.
4. The rollout runs only the policy, in numpy for vectors; values and old log-probabilities come after it.
5. `--target-kl` decides on the epoch's mean over all ranks; running moments move once per iteration.
6. Rewards are divided by a running standard deviation by default, Atari's after taking their sign.
   With `--no-norm-reward`, one of five CartPole seeds had lost a good policy after 200 k steps.
7. Logged losses are means over all minibatches of an iteration; CleanRL logs the last minibatch's.
8. In `common/`: normalised observations and rewards are clipped at +-10, and Box actions to their
   bounds on the way to the simulator, as in Baselines; Atari games have no sticky actions; a checkpoint
   truncates all running episodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from common.acting import Acting
from common.encoders import Pixels, image_encoder
from common.environments import open_environments
from common.normalization import RunningMoments, discounted_returns, explained_variance, standardized
from common.run.arguments import Count, Fraction, Norm, Positive, RunArgs, Weight, Whole
from common.run.launch import launch
from common.run.loop import Run, open_run
from common.tensors import default_float


@dataclass
class Args(RunArgs):
    # environment; the flags that all scripts share are in common/run/arguments.py
    env_id: str = "CartPole-v1"
    """gymnasium id, ALE/..., MinAtar/..., envpool/..., or module:id of your own"""
    total_timesteps: Whole = 500_000
    """budget in environment transitions, all ranks; rounded down to whole iterations"""
    num_envs: Count = 4
    """parallel environments, all ranks"""
    network: Literal["auto", "impala"] = "auto"
    """images: auto (Nature's from 36 x 36 pixels, else MinAtar's) or impala (nine times slower at 64 x 64)"""
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
    """minibatches per epoch; each holds the same number of steps of every environment"""
    update_epochs: Count = 4
    """epochs over an iteration's batch"""
    learning_rate: Positive = 2.5e-4
    """Adam's learning rate"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0 over the run"""
    adam_eps: Positive = 1e-5
    """Adam's epsilon"""
    gamma: Fraction = 0.99
    """discount"""
    gae_lambda: Fraction = 0.95
    """lambda of generalised advantage estimation"""
    clip_coef: Positive = 0.2
    """clipping of the probability ratio, and of the value's move with --clip-vloss"""
    clip_vloss: bool = True
    """clip the value loss"""
    norm_adv: Literal["minibatch", "batch", "none"] = "minibatch"
    """what advantages are normalised over, always on all ranks"""
    ent_coef: Weight = 0.01
    """weight of the entropy bonus"""
    vf_coef: Weight = 0.5
    """weight of the value loss"""
    max_grad_norm: Norm = 0.5
    """largest gradient norm; inf: no clipping"""
    target_kl: Positive | None = None
    """end an iteration's epochs once an epoch's mean approx_kl, over all ranks, exceeds this"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_divisible("num_steps", "num_minibatches")
        size = self.num_envs * self.num_steps
        normalized = size // self.num_minibatches if self.norm_adv == "minibatch" else size
        self.require(self.norm_adv == "none" or normalized > 1, "norm_adv", "none, or over at least 2 samples")
        can_stop = self.target_kl is None or self.update_epochs > 1  # it ends the epochs after one of them
        self.require(can_stop, "update_epochs", "at least 2 with --target-kl")
        self.require_budget(size, f"at least one iteration, --num-envs x --num-steps = {size}")


# ALGO LOGIC: networks


def layer_init(layer: nn.Linear | nn.Conv2d, std: float = math.sqrt(2)) -> nn.Linear | nn.Conv2d:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


class Trunk(nn.Module):
    """Observations (B, *shape) in the space's own dtype -> features (B, num_features).

    Vector: two layers of 64. Image: the convolutions of common/encoders.py, then one layer.
    """

    def __init__(self, space: gym.spaces.Box, network: str = "auto") -> None:
        super().__init__()
        self.image = len(space.shape) == 3
        if self.image:
            self.pixels = Pixels(space)
            convolutions, size, self.num_features = image_encoder(space, network, layer_init)
            layers = [*convolutions, layer_init(nn.Linear(size, self.num_features)), nn.ReLU()]
        else:
            size, self.num_features = space.shape[0], 64
            layers = [layer_init(nn.Linear(size, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]
        self.layers = nn.Sequential(*layers)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        obs = self.pixels(obs) if self.image else obs.to(torch.get_default_dtype())
        return self.layers(obs)


class Agent(nn.Module):
    """Policy and value over separate trunks for vectors, over one trunk for images.

    The policy is a tensor `pi`: logits (B, n) of a `Discrete` space, or means and log standard deviations
    (B, 2 d) of a `Box` of d numbers.
    """

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.Space, network: str = "auto") -> None:
        super().__init__()
        self.discrete = isinstance(action_space, gym.spaces.Discrete)
        size = int(action_space.n) if self.discrete else math.prod(action_space.shape)
        self.trunk = Trunk(obs_space, network)
        self.value_trunk = None if self.trunk.image else Trunk(obs_space, network)
        self.actor = layer_init(nn.Linear(self.trunk.num_features, size), std=0.01)
        self.critic = layer_init(nn.Linear(self.trunk.num_features, 1), std=1.0)
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(size))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Observations (B, *shape) -> pi (B, .) and the policy's features (B, num_features)."""
        features = self.trunk(obs)
        return self.policy(features), features

    def policy(self, features: torch.Tensor) -> torch.Tensor:
        out = self.actor(features)
        return out if self.discrete else torch.cat([out, self.log_std.expand_as(out)], -1)

    def value(self, obs: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Values (B,) of obs (B, *shape). Images share the trunk: `features` (B, num_features) are enough."""
        return self.critic(features if self.value_trunk is None else self.value_trunk(obs)).squeeze(-1)

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


class Batch(NamedTuple):
    """B transitions."""

    obs: torch.Tensor  # (B, *shape) as the networks read them
    actions: torch.Tensor  # (B,) or (B, d)
    logprobs: torch.Tensor  # (B,), and so all below
    values: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor

    def take(self, inds: torch.Tensor) -> Batch:
        """The transitions of these indices (b,)."""
        return Batch(*(x[inds] for x in self))


class PPOLoss(nn.Module):
    """The clipped objectives of a minibatch (arXiv:1707.06347 eq. 7 and 9). DDP wraps this, not the agent."""

    def __init__(self, agent: Agent, args: Args) -> None:
        super().__init__()
        self.agent, self.args = agent, args

    def forward(self, mb: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the loss, a mean over the minibatch, and what is logged: means, or numbers (B,)."""
        args = self.args
        pi, features = self.agent(mb.obs)
        newlogprob, entropy = self.agent.log_prob_entropy(pi, mb.actions)
        newvalue = self.agent.value(mb.obs, features)

        logratio = newlogprob - mb.logprobs
        ratio = logratio.exp()
        clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        pg_loss = -torch.min(mb.advantages * ratio, mb.advantages * clipped).mean()
        if args.clip_vloss:
            v_clipped = mb.values + (newvalue - mb.values).clamp(-args.clip_coef, args.clip_coef)
            v_loss = 0.5 * torch.max((newvalue - mb.returns) ** 2, (v_clipped - mb.returns) ** 2).mean()
        else:
            v_loss = 0.5 * ((newvalue - mb.returns) ** 2).mean()
        entropy_loss = entropy.mean()
        loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss
        stats = {"policy_loss": pg_loss, "value_loss": v_loss, "entropy": entropy_loss}
        logratio = logratio.detach()
        stats |= {"old_approx_kl": -logratio, "clipfrac": ratio != clipped}
        stats["approx_kl"] = logratio.expm1() - logratio  # http://joschu.net/blog/kl-approx.html
        return loss, {name: x.detach() for name, x in stats.items()}


# ALGO LOGIC: rollout and batch, each of one shard


class Rollout(NamedTuple):
    """What n environments gave in an iteration, as views of arrays that the next iteration overwrites."""

    obs: np.ndarray  # (num_steps, n, *shape) as the environments give them
    features: torch.Tensor | None  # (num_steps, n, num_features), of images
    actions: np.ndarray  # (num_steps, n) or (num_steps, n, d)
    rewards: np.ndarray  # (num_steps, n), and so are the next three
    reward_sums: np.ndarray  # R_t = gamma R_{t-1} + r_t since the episode's start
    dones: np.ndarray
    truncations: np.ndarray  # truncated, not terminated
    next_obs: np.ndarray  # (n, *shape)
    final_obs: list[np.ndarray]  # last observations of truncated episodes, by step, then environment


def learning_batch(
    args: Args, run: Run, agent: Agent, rollout: Rollout, obs_moments: RunningMoments, return_moments: RunningMoments
) -> Batch:
    """Values, log-probabilities, advantages and returns of a rollout."""
    rewards = return_moments.scaled(rollout.rewards).astype(default_float())
    num_steps, n = rewards.shape
    with torch.no_grad():
        obs = rollout.obs.reshape(num_steps * n, *rollout.obs.shape[2:])
        obs = run.upload(obs_moments.normalized(obs))
        actions = run.upload(rollout.actions.reshape(num_steps * n, *rollout.actions.shape[2:]))
        features = agent.trunk(obs) if rollout.features is None else rollout.features.flatten(0, 1)
        logprobs, _ = agent.log_prob_entropy(agent.policy(features), actions)
        # in parts, as in ppg_ddp.py, which needs that for memory, and both have the same bits
        chunks = zip(obs.chunk(args.num_minibatches), features.chunk(args.num_minibatches), strict=True)
        values = torch.cat([agent.value(*chunk) for chunk in chunks])
        last_obs = np.stack([*rollout.next_obs, *rollout.final_obs])
        last_obs = run.upload(obs_moments.normalized(last_obs))
        last_values = agent.value(last_obs, agent.trunk(last_obs)).cpu().numpy()

    next_value, final_values = np.split(last_values, [n])
    rewards[rollout.truncations] += args.gamma * final_values  # truncation bootstraps, termination does not
    old_values = values.cpu().numpy().reshape(num_steps, n)
    dones = rollout.dones.astype(rewards.dtype)
    advantages = compute_gae(rewards, old_values, next_value, dones, args.gamma, args.gae_lambda)
    advantages = run.upload(advantages.ravel())
    return Batch(obs, actions, logprobs, values, advantages + values, advantages)


def collect(
    args: Args, run: Run, agent: Agent, policy: Acting, generator: torch.Generator, obs_moments: RunningMoments
) -> Iterator[list[Rollout]]:
    """Yield rollouts of `num_steps` steps for ever, one for each shard of this process.

    All environments start anew where the run says so: at the beginning, and after each checkpoint.
    """
    envs = run.envs
    shape = (args.num_steps, envs.num_envs)
    action_shape = () if agent.discrete else (math.prod(envs.single_action_space.shape),)
    action_type = np.int64 if agent.discrete else default_float()
    draw = torch.rand if agent.discrete else torch.randn
    obs = envs.storage(*shape)
    actions = np.zeros((*shape, *action_shape), action_type)
    features = None
    if agent.trunk.image:
        features = torch.zeros((*shape, agent.trunk.num_features), device=run.device)
    rewards = np.zeros(shape)
    terminations = np.zeros(shape, bool)
    truncations = np.zeros(shape, bool)
    while True:
        if run.environments_must_start:
            next_obs = run.start_environments()
            return_carry = np.zeros(envs.num_envs)
        # every process draws the noise of all environments and keeps that of its own
        noise = draw(args.num_steps, args.num_envs, *action_shape, generator=generator)
        noise = noise[:, run.world.local_slice(args.num_envs)].numpy()
        final_obs = {}  # the last observations of truncated episodes, by step and environment
        with torch.inference_mode():
            for step in range(args.num_steps):
                obs[step] = next_obs
                if features is None:
                    pi = policy(obs_moments.normalized(next_obs))
                else:  # images: their features are computed once
                    outputs = [agent(run.upload(obs[step, shard])) for shard in envs.shards]
                    pi = torch.cat([x for x, _ in outputs]).cpu().numpy()
                    features[step] = torch.cat([x for _, x in outputs])
                actions[step] = agent.sample(pi, noise[step])
                next_obs, rewards[step], terminations[step], truncations[step], infos = envs.step(actions[step])
                for i in truncations[step].nonzero()[0]:
                    final_obs[step, i] = np.array(infos["final_obs"][i])

        dones = terminations | truncations
        learned_rewards = np.sign(rewards) if envs.atari else rewards
        reward_sums = discounted_returns(learned_rewards, dones, args.gamma, return_carry)  # moves return_carry on
        rollouts = []
        for shard in envs.shards:
            rollout = Rollout(
                obs=obs[:, shard],
                features=None if features is None else features[:, shard],
                actions=actions[:, shard],
                rewards=learned_rewards[:, shard],
                reward_sums=reward_sums[:, shard],
                dones=dones[:, shard],
                truncations=truncations[:, shard],
                next_obs=next_obs[shard],
                final_obs=[x for (_, i), x in final_obs.items() if shard.start <= i < shard.stop],
            )
            rollouts.append(rollout)
        yield rollouts


# ALGO LOGIC: pure helpers


def compute_gae(
    rewards: np.ndarray,  # (T, n), as values and dones
    values: np.ndarray,
    next_value: np.ndarray,
    dones: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    """Generalised advantage estimates (arXiv:1506.02438 eq. 16) of T steps of n environments -> (T, n).

    `next_value` (n,): of the observation after the last step. `dones`: 1.0 where step t ended an episode
    (CleanRL's dones[t] says this of step t - 1). Rewards of truncated steps include gamma times the last
    observation's value.
    """
    advantages = np.empty_like(values)
    lastgaelam = np.zeros_like(next_value)
    nonterminal = 1.0 - dones
    next_values = np.concatenate([values[1:], next_value[None]])
    delta = rewards + gamma * next_values * nonterminal - values
    decay = gamma * gae_lambda * nonterminal
    for t in range(len(rewards) - 1, -1, -1):
        advantages[t] = lastgaelam = delta[t] + decay[t] * lastgaelam
    return advantages


def minibatch_inds(draws: torch.Tensor, num_minibatches: int) -> torch.Tensor:
    """Random numbers (num_epochs, n, num_steps) -> shuffled indices (num_epochs, num_minibatches, size).

    They are indices into a flattened (num_steps, n). Each environment's steps are shuffled, in the order of its
    random numbers, and cut into equal parts: a minibatch holds the same number of steps of every environment.
    """
    num_epochs, n, _ = draws.shape
    inds = draws.argsort(stable=True) * n + torch.arange(n)[:, None]
    return inds.view(num_epochs, n, num_minibatches, -1).transpose(1, 2).flatten(2)


COLUMNS = (
    *("losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/old_approx_kl"),
    *("losses/approx_kl", "losses/clipfrac", "losses/explained_variance", "losses/epochs"),
)


def main(args: Args) -> None:
    """Train. Opens and closes all it needs; raises `BadInput` for settings that cannot work."""
    with open_environments(args, (gym.spaces.Discrete, gym.spaces.Box), args.life_loss) as envs:
        image = len(envs.single_observation_space.shape) == 3
        args.require(not args.norm_obs or not image, "norm_obs", "left off for image observations")
        args.require(args.network == "auto" or image, "network", "left off for vector observations")
        with open_run(args, __file__, COLUMNS, envs) as run:  # collective
            train(args, run)


def train(args: Args, run: Run) -> None:
    """The training loop. A function of its own: DDP modules must be freed before the process group closes."""
    world = run.world
    envs = run.envs
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size

    # one seed for all processes: the same networks and the same generator
    torch.manual_seed(args.seed)
    seed = int(torch.randint(2**62, ()))  # with --seed itself it would repeat the initial weights' numbers
    generator = torch.Generator().manual_seed(seed)
    agent = Agent(envs.single_observation_space, envs.single_action_space, args.network).to(run.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=args.adam_eps, fused=True)
    obs_moments = RunningMoments(envs.single_observation_space.shape, args.norm_obs)
    return_moments = RunningMoments((), args.norm_reward)
    run.register(agent=agent, optimizer=optimizer, generator=generator)
    run.register(obs_moments=obs_moments, return_moments=return_moments)
    parameters = list(agent.parameters())
    loss_fn = PPOLoss(agent, args)
    # DDP averages gradients over processes. It hooks `forward` and nothing else, so it wraps the loss; acting
    # and bootstrapping use the bare agent.
    ddp_loss = DDP(loss_fn, **world.ddp_options) if world.uses_ddp else loss_fn  # collective
    policy = run.policy(agent)  # arrays -> pi, by numpy for vectors

    def act(obs: np.ndarray) -> np.ndarray:
        """Greedy actions for evaluation, by the module itself."""
        return agent.mode(policy.by_module(obs_moments.normalized(obs)))

    # --resume takes a larger --total-timesteps, except with --anneal-lr
    run.load_or_start(act, num_iterations * batch_size, anneal_lr=args.anneal_lr)  # collective
    experience = collect(args, run, agent, policy, generator, obs_moments)
    for iteration in range(run.global_step // batch_size + 1, num_iterations + 1):
        fraction = 1.0 - (iteration - 1) / num_iterations if args.anneal_lr else 1.0
        for group in optimizer.param_groups:
            start = group.setdefault("initial_lr", group["lr"])  # checkpoints keep it
            group["lr"] = fraction * start
        run.means.lap()
        rollouts = next(experience)
        return_moments.update([x.reward_sums for x in rollouts], world)  # collective
        batches = [learning_batch(args, run, agent, x, obs_moments, return_moments) for x in rollouts]
        obs_moments.update([x.obs for x in rollouts], world)  # collective; for the next rollout
        run.means.lap("time/rollout")

        # update; every process draws for all environments, as in `collect`
        draws = torch.rand(args.update_epochs, args.num_envs, args.num_steps, generator=generator)
        draws = draws[:, world.local_slice(args.num_envs)]
        inds = run.upload([minibatch_inds(draws[:, shard], args.num_minibatches) for shard in envs.shards])
        advantages = [batch.advantages for batch in batches]
        if args.norm_adv == "batch":
            advantages = standardized(advantages, world)  # collective
        # of all minibatches at once: (num_epochs, num_minibatches, size)
        advantages = [x[shard_inds] for x, shard_inds in zip(advantages, inds, strict=True)]
        if args.norm_adv == "minibatch":
            advantages = standardized(advantages, world)  # collective, one instead of one for each minibatch
        for epoch in range(args.update_epochs):
            kls = []  # for each minibatch, approx_kl of each shard
            for i in range(args.num_minibatches):
                minibatches = []  # one for each shard of this process
                for batch, shard_inds, adv in zip(batches, inds, advantages, strict=True):
                    minibatches.append(batch.take(shard_inds[epoch, i])._replace(advantages=adv[epoch, i]))
                optimizer.zero_grad()
                stats = run.backward(ddp_loss, minibatches)  # collective: the mean gradient
                nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                optimizer.step()
                run.means.add(stats)
                kls.append([x["approx_kl"] for x in stats])
            if args.target_kl is not None and run.mean_over_ranks(kls) > args.target_kl:  # collective
                break
        run.means.lap("time/update")

        row = run.means.row()  # collective
        row["charts/learning_rate"] = fraction * args.learning_rate
        row["losses/epochs"] = epoch + 1
        row |= explained_variance([(x.advantages, x.values) for x in batches], world)  # collective
        run.logger.log(iteration * batch_size, row)
        if run.evaluate_and_checkpoint(iteration * batch_size, act):  # collective
            break
    run.finish()


if __name__ == "__main__":
    launch(main, Args)
