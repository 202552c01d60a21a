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

from common.acting import PERIOD, Acting
from common.distributed import World
from common.errors import BadInput
from runs import ROOT, edited

ACTOR_CRITIC = {"total_timesteps": 1024, "num_steps": 64, "eval_every": 0, "learning_rate": 3e-3}
REPLAY = {"total_timesteps": 1200, "learning_starts": 200, "batch_size": 8, "train_frequency": 8, "eval_every": 0}
SETTINGS = {"ppo_ddp.py": ACTOR_CRITIC, "ppg_ddp.py": ACTOR_CRITIC | {"n_pi": 2, "update_epochs": 4}}
SETTINGS |= {"dqn_ddp.py": REPLAY | {"log_every": 100}, "sac_ddp.py": REPLAY | {"log_every": 100}}
BOX, DUELING = {"env_id": "Pendulum-v1"}, {"dueling": True}

CAST = "        obs = self.pixels(obs) if self.image else obs.to(torch.get_default_dtype())\n"
APPLY = "        return self.layers(obs)\n"
RESIDUAL = "        x = self.layers[:2](obs)\n        return self.layers[2:](x) + x\n"
CONCAT = "torch.cat([out, self.log_std.expand_as(out)], -1)"
HEAD = "layer_init(nn.Linear(self.trunk.num_features, size), std=0.01)"
SCALED = CAST.replace("())\n", "()) / 10\n")
BRANCH = "        obs = obs / 10 if obs.sum() > 0 else obs\n"

# edit: (what stands there and what the user writes, and so on; settings), or also why no translation acts
PPO = {
    "none": ([], {}),
    "none, Box": ([], BOX),
    "deeper": ([("nn.Tanh()]", "nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]")], {}),
    "layer norm": ([("64)), nn.Tanh()]", "64)), nn.LayerNorm(64)]")], {}),
    "residual": ([(APPLY, RESIDUAL)], {}),
    "input scaling": ([(CAST, SCALED)], {}),
    "squashed mean": ([(CONCAT, CONCAT.replace("[out,", "[out.tanh(),"))], BOX),
    "branch": ([(CAST, CAST + BRANCH)], {}, "control flow"),
    "spectral norm": ([(HEAD, f"nn.utils.parametrizations.spectral_norm({HEAD})")], {}, "parametrization"),
}
PPO |= {x: ([("nn.Tanh()", f"nn.{x}()")], {}) for x in ("ReLU", "SiLU", "GELU")}
DQN = {
    "none": ([], {}),
    "dueling": ([], DUELING),
    "deeper": ([("width, size)", "width, 32), nn.Tanh(), nn.Linear(32, size)")], {}),
    "layer norm": ([("num_features), nn.ReLU()]", "num_features), nn.LayerNorm(120)]")], DUELING),
    "input scaling": ([(CAST, SCALED)], {}),
    "dueling by maximum": ([("q.mean(-1, keepdim=True)", "q.amax(-1, keepdim=True)")], DUELING),
    "dropout": ([("nn.ReLU()]", "nn.Dropout()]")], {}, "its translation gives other numbers"),
}
SAC = {
    "none": ([], {}),
    "deeper": ([("(256, 256), nn.ReLU()\n", "(256, 64), nn.Tanh(), nn.Linear(64, 256), nn.ReLU()\n")], {}),
    "layer norm": ([("256), nn.ReLU()\n", "256), nn.LayerNorm(256)\n")], {}),
}
PPG = {edit: PPO[edit] for edit in ("none", "none, Box")}
EDITS = {"ppo_ddp.py": PPO, "ppg_ddp.py": PPG, "dqn_ddp.py": DQN, "sac_ddp.py": SAC}


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
        network = module.QNetwork(space, 3, settings.get("dueling", False), "auto", True)
    else:
        network = module.Agent(space, box if settings == BOX else gym.spaces.Discrete(3))
    return network, lambda: (rng.normal(size=(5, 4)).astype("f"),)


@pytest.mark.parametrize("script, edit", [(script, edit) for script in EDITS for edit in EDITS[script]])
def test_what_acts_is_the_network(script, edit, tmp_path, float64):
    """A translation, at any parameters, without another look; otherwise the network, and one line says why."""
    edits, settings, *reason = EDITS[script][edit]
    torch.manual_seed(0)
    network, inputs = network_and_inputs(edited_module(tmp_path, script, edits), settings)
    notes = []
    policy = Acting(network, World(False), [slice(0, 5)], notes.append)
    for _ in range(PERIOD + 1):
        policy(*inputs())
        assert policy.functions == [policy.by_module if reason else policy.derived.function], notes
    if reason:
        (note,) = notes
        assert re.search(f"acts by torch, more slowly than by numpy .*{reason[0]}", note) and "\n" not in note
        return
    for size in (1, -1, 8, -8):
        with torch.no_grad():
            for p in network.parameters():
                p.copy_(size * torch.randn(p.shape) / (p.shape[-1] ** 0.5 if p.dim() > 1 else 1))
        x = inputs()
        expected = policy.by_module(*x)
        np.testing.assert_allclose(policy(*x), expected, rtol=1e-10, atol=1e-12 * np.abs(expected).max())
    assert not notes


RUNS = [("ppo_ddp.py", "branch"), ("ppg_ddp.py", "none"), ("dqn_ddp.py", "dueling"), ("sac_ddp.py", "layer norm")]


@pytest.mark.parametrize("script, edit", RUNS)
def test_a_run_of_an_edited_network_ends_well(script, edit, tmp_path, monkeypatch, capfd):
    """And it says once, in one line, if the network itself acts."""
    edits, settings, *reason = EDITS[script][edit]
    module = edited_module(tmp_path, script, edits)
    derived = []  # whether a translation acted, for each call
    call = Acting.__call__

    def watched(self, *inputs):
        result = call(self, *inputs)
        derived.append(self.functions != [self.by_module])
        return result

    monkeypatch.setattr(Acting, "__call__", watched)
    module.main(module.Args(**SETTINGS[script] | settings, cuda=False, run_dir=str(tmp_path / "run")))
    assert len(derived) >= 3 * PERIOD and set(derived) == {not reason}
    assert capfd.readouterr().out.count("acts by torch") == len(reason)
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") >= 3


ONLY_PPO = {  # lines of PPO that PPG does not have; all others stand in it, in the same order
    "Args.__post_init__": [],
    "Agent.__init__": ["self.value_trunk = None if self.trunk.image else Trunk("],
    "Agent.value": ["return self.critic(features if self.value_trunk is None else"],
    "collect": ["obs = envs.storage(", "rollout = Rollout(", "while True:"],  # PPG's observations are a whole phase's
    "train": ["for group in optimizer.param_groups:", "if run.evaluate_and_checkpoint("],
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
