"""Phasic Policy Gradient (arXiv:2009.04416), the same experiment on any number of processes (DDP).

    python ppg_ddp.py --env-id CartPole-v1
    torchrun --nproc_per_node=2 ppg_ddp.py --env-id CartPole-v1
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 ppg_ddp.py

To use it in a project of your own, copy this file and `common/`.

Arrays hold the n environments of this process; gradients, running moments and the statistics of advantages are
of all environments. So the number of processes changes only rounding, and with `--shards N` not even that: the
environments form N groups. `run.policy`, `run.by_shard` and `run.backward` compute each group in arrays of its
own; `run.backward` and common/normalization.py add their sums in a fixed order. All processes must reach each
line marked `# collective` equally often.

PPG is PPO with separate policy and value networks, plus an auxiliary phase after every `--n-pi`
iterations, where the policy network learns the value function without changing its policy. With
`--aux-epochs 0` and PPO's flags it is `ppo_ddp.py`, bit for bit on vector observations. Each phase has
its own Adam, whose state persists; the auxiliary one moves all networks. Keep rewards normalised: value
losses of large returns drown the KL term, and the policy is lost.

Differences from the references (1 to 7: OpenAI Baselines' ppo2; then OpenAI's phasic-policy-gradient):
1. Sizes are totals over all ranks (`--num-steps`: per environment). Environment i draws the same noise
   and fills the same places of minibatches, whichever rank holds it.
2. A minibatch holds the same number of steps of every environment.
3. Truncation bootstraps from the value of the last observation, termination does not.
4. `--target-kl` decides on the epoch's mean over all ranks; running moments move once per iteration.
5. Rewards are divided by a running standard deviation by default, Atari's after taking their sign.
6. Logged losses are means over all minibatches of an iteration; CleanRL logs the last minibatch's.
7. In `common/`: normalised observations and rewards are clipped at +-10. Box actions between finite bounds
   are learned in units of [-1, 1]; they are clipped and mapped to the bounds on the way to the simulator.
   Atari games have no sticky actions. A checkpoint truncates all running episodes.
8. Policy and value losses share epochs (`--update-epochs`), minibatches and one Adam, which is no
   difference at the paper's E_pi = E_V = 1. The reference's weight of the value loss is `--vf-coef 1`.
9. Gradient norms are clipped in both phases, and learning rates are annealed.
10. Both phases shuffle single steps; the reference shuffles whole rollouts.
11. Layers start orthogonal, as in PPO; the reference scales the weights of each output to one norm.
12. Rewards are normalised with `--gamma`; the reference's normaliser keeps 0.99 whatever the discount.
13. Phases and batches are small by default; the paper's, for Procgen, are in the suite `procgen`.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from common.arguments import Count, Fraction, Norm, Positive, RunArgs, Weight, Whole, launch
from common.encoders import image_encoder
from common.normalization import RunningMoments, discounted_returns, explained_variance, standardized
from common.processes import World
from common.run import Run, open_run


@dataclass
class Args(RunArgs):
    # environment; the flags that all scripts share are in common/arguments.py
    env_id: str = "CartPole-v1"
    """gymnasium id, ALE/..., MinAtar/..., or module:id of your own"""
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
    """largest gradient norm; inf: no clipping"""
    target_kl: Positive | None = None
    """end an iteration's epochs once an epoch's mean approx_kl, over all ranks, exceeds this"""
    n_pi: Count = 16
    """iterations per policy phase; an auxiliary phase follows each full one, over all its transitions"""
    aux_epochs: Whole = 6
    """epochs of an auxiliary phase; 0: no auxiliary phases, which on vectors is PPO"""
    num_aux_minibatches: Count = 16
    """minibatches per auxiliary epoch, each with the same number of steps of every environment"""
    aux_learning_rate: Positive = 5e-4
    """the auxiliary phase's learning rate, annealed with the policy phase's"""
    beta_clone: Weight = 1.0
    """weight of the KL divergence from the policy before the auxiliary phase"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_multiple("num_steps", self.num_minibatches, "--num-minibatches")
        size = self.num_envs * self.num_steps
        normalized = size // self.num_minibatches if self.norm_adv == "minibatch" else size
        self.require(self.norm_adv == "none" or normalized > 1, "norm_adv", "none, or over at least 2 samples")
        can_stop = self.target_kl is None or self.update_epochs > 1  # it ends the epochs after one of them
        self.require(can_stop, "update_epochs", "at least 2 with --target-kl")
        if self.aux_epochs:
            phase = self.n_pi * self.num_steps
            divides = phase % self.num_aux_minibatches == 0
            self.require(divides, "num_aux_minibatches", f"a divisor of --n-pi x --num-steps ({phase})")
            self.require_budget(self.n_pi * size, "a policy phase, or set --aux-epochs 0")
        self.require_budget(size, "an iteration: --num-envs x --num-steps")


# ALGO LOGIC: networks


def layer_init(layer: nn.Linear | nn.Conv2d, std: float = math.sqrt(2)) -> nn.Linear | nn.Conv2d:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


def hidden_layers(space: gym.spaces.Box, network: str = "auto") -> tuple[nn.Sequential, int]:
    """Layers (B, *shape) -> (B, num_features), and num_features.

    Vector: two layers of 64. Image: the convolutions of common/encoders.py, then one layer.
    """
    if len(space.shape) == 3:
        encoder, size, num_features = image_encoder(space, network, layer_init)
        return nn.Sequential(encoder, layer_init(nn.Linear(size, num_features)), nn.ReLU()), num_features
    first = layer_init(nn.Linear(space.shape[0], 64))
    second = layer_init(nn.Linear(64, 64))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh()), 64


class Agent(nn.Module):
    """Policy and value, a network each.

    What the actor gives, `out` (B, k), is the logits of `Discrete` actions or the means of a `Box`'s.
    """

    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.Space, network: str = "auto") -> None:
        super().__init__()
        self.discrete = isinstance(action_space, gym.spaces.Discrete)
        self.num_outputs = int(action_space.n) if self.discrete else math.prod(action_space.shape)
        actor, num_features = hidden_layers(obs_space, network)
        critic, _ = hidden_layers(obs_space, network)
        self.actor = actor.append(layer_init(nn.Linear(num_features, self.num_outputs), std=0.01))
        self.critic = critic.append(layer_init(nn.Linear(num_features, 1), std=1.0))
        if not self.discrete:
            self.log_std = nn.Parameter(torch.zeros(self.num_outputs))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Observations (B, *shape) -> out (B, k) and values (B,)."""
        return self.actor(obs), self.critic(obs).squeeze(-1)

    def log_prob(self, out: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out (B, k), actions (B,) or (B, d) -> log-probabilities and entropies, (B,) each."""
        if self.discrete:
            log_p = out.log_softmax(-1)
            log_prob = log_p.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
            return log_prob, -(log_p.exp() * log_p).sum(-1)
        log_std = self.log_std.expand_as(out)
        deviation = (actions - out) * (-log_std).exp()
        constant = 0.5 * math.log(2 * math.pi)
        log_prob = (-0.5 * deviation**2 - log_std - constant).sum(-1)
        return log_prob, (0.5 + constant + log_std).sum(-1)

    def sample(self, out: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """out (n, k) and noise, uniform (n,) or normal (n, d) -> actions (n,) by inverse CDF, or (n, d)."""
        if self.discrete:
            cdf = np.exp(out - out.max(-1, keepdims=True)).cumsum(-1)
            return (noise[:, None] * cdf[:, -1:] >= cdf[:, :-1]).sum(-1)
        return out + np.exp(self.log_std.detach().cpu().numpy()) * noise

    def mode(self, out: np.ndarray) -> np.ndarray:
        """out (n, k) -> the most probable actions, (n,) or (n, d)."""
        return out.argmax(-1) if self.discrete else out

    def pi(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, *shape) -> the whole policy (B, .), logits or means and log standard deviations; and what they read."""
        features = self.actor[:-1](obs)
        out = self.actor[-1](features)
        return out if self.discrete else torch.cat([out, self.log_std.expand_as(out)], -1), features

    def kl_divergence(self, old_pi: torch.Tensor, pi: torch.Tensor) -> torch.Tensor:
        """KL(old_pi || pi) of (B, .) -> (B,)."""
        if self.discrete:
            old_log_p, log_p = old_pi.log_softmax(-1), pi.log_softmax(-1)
            return (old_log_p.exp() * (old_log_p - log_p)).sum(-1)
        old_mean, old_log_std = old_pi.chunk(2, -1)
        mean, log_std = pi.chunk(2, -1)
        moved = ((2 * old_log_std).exp() + (old_mean - mean) ** 2) / (2 * (2 * log_std).exp())
        return (log_std - old_log_std + moved - 0.5).sum(-1)


# ALGO LOGIC: losses


class Batch(NamedTuple):
    """B transitions."""

    obs: torch.Tensor  # (B, *shape) as the networks read them
    actions: torch.Tensor  # (B,) or (B, d)
    logprobs: torch.Tensor  # (B,), and so all below
    values: torch.Tensor
    returns: torch.Tensor
    advantages: torch.Tensor


class PPOLoss(nn.Module):
    """The clipped objectives of a minibatch (arXiv:1707.06347 eq. 7 and 9)."""

    def __init__(self, agent: Agent, args: Args) -> None:
        super().__init__()
        self.agent = agent
        self.args = args

    def forward(self, mb: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the loss and, detached, what is logged.

        `run.backward` calls it once for each shard's rows of a minibatch. So the loss is a mean over rows, no
        statistic over rows goes into it, and every parameter is used.
        """
        args = self.args
        out, newvalue = self.agent(mb.obs)
        newlogprob, entropy = self.agent.log_prob(out, mb.actions)
        logratio = newlogprob - mb.logprobs
        ratio = logratio.exp()
        clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
        pg_loss = -torch.min(mb.advantages * ratio, mb.advantages * clipped).mean()
        if args.clip_vloss:
            v_clipped = mb.values + (newvalue - mb.values).clamp(-args.clip_coef, args.clip_coef)
            v_loss = 0.5 * torch.max((newvalue - mb.returns) ** 2, (v_clipped - mb.returns) ** 2).mean()
        else:
            v_loss = 0.5 * ((newvalue - mb.returns) ** 2).mean()
        entropy = entropy.mean()
        loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
        stats = {"policy_loss": pg_loss.detach(), "value_loss": v_loss.detach(), "entropy": entropy.detach()}
        with torch.no_grad():
            stats["old_approx_kl"] = (-logratio).mean()
            stats["approx_kl"] = (logratio.expm1() - logratio).mean()  # http://joschu.net/blog/kl-approx.html
            stats["clipfrac"] = (ratio != clipped).to(loss.dtype).mean()
        return loss, stats


class AuxLoss(nn.Module):
    """The joint objective of the auxiliary phase (arXiv:2009.04416 section 2) plus the value loss."""

    def __init__(self, agent: Agent, args: Args) -> None:
        super().__init__()
        self.agent = agent
        self.args = args
        self.aux_critic = layer_init(nn.Linear(agent.actor[-1].in_features, 1), std=1.0)

    def forward(self, obs: torch.Tensor, returns: torch.Tensor, old_pi: torch.Tensor) -> tuple[torch.Tensor, dict]:
        """obs (B, *shape), returns (B,), old_pi (B, .) -> the loss and, detached, its parts, as in `PPOLoss`."""
        pi, features = self.agent.pi(obs)
        aux_v_loss = 0.5 * ((self.aux_critic(features).squeeze(-1) - returns) ** 2).mean()
        kl_loss = self.agent.kl_divergence(old_pi, pi).mean()
        v_loss = 0.5 * ((self.agent.critic(obs).squeeze(-1) - returns) ** 2).mean()
        loss = aux_v_loss + self.args.beta_clone * kl_loss + v_loss
        stats = {"aux/aux_value_loss": aux_v_loss, "aux/kl_loss": kl_loss, "aux/real_value_loss": v_loss}
        return loss, {name: x.detach() for name, x in stats.items()}


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

    `next_value` (n,): of the observation after the last step. `dones`: whether step t ended an episode
    (CleanRL's dones[t] says this of step t - 1). Rewards of truncated steps include gamma times the last
    observation's value.
    """
    advantages = np.empty_like(values)
    lastgaelam = np.zeros_like(next_value)
    nonterminal = 1.0 - dones.astype(values.dtype)
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
    Within a minibatch they are in the order of environments: `run.backward` and `standardized` need each shard's
    as neighbours.
    """
    num_epochs, n, _ = draws.shape
    inds = draws.argsort(stable=True) * n + torch.arange(n)[:, None]
    return inds.view(num_epochs, n, num_minibatches, -1).transpose(1, 2).flatten(2)


def minibatch_advantages(advantages: torch.Tensor, inds: torch.Tensor, norm_adv: str, world: World) -> torch.Tensor:
    """Advantages (num_steps, n) -> of all minibatches, (num_epochs, num_minibatches, size), normalised.

    Not in the loss, which sees one shard only; and in one collective for all minibatches.
    """
    if norm_adv == "batch":
        advantages = standardized(advantages, world, dims=2)  # collective
    advantages = advantages.flatten()[inds]
    return standardized(advantages, world) if norm_adv == "minibatch" else advantages  # collective


COLUMNS = (
    "losses/policy_loss",
    "losses/value_loss",
    "losses/entropy",
    "losses/old_approx_kl",
    "losses/approx_kl",
    "losses/clipfrac",
    "losses/explained_variance",
    "losses/epochs",
    "losses/aux/aux_value_loss",
    "losses/aux/kl_loss",
    "losses/aux/real_value_loss",
    "time/aux",
)


def main(args: Args) -> None:
    """Train. Opens and closes all it needs; raises `BadInput` for settings that cannot work."""
    with open_run(args, __file__, COLUMNS, (gym.spaces.Discrete, gym.spaces.Box)) as run:  # collective
        train(args, run)


def train(args: Args, run: Run) -> None:
    """`run` has processes, log and files. `args.num_envs` is a total, `envs.num_envs` its part here."""
    world = run.world
    envs = run.envs
    obs_space = envs.single_observation_space
    image = len(obs_space.shape) == 3
    args.require(not args.norm_obs or not image, "norm_obs", "left off for image observations")
    args.require(args.network == "auto" or image, "network", "left off for vector observations")
    batch_size = args.num_envs * args.num_steps
    num_iterations = args.total_timesteps // batch_size

    # one seed for all processes: the same networks and the same generator
    torch.manual_seed(args.seed)
    seed = int(torch.randint(2**62, ()))  # with --seed itself it would repeat the initial weights' numbers
    generator = torch.Generator().manual_seed(seed)
    agent = Agent(obs_space, envs.single_action_space, args.network).to(run.device)
    parameters = list(agent.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, eps=args.adam_eps, fused=True)
    obs_moments = RunningMoments(obs_space.shape, args.norm_obs)  # False: no effect
    return_moments = RunningMoments((), args.norm_reward)
    aux_loss_fn = AuxLoss(agent, args).to(run.device)
    aux_parameters = list(aux_loss_fn.parameters())
    aux_optimizer = torch.optim.Adam(aux_parameters, lr=args.aux_learning_rate, eps=args.adam_eps, fused=True)
    run.register(agent=agent, optimizer=optimizer, generator=generator)  # saved, compared between processes
    run.register(aux_critic=aux_loss_fn.aux_critic, aux_optimizer=aux_optimizer)
    run.register(obs_moments=obs_moments, return_moments=return_moments)
    loss_fn = PPOLoss(agent, args)
    # DDP averages gradients of calls of its own `forward`: it wraps the losses, each of exactly the parameters
    # that it uses; the bare agent acts
    ddp_loss = DDP(loss_fn, **world.ddp_options) if world.world_size > 1 else loss_fn  # collective
    ddp_aux_loss = DDP(aux_loss_fn, **world.ddp_options) if world.world_size > 1 else aux_loss_fn  # collective
    policy = run.policy(agent)  # arrays -> out and values of the current weights, for vectors by numpy

    # every process draws the random numbers of all environments and keeps those of its own
    local_envs = world.local_slice(args.num_envs)
    draw = torch.rand if agent.discrete else torch.randn
    action_shape = () if agent.discrete else (agent.num_outputs,)
    shape = (args.num_steps, envs.num_envs)
    n_pi = args.n_pi if args.aux_epochs else 1
    phase_obs = np.zeros((n_pi, *shape, *obs_space.shape), obs_space.dtype)
    phase_returns = deque(maxlen=n_pi)
    actions = np.zeros((*shape, *action_shape), np.int64 if agent.discrete else np.float64)
    outs = np.zeros((*shape, agent.num_outputs))  # what the actor gives
    values = np.zeros(shape)
    rewards = np.zeros(shape)
    dones = np.zeros(shape, bool)

    def act(obs: np.ndarray) -> np.ndarray:
        """Greedy actions for evaluation."""
        with torch.no_grad():
            out, _ = agent(run.upload(obs_moments.normalized(obs)))
        return agent.mode(out.cpu().numpy())

    run.load_or_start(act, num_iterations * batch_size, minibatch_size=batch_size // args.num_minibatches)  # collective
    for iteration in range(run.global_step // batch_size + 1, num_iterations + 1):
        global_step = iteration * batch_size
        fraction = 1.0 - (iteration - 1) / num_iterations if args.anneal_lr else 1.0
        for group in optimizer.param_groups:
            group["lr"] = fraction * args.learning_rate
        for group in aux_optimizer.param_groups:
            group["lr"] = fraction * args.aux_learning_rate

        # rollout
        if run.needs_reset:  # at the beginning, and after a checkpoint
            next_obs = run.reset_environments()
            reward_sums = np.zeros(envs.num_envs)  # discounted, of the running episodes
        noise = draw(args.num_steps, args.num_envs, *action_shape, generator=generator)[:, local_envs].numpy()
        final_obs = {}  # of truncated episodes, by (step, environment): next_obs already begins the next episode
        obs = phase_obs[(iteration - 1) % n_pi]
        for step in range(args.num_steps):
            obs[step] = next_obs
            out, values[step] = policy(obs_moments.normalized(next_obs))
            outs[step] = out
            actions[step] = agent.sample(out, noise[step])
            next_obs, rewards[step], terminations, truncations, infos = envs.step(actions[step])
            dones[step] = terminations | truncations
            final_obs |= {(step, i): x for i, x in infos["final_obs"].items()}

        # values, advantages and returns
        learned_rewards = np.sign(rewards) if envs.atari else rewards
        discounted, reward_sums = discounted_returns(learned_rewards, dones, args.gamma, reward_sums)
        return_moments.update(discounted, world)  # collective
        learned_rewards = return_moments.scaled(learned_rewards)
        _, next_value = policy(obs_moments.normalized(next_obs))
        for (step, i), x in final_obs.items():  # truncation bootstraps, termination does not
            with torch.no_grad():  # one at a time: rounding depends on the batch's size
                _, final_value = agent(run.upload(obs_moments.normalized(x[None])))
            learned_rewards[step, i] += args.gamma * final_value.item()
        advantages = compute_gae(learned_rewards, values, next_value, dones, args.gamma, args.gae_lambda)
        arrays = (obs_moments.normalized(obs), actions, outs, values, advantages)
        t_obs, t_actions, t_outs, t_values, t_advantages = run.upload(*arrays)  # as tensors (num_steps, n, ...)
        obs_moments.update(obs, world)  # collective; for the next rollout
        t_logprobs, _ = run.by_shard(agent.log_prob, t_outs, t_actions)
        batch = [x.flatten(0, 1) for x in (t_obs, t_actions, t_logprobs, t_values, t_values + t_advantages)]

        # update
        draws = torch.rand(args.update_epochs, args.num_envs, args.num_steps, generator=generator)
        inds = minibatch_inds(draws[:, local_envs], args.num_minibatches).to(run.device)
        mb_advantages = minibatch_advantages(t_advantages, inds, args.norm_adv, world)  # collective
        for epoch in range(args.update_epochs):
            kls = []  # of each minibatch
            minibatches = Batch(*(x[inds[epoch]] for x in batch), mb_advantages[epoch])
            for i in range(args.num_minibatches):
                minibatch = Batch(*(x[i] for x in minibatches))
                optimizer.zero_grad()
                stats = run.backward(ddp_loss, minibatch)  # collective: averages gradients, keeps stats for run.log
                nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                optimizer.step()
                kls.append(stats["approx_kl"])
            if args.target_kl is not None and run.mean_over_ranks(kls) > args.target_kl:  # collective
                break

        # auxiliary phase
        phase_returns.append(batch[-1])
        phase_ends = iteration % n_pi == 0
        if args.aux_epochs and phase_ends:
            run.lap("time/aux")
            all_obs = phase_obs.reshape(-1, *phase_obs.shape[2:])  # (n_pi * num_steps, n, *shape): a GPU may hold less
            all_returns = torch.cat([*phase_returns])
            parts = (run.upload(obs_moments.normalized(x)) for x in phase_obs)  # one at a time
            old_pi = [run.by_shard(agent.pi, part)[0] for part in parts]
            old_pi = torch.cat(old_pi).flatten(0, 1)  # to be preserved
            draws = torch.rand(args.aux_epochs, args.num_envs, len(all_obs), generator=generator)
            aux_inds = minibatch_inds(draws[:, local_envs], args.num_aux_minibatches)
            for aux_epoch in range(args.aux_epochs):
                for mb_inds in aux_inds[aux_epoch]:
                    steps, places = np.divmod(mb_inds.numpy(), envs.num_envs)
                    mb_obs = run.upload(obs_moments.normalized(all_obs[steps, places]))
                    mb_inds = mb_inds.to(run.device)
                    aux_optimizer.zero_grad()
                    run.backward(ddp_aux_loss, mb_obs, all_returns[mb_inds], old_pi[mb_inds])  # collective
                    nn.utils.clip_grad_norm_(aux_parameters, args.max_grad_norm)
                    aux_optimizer.step()
                world.gather([])  # collective: stop requests
                if world.stop:
                    break
            run.lap("time/update")

        row = {"charts/learning_rate": fraction * args.learning_rate, "losses/epochs": epoch + 1}
        row |= explained_variance(advantages, values, world)  # collective
        run.log(global_step, row)  # collective; with ended episodes
        # a checkpoint within a policy phase would lose what the auxiliary phase needs
        if run.evaluate_and_checkpoint(global_step, may_checkpoint=phase_ends):  # collective; True: end the run
            break


if __name__ == "__main__":
    launch(main, Args)
