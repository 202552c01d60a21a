"""A user's edits of a copied script: what acts is always what learns.

And what PPO and PPG define alike is alike, source for source.
"""

import ast
import difflib
import importlib.util
import re
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

from common.acting import Acting
from common.distributed import World
from common.errors import BadInput, Fault
from runs import ROOT, edited

ACTOR_CRITIC = {"total_timesteps": 1024, "num_steps": 64, "eval_every": 0, "learning_rate": 3e-3}
REPLAY = {"total_timesteps": 1200, "learning_starts": 200, "batch_size": 8, "train_frequency": 8, "eval_every": 0}
SETTINGS = {"ppo_ddp.py": ACTOR_CRITIC, "ppg_ddp.py": ACTOR_CRITIC | {"n_pi": 2, "update_epochs": 4}}
SETTINGS |= {"dqn_ddp.py": REPLAY | {"log_every": 100}, "sac_ddp.py": REPLAY | {"log_every": 100}}
BOX, DUELING = {"env_id": "Pendulum-v1"}, {"dueling": True}

CAST = "        obs = self.pixels(obs) if self.image else obs.to(torch.get_default_dtype())\n"
APPLY = "        return self.layers(obs)\n"
LAYERS = "[layer_init(nn.Linear(size, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]"
RESIDUAL = "        x = self.layers[:2](obs)\n        return self.layers[2:](x) + x\n"
CONCAT = "torch.cat([out, self.log_std.expand_as(out)], -1)"
HEAD = "layer_init(nn.Linear(self.trunk.num_features, size), std=0.01)"
WIDE_HEAD = "nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, size))"
BOUNDED = "log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std.tanh() + 1)"
GATE = "self.gate = nn.Parameter(torch.zeros(()))\n"
SHAPE = "        self.image = len(space.shape) == 3\n"
GATED = "        x = self.layers[:2](obs)\n        return self.layers[2:](x) + self.gate * x\n"
SCALED = CAST.replace("())\n", "()) / 10\n")
BRANCH = "        obs = obs / 10 if obs.sum() > 0 else obs\n"

# edit: (what stands there and what the user writes, and so on; settings), or also why no translation acts
PPO = {
    "none": ([], {}),
    "none, Box": ([], BOX),
    "deeper": ([("nn.Tanh()]", "nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]")], {}),
    "layer norm": ([("64)), nn.Tanh()]", "64)), nn.LayerNorm(64)]")], {}),
    "another head": ([(HEAD, WIDE_HEAD)], BOX),
    "residual": ([(APPLY, RESIDUAL)], {}),
    "gated residual": ([(SHAPE, f"{SHAPE}        {GATE}"), (APPLY, GATED)], {}),
    "input scaling": ([(CAST, SCALED)], {}),
    "squashed mean": ([(CONCAT, CONCAT.replace("[out,", "[out.tanh(),"))], BOX),
    "clamped deviation": ([("self.log_std.exp", "self.log_std.clamp(-5, 2).exp")], BOX),
    "deviation of the state": ([(CONCAT, "torch.cat([out, features[:, :1].expand_as(out)], -1)")], BOX),
    "dropout": (
        [(LAYERS, LAYERS.replace("nn.Tanh()", "nn.Dropout(0.1)", 1))],
        {},
        "dropout .*, in Dropout trunk.layers.1",
    ),
    "branch": ([(CAST, CAST + BRANCH)], {}, "control flow, in Trunk trunk"),
    "spectral norm": ([(HEAD, f"nn.utils.parametrizations.spectral_norm({HEAD})")], {}, "parametrization, in .* actor"),
    "old weight norm": ([(HEAD, f"nn.utils.weight_norm({HEAD})")], {}, "a hook or a parametrization, in Linear actor"),
}
PPO |= {x: ([("nn.Tanh()", f"nn.{x}()")], {}) for x in ("ReLU", "ELU", "SiLU", "GELU", "LeakyReLU", "Softplus")}
DQN = {
    "none": ([], {}),
    "dueling": ([], DUELING),
    "deeper": ([("width, size)", "width, 32), nn.Tanh(), nn.Linear(32, size)")], {}),
    "layer norm": ([("num_features), nn.ReLU()]", "num_features), nn.LayerNorm(120)]")], DUELING),
    "input scaling": ([(CAST, SCALED)], {}),
    "another head": ([("        q = self.head(features)\n", "        q = 2 * self.head(features)\n")], {}),
    "dueling by maximum": ([("q.mean(-1, keepdim=True)", "q.amax(-1, keepdim=True)")], DUELING),
    "dropout": ([("nn.ReLU()]", "nn.Dropout()]")], {}, "dropout is not translated, in Dropout trunk.layers.1"),
}
SAC = {
    "none": ([], {}),
    "deeper": ([("(256, 256), nn.ReLU()\n", "(256, 64), nn.Tanh(), nn.Linear(64, 256), nn.ReLU()\n")], {}),
    "layer norm": ([("256), nn.ReLU()\n", "256), nn.LayerNorm(256)\n")], {}),
    "clamped deviation": ([(BOUNDED, "log_std = log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)")], {}),
    "squashed mean": ([("u = mean + ", "u = mean.tanh() + ")], {}),
    "input scaling": ([("self.layers(obs.to(noise.dtype))", "self.layers(obs.to(noise.dtype) / 10)")], {}),
    "softsign": ([("self.scale * u.tanh()", "self.scale * F.softsign(u)")], {}, "softsign is not translated"),
}
EDITS = {"ppo_ddp.py": PPO, "ppg_ddp.py": PPO, "dqn_ddp.py": DQN, "sac_ddp.py": SAC}


def edited_module(tmp_path, script, edits):
    """The module of an edited copy of a script."""
    (tmp_path / script).write_text(edited(script, (ROOT / script).read_text(), *edits))
    spec = importlib.util.spec_from_file_location("edited", tmp_path / script)
    module = sys.modules["edited"] = importlib.util.module_from_spec(spec)  # where a dataclass looks for its own
    spec.loader.exec_module(module)
    return module


def network_and_inputs(module, settings):
    """A script's network for vectors of 4, and a function that draws inputs of it."""
    rng, cpu, space = np.random.default_rng(0), torch.device("cpu"), gym.spaces.Box(-1, 1, (4,))
    box = gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 5]))
    if hasattr(module, "Actor"):
        return module.Actor(space, box, cpu), lambda: (rng.normal(size=(5, 4)).astype("f"), rng.normal(size=(5, 2)))
    if hasattr(module, "QNetwork"):
        network = module.QNetwork(space, 3, settings.get("dueling", False))
    else:
        network = module.Agent(space, box if settings == BOX else gym.spaces.Discrete(3))
    return network, lambda: (rng.normal(size=(5, 4)).astype("f"),)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("script, edit", [(script, edit) for script in EDITS for edit in EDITS[script]])
def test_what_acts_is_the_network(script, edit, tmp_path, float64):
    """A translation, at any parameters, without another look; otherwise the network, and one line says why."""
    edits, settings, *reason = EDITS[script][edit]
    torch.manual_seed(0)
    network, inputs = network_and_inputs(edited_module(tmp_path, script, edits), settings)
    notes = []
    acting = Acting(network, World(False), [slice(0, 5)], notes.append)
    act = acting.refresh(*inputs())
    assert bool(acting.derived) != bool(reason), notes
    if reason:
        (note,) = notes
        assert re.search(f"acts by torch, more slowly than by numpy .*{reason[0]}", note) and "\n" not in note
        assert acting.refresh(*inputs()) == act == acting.network and len(notes) == 1  # and it is said once
        return
    for size in (1, -1, 8, -8):
        with torch.no_grad():
            for p in network.parameters():
                p.copy_(size * torch.randn(p.shape) / (p.shape[-1] ** 0.5 if p.dim() > 1 else 1))
        x = inputs()
        expected = acting.network(*x)
        np.testing.assert_allclose(act(*x), expected, rtol=1e-10, atol=1e-12 * np.abs(expected).max())
    assert not notes


def train(tmp_path, script, edits, settings, monkeypatch) -> list[bool]:
    """Run an edited script in this process -> whether a translation acted, for each time that this was looked at."""
    module, derived, calls = edited_module(tmp_path, script, edits), [], []
    refresh, network = Acting.refresh, Acting.network

    def watched_refresh(self, *inputs):
        act = refresh(self, *inputs)
        derived.append(act == self.derived)
        return act

    def watched_network(self, *inputs):
        calls.append(inputs)
        return network(self, *inputs)

    monkeypatch.setattr(Acting, "refresh", watched_refresh)
    monkeypatch.setattr(Acting, "network", watched_network)
    module.main(module.Args(**SETTINGS[script] | settings, cuda=False, run_dir=str(tmp_path / "run")))
    assert (len(calls) == len(derived)) == all(derived)  # the network is called for comparisons alone, or acts
    return derived


RUNS = [("ppo_ddp.py", "none"), ("ppo_ddp.py", "none, Box"), ("ppo_ddp.py", "residual"), ("ppo_ddp.py", "branch")]
RUNS += [("ppg_ddp.py", "none"), ("ppg_ddp.py", "spectral norm"), ("dqn_ddp.py", "none"), ("dqn_ddp.py", "dueling")]
RUNS += [("dqn_ddp.py", "dropout"), ("sac_ddp.py", "none"), ("sac_ddp.py", "layer norm"), ("sac_ddp.py", "softsign")]


@pytest.mark.parametrize("script, edit", RUNS)
def test_a_run_of_an_edited_network_ends_well(script, edit, tmp_path, monkeypatch, capfd):
    """And it says once, in one line, if the network itself acts."""
    edits, settings, *reason = EDITS[script][edit]
    derived = train(tmp_path, script, edits, settings, monkeypatch)
    assert len(derived) >= 3 and set(derived) == {not reason}
    assert capfd.readouterr().out.count("acts by torch") == len(reason)
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") >= 3


ROLLOUT = "        rollout_start = time.perf_counter()\n", 1.5, "agent.trunk"  # a line of the loop, a factor, a module
COLLECT = "        update_start = time.perf_counter()\n", 1.001
LOOPS = {"ppo_ddp.py": ROLLOUT, "ppg_ddp.py": ROLLOUT}
LOOPS |= {"dqn_ddp.py": (*COLLECT, "q_network.trunk"), "sac_ddp.py": (*COLLECT, "actor")}


@pytest.mark.parametrize("script", LOOPS)
def test_a_number_that_changes_elsewhere_ends_the_run(script, tmp_path, monkeypatch):
    """A global that the loop changes: the translation has the old one, which a comparison finds; rows stay."""
    line, factor, _ = LOOPS[script]
    edits = [("# ALGO LOGIC: networks\n", "SCALE = [1.0]\n"), ("self.layers(obs", "self.layers(SCALE[0] * obs")]
    edits += [(line, f"{line}        SCALE[0] *= {factor}\n")]
    said = r"^\w+\.forward differs from its translation, by .*: keep each number that it reads and that changes in an "
    with pytest.raises(Fault, match=f"{said}attribute of its module.$"):
        train(tmp_path, script, edits, {}, monkeypatch)
    assert 1 <= (tmp_path / "run" / "metrics.csv").read_text().count("\n") - 1 < 12


@pytest.mark.parametrize("script", LOOPS)
def test_an_attribute_that_changes_is_followed(script, tmp_path, monkeypatch):
    line, factor, module = LOOPS[script]
    edits = [("super().__init__()\n", "super().__init__()\n        self.gain = 1.0\n")]
    edits += [("self.layers(obs", "self.layers(self.gain * obs"), (line, f"{line}        {module}.gain *= {factor}\n")]
    assert set(train(tmp_path, script, edits, {}, monkeypatch)) == {True}


ONLY_PPO = {  # lines of PPO that PPG does not have; all others stand in it, in the same order
    "Args.__post_init__": [],
    "Agent.__init__": ["self.value_trunk = None if self.trunk.image else Trunk(obs_space, network)"],
    "Agent.value": ["return self.critic(features if self.value_trunk is None else self.value_trunk(obs)).squeeze(-1)"],
    "collect": [  # PPG's observations are those of a whole phase
        "obs = envs.storage(*shape)",
        "rollouts.append(Rollout(*seen, *arrays, next_obs[part], finals))",
        "while True:",
    ],
    "main": [],
    "train": [
        "if run.boundary(iteration * batch_size, act):",
        "options = {'gradient_as_bucket_view': run.device.type == 'cpu', 'static_graph': True}",
        "parts = rollouts = batches = None",
    ],
}


def definitions(script) -> dict[str, str]:
    """Every function and method by its dotted name, without docstrings and comments."""
    found = {}

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                if ast.get_docstring(child):
                    child.body.pop(0)
                found[prefix + child.name] = ast.unparse(child)

    visit(ast.parse((ROOT / script).read_text()), "")
    return found


def test_what_ppo_and_ppg_define_alike_is_alike():
    """All that both define is equal; where PPG adds to a function, it has all of PPO's lines but those listed."""
    ppo, ppg = definitions("ppo_ddp.py"), definitions("ppg_ddp.py")
    assert set(ppo) <= set(ppg)
    assert {name for name in ppo if ppo[name] != ppg[name]} == set(ONLY_PPO)
    for name, only in ONLY_PPO.items():
        lines = difflib.ndiff(ppo[name].split("\n"), ppg[name].split("\n"))
        assert sorted(line[2:].strip() for line in lines if line.startswith("- ")) == only


@pytest.mark.parametrize(
    "left_out, lacking", [("optimizer=optimizer, ", "its optimiser"), ("agent=agent, ", "its module")]
)
def test_what_is_trained_and_not_kept_is_refused(left_out, lacking, tmp_path):
    """A resumed run would start it anew."""
    module = edited_module(tmp_path, "ppo_ddp.py", [(left_out, "")])
    with pytest.raises(BadInput, match=f"^run.keep: agent.*weight is trained, but {lacking} is not kept"):
        module.main(module.Args(**ACTOR_CRITIC, cuda=False, run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
