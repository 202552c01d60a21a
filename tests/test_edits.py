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
from torch import nn

from common.acting import PERIOD, Policy
from common.processes import BadInput, World
from runs import ROOT, edited

ACTOR_CRITIC = {"total_timesteps": 1024, "num_steps": 64, "eval_every": 0, "learning_rate": 3e-3}
REPLAY = {"total_timesteps": 1200, "learning_starts": 200, "batch_size": 8, "train_frequency": 8, "eval_every": 0}
SETTINGS = {"ppo_ddp.py": ACTOR_CRITIC, "ppg_ddp.py": ACTOR_CRITIC | {"n_pi": 2, "update_epochs": 4}}
SETTINGS |= {"dqn_ddp.py": REPLAY | {"log_every": 100}, "sac_ddp.py": REPLAY | {"log_every": 100}}
BOX, DUELING = {"env_id": "Pendulum-v1"}, {"dueling": True}

FEATURES = "        features = self.network(obs)\n"
TWICE = "        features = self.network(obs) + self.network(obs)\n"
OUT = "return self.actor(features),"
HEAD = "layer_init(nn.Linear(num_features, num_outputs), std=0.01)"
LOG_STD = "        if not self.discrete:\n            self.log_std"
BIAS = f"        self.more = nn.Parameter(torch.zeros(1))\n{LOG_STD}"
BY_TORCH = "it is not Linear, Tanh and ReLU, one after another"

# edit: (what stands there and what the user writes, and so on; settings), or also why numpy does not act
PPO = {
    "none": ([], {}),
    "none, Box": ([], BOX),
    "ReLU": ([("nn.Tanh()", "nn.ReLU()")], {}),
    "GELU": ([("nn.Tanh()", "nn.GELU()")], {}, BY_TORCH),
    "deeper": ([("second, nn.Tanh())", "second, nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.ReLU())")], {}),
    "layer norm": ([("second, nn.Tanh())", "second, nn.LayerNorm(64))")], {}, BY_TORCH),
    "spectral norm": ([(HEAD, f"nn.utils.parametrizations.spectral_norm({HEAD})")], {}, BY_TORCH),
    "input scaling": ([(FEATURES, FEATURES.replace("(obs)", "(obs / 10)"))], {}, BY_TORCH),
    "branch": ([(FEATURES, f"        obs = obs / 10 if len(obs) > 1 else obs\n{FEATURES}")], {}, BY_TORCH),
    "squashed mean": ([(OUT, "return 2 * self.actor(features).tanh(),")], BOX, BY_TORCH),
    "a parameter beside": ([(LOG_STD, BIAS), (OUT, "return self.actor(features) + self.more,")], {}, BY_TORCH),
}
DQN = {
    "none": ([], {}),
    "dueling": ([], DUELING, BY_TORCH),
    "deeper": ([("nn.Linear(width, size)", "nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, size)")], {}),
    "layer norm": ([("num_features), nn.ReLU())\n", "num_features), nn.LayerNorm(num_features))\n")], {}, BY_TORCH),
    "features twice": ([(FEATURES, TWICE)], {}, BY_TORCH),
    "dropout": ([("width), nn.ReLU()", "width), nn.Dropout()")], {}, BY_TORCH),
}
PPG = {edit: PPO[edit] for edit in ("none", "none, Box", "GELU")}
EDITS = {"ppo_ddp.py": PPO, "ppg_ddp.py": PPG, "dqn_ddp.py": DQN}


def edited_module(tmp_path, script, edits):
    """The module of an edited copy of a script."""
    (tmp_path / script).write_text(edited(script, (ROOT / script).read_text(), *edits))
    spec = importlib.util.spec_from_file_location("edited", tmp_path / script)
    module = sys.modules["edited"] = importlib.util.module_from_spec(spec)  # where a dataclass looks for its own
    spec.loader.exec_module(module)
    return module


def network_of(module, settings):
    """A script's network for vectors of 4."""
    space = gym.spaces.Box(-1, 1, (4,))
    if hasattr(module, "QNetwork"):
        return module.QNetwork(space, 3, settings.get("dueling", False), "auto", True)
    box = gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 5]))
    return module.Agent(space, box if settings == BOX else gym.spaces.Discrete(3))


@pytest.mark.parametrize("script, edit", [(script, edit) for script in EDITS for edit in EDITS[script]])
def test_what_acts_is_the_network(script, edit, tmp_path, float64):
    """By numpy, at any parameters, without another look; otherwise the network, and one line says why."""
    edits, settings, *reason = EDITS[script][edit]
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    network = network_of(edited_module(tmp_path, script, edits), settings)
    notes = []
    policy = Policy(network, World(False, None), notes.append)
    for _ in range(PERIOD + 1):
        policy(rng.normal(size=(5, 4)))
        assert [*map(bool, policy.steps)] == [not reason], notes
    if reason:
        (note,) = notes
        assert re.search(f"acts by torch, more slowly than by numpy .*{reason[0]}", note) and "\n" not in note
        return
    for size in (1, -1, 8, -8):
        with torch.no_grad():
            for p in network.parameters():
                p.copy_(size * torch.randn(p.shape) / (p.shape[-1] ** 0.5 if p.dim() > 1 else 1))
        obs = rng.normal(size=(5, 4))
        expected = policy._torch(obs)
        np.testing.assert_allclose(policy(obs), expected, rtol=1e-10, atol=1e-12 * np.abs(expected).max())
    assert not notes


def test_an_edit_that_shows_late_is_found(float64):
    """What `forward` does with a number that changes during the run: within a period the module acts, to the end."""
    layers = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    module = nn.Sequential(layers)
    module.forward = lambda obs: layers(obs) if module.factor == 1.0 else module.factor * layers(obs)
    module.factor = 1.0
    notes = []
    policy = Policy(module, World(False, None), notes.append)
    rng = np.random.default_rng(0)
    for call in range(2 * PERIOD):
        module.factor = 1.0 if call <= 5 or call > PERIOD + 5 else 2.0
        policy(rng.normal(size=(5, 4)))
        assert [*map(bool, policy.steps)] == [call < PERIOD]
    assert len(notes) == 1 and BY_TORCH in notes[0]


RUNS = [("ppo_ddp.py", "branch"), ("ppg_ddp.py", "none"), ("dqn_ddp.py", "dueling"), ("dqn_ddp.py", "deeper")]


@pytest.mark.parametrize("script, edit", RUNS)
def test_a_run_of_an_edited_network_ends_well(script, edit, tmp_path, monkeypatch, capfd):
    """And it says once, in one line, if the network itself acts."""
    edits, settings, *reason = EDITS[script][edit]
    module = edited_module(tmp_path, script, edits)
    by_numpy = []  # of each call
    call = Policy.__call__

    def watched(self, obs):
        result = call(self, obs)
        by_numpy.append(*map(bool, self.steps))
        return result

    monkeypatch.setattr(Policy, "__call__", watched)
    module.main(module.Args(**SETTINGS[script] | settings, cuda=False, run_dir=str(tmp_path / "run")))
    assert len(by_numpy) >= 3 * PERIOD and set(by_numpy) == {not reason}
    assert capfd.readouterr().out.count("acts by torch") == len(reason)
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") >= 3


ONLY_PPO = {  # lines of PPO that PPG does not have; all others stand in it, in the same order
    "Args.__post_init__": [],
    "Agent.__init__": [  # for images, one network with two heads
        "actor, critic = (hidden,",
        "actor, critic = (nn.Sequential(),",
        "else:",
        "hidden, num_features = ",
        "if len(obs_space.shape) == 3:",
        "self.network = hidden",
        "self.network = nn.Identity()",
    ],
    "Agent.forward": ["features = self.network(obs)", "return (self.actor(features),"],
    "train": ["if run.evaluate_and_checkpoint(", "obs = np.zeros(("],  # PPG's are a phase's
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
        lacking = sorted(line[2:].strip() for line in lines if line.startswith("- "))
        assert len(lacking) == len(only) and all(map(str.startswith, lacking, only)), lacking


@pytest.mark.parametrize(
    "left_out, lacking", [("optimizer=optimizer, ", "its optimiser"), ("agent=agent, ", "its module")]
)
def test_what_is_trained_and_not_registered_is_refused(left_out, lacking, tmp_path):
    """A resumed run would start it anew."""
    module = edited_module(tmp_path, "ppo_ddp.py", [(left_out, "")])
    said = f"^run.register: agent.*weight is trained, but {lacking} is not registered.$"
    with pytest.raises(BadInput, match=said):
        module.main(module.Args(**ACTOR_CRITIC, cuda=False, run_dir=str(tmp_path / "run")))
