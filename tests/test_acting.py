"""Acting: whatever is edited in a network, actions and values are those of the edited one."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import dqn_ddp
import ppg_ddp
import ppo_ddp
from common.acting import PERIOD, Policy
from common.processes import World
from runs import fork, train

SPACE = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
DISCRETE, BOX = gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,), np.float32)
OBS = np.random.default_rng(0).normal(size=(3 * PERIOD, 6, 4)).astype(np.float32)


class Agent(ppo_ddp.Agent):
    """With a line of `forward` of a user's own, and what it may use."""

    def __init__(self, line=None, space=DISCRETE) -> None:
        super().__init__(SPACE, space)
        self.line = line
        self.temperature = nn.Parameter(torch.ones(()))  # until it is learned
        self.scale = 1.0

    def forward(self, obs):
        out, values = super().forward(obs)
        return self.line(self, obs, out) if self.line else out, values


class Scaled(nn.Linear):
    def __init__(self, *sizes) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(()))  # until it is learned

    def forward(self, x):
        return self.scale * super().forward(x)


class Residual(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + x[:, :3]


def made(change):
    def make():
        agent = Agent()
        change(agent)
        return agent

    return make


EDITS = {
    "scale": lambda: Agent(lambda m, obs, out: 1.01 * out),
    "of observations": lambda: Agent(lambda m, obs, out: out + 0.1 * obs[:, :3]),
    "learned temperature": lambda: Agent(lambda m, obs, out: out / m.temperature),
    "hook": made(lambda m: m.actor[0].register_forward_hook(lambda layer, x, y: y + 0.5)),
    "weight normalisation": made(lambda m: nn.utils.parametrizations.weight_norm(m.actor[2])),
    "forward of one layer": made(lambda m: setattr(m.actor[2], "forward", lambda x: x[:, :64] / 2)),
    "another activation": made(lambda m: m.actor.insert(1, nn.LayerNorm(64))),
    "subclassed layer": made(lambda m: m.actor.__setitem__(4, Scaled(64, 3))),
    "subclassed Sequential": made(lambda m: setattr(m, "actor", Residual(*m.actor))),
    "another features": lambda: Agent().apply(lambda m: hasattr(m, "network") and setattr(m, "network", nn.Softsign())),
    "a mask in place": lambda: Agent(lambda m, obs, out: out.masked_fill_(obs[:, :3] < -3, -torch.inf)),
    "a layer in place": made(lambda m: setattr(m, "forward", lambda obs: m.actor[1:](m.actor[0](obs).clamp_(-99, 99)))),
    "observations in place": made(lambda m: setattr(m, "forward", lambda obs: m.actor(obs.clamp_(-99, 99)))),
    "values": made(lambda m: setattr(m, "forward", lambda obs: (m.actor(obs), 2 * m.critic(obs)[:, 0]))),
    "hook on the critic": made(lambda m: m.critic[0].register_forward_hook(lambda layer, x, y: y + 0.5)),
    "dueling": lambda: dqn_ddp.QNetwork(SPACE, 3, True, "auto", True),
}
UNEDITED = {
    "frozen actor": made(lambda m: m.actor.requires_grad_(False)),
    "ppo": lambda: ppo_ddp.Agent(SPACE, DISCRETE),
    "values by index": made(lambda m: setattr(m, "forward", lambda obs: (m.actor(obs), m.critic(obs)[:, 0]))),
    "ppo box": lambda: ppo_ddp.Agent(SPACE, BOX),
    "ppg": lambda: ppg_ddp.Agent(SPACE, DISCRETE),
    "dqn": lambda: dqn_ddp.QNetwork(SPACE, 3, False, "auto", True),
    "without a bias": made(lambda m: m.actor.__setitem__(4, nn.Linear(64, 3, bias=False))),
}


def policy_of(module, notes, world=None):
    return Policy(module, module, world or World(False), notes.append)


def by_numpy_in(policy):
    return [bool(steps) for steps in policy.steps]


def results_of(module, obs):
    with torch.no_grad():
        out = module(torch.from_numpy(obs).to(torch.get_default_dtype()))
    return [x.numpy() for x in (out if isinstance(out, tuple) else (out,))]


def act_and_learn(make, by_numpy):
    """Three periods of calls, between which parameters move -> what was said."""
    torch.manual_seed(0)
    module, notes = make(), []
    policy = policy_of(module, notes)
    for call, obs in enumerate(OBS):
        for result, expected in zip(policy(obs), results_of(module, obs), strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-5, err_msg=str(call))
        assert by_numpy_in(policy) == [by_numpy]
        if call % 16 == 15:
            for p in module.parameters():
                p.detach().add_(0.05 * torch.randn(p.shape))
    return notes


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_network_acts_as_it_is_written(edit):
    [note] = act_and_learn(EDITS[edit], by_numpy=False)
    assert " acts by torch, more slowly than by numpy (" in note and "\n" not in note


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("network", UNEDITED)
def test_an_unedited_network_acts_by_numpy(network, dtype, float64):
    torch.set_default_dtype(dtype)
    assert act_and_learn(UNEDITED[network], by_numpy=True) == []


CHANGES = {  # during training
    "attribute": (lambda m: setattr(m, "scale", 2.0), False),
    "other memory": (lambda m: setattr(m.actor[0].weight, "data", torch.ones(64, 4)), True),
    "another weight": (lambda m: setattr(m.actor[4], "weight", nn.Parameter(torch.ones(3, 64))), True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_during_training_is_found_at_the_next_comparison(change):
    """Then the module acts to the end. After a restart numpy is tried anew."""
    make_change, by_numpy = CHANGES[change]
    notes = []
    module = Agent(lambda m, obs, out: out if m.scale == 1.0 else out * m.scale)
    policy = policy_of(module, notes)
    policy(OBS[0])
    assert by_numpy_in(policy) == [True]
    make_change(module)
    for obs in OBS[1 : PERIOD + 1]:
        out, _ = policy(obs)
    np.testing.assert_allclose(out, results_of(module, obs)[0], rtol=1e-5, atol=1e-6)
    assert by_numpy_in(policy) == [by_numpy] and len(notes) == (not by_numpy)
    module.scale = 1.0
    for obs in OBS[:PERIOD]:
        policy(obs)
    assert by_numpy_in(policy) == [by_numpy]
    policy.calls = 0
    policy(OBS[0])
    assert by_numpy_in(policy) == [True]


def test_a_shard_acts_alike_whichever_process_it_is_in():
    """One whose results differ, or are no numbers, is acted for by the module alone."""
    torch.manual_seed(0)
    module, notes = Agent(lambda m, obs, out: out), []
    together, *apart = (policy_of(module, notes, World(False, shards)) for shards in (2, 1, 1))
    for call, obs in enumerate(OBS):
        if call >= PERIOD + 5:  # found at call 2 * PERIOD
            obs = np.concatenate([obs[:3], np.inf * obs[3:]])
        parts = [policy(x) for policy, x in zip(apart, np.split(obs, 2), strict=True)]
        for result, of_parts in zip(together(obs), zip(*parts, strict=True), strict=True):
            assert result.tobytes() == np.concatenate(of_parts).tobytes()
        assert by_numpy_in(together) == [True, call < 2 * PERIOD]
    assert len(notes) == 2 and notes[0] == notes[1]


def test_products_of_shards_at_once_are_those_of_each_alone():
    """To the bit, of any shape and address, as numpy acts for all shards at once."""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        shards, n, d, size = 2 ** rng.integers(4), rng.integers(1, 20), rng.integers(1, 400), rng.choice([1, 2, 17, 64])
        dtype = rng.choice([np.float32, np.float64])
        memory = rng.normal(size=shards * n * d + 5).astype(dtype)[rng.integers(5) :]
        x = memory[: shards * n * d].reshape(shards, n, d)
        weight = rng.normal(size=(size, d)).astype(dtype).T
        apart = [np.tanh(part.copy() @ weight) for part in x]
        assert np.array_equal(np.tanh(x @ weight), apart), (x.shape, size, dtype)


def test_images_are_for_the_module():
    notes = []
    agent = ppo_ddp.Agent(gym.spaces.Box(0, 1, (3, 10, 10), np.float32), DISCRETE)
    policy = policy_of(agent, notes)
    obs = np.ones((2, 3, 10, 10), np.float32)
    assert all(map(np.array_equal, policy(obs), results_of(agent, obs)))
    assert by_numpy_in(policy) == [False] and notes == []


def calls_of_dqn(run_dir: Path) -> None:
    call, shards = Policy.__call__, []
    Policy.__call__ = lambda self, obs: (shards.append(len(self.world.shards)), call(self, obs))[1]
    train(dqn_ddp, run_dir, total_timesteps=200, learning_starts=180, start_e=0.9, end_e=0.9, shards=2)
    print(f"{len(shards)} calls for {shards[0]}", flush=True)


def test_every_process_acts_equally_often(tmp_path):
    """Also where all actions of a process are random, so that comparisons meet the same observations."""
    texts = [fork(calls_of_dqn, (tmp_path / str(n),), n, tmp_path / f"{n}.out", {}) for n in (1, 2)]
    [alone] = [line for line in texts[0].splitlines() if " calls for " in line]
    others = [line for line in texts[1].splitlines() if " calls for " in line]
    assert others == 2 * [alone.replace("for 2", "for 1")] and 5 < int(alone.split()[0]) < 45
