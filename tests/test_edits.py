"""A user's edits of a copied script: either what acts is what learns, or the run says what to change.

And what PPO and PPG define alike is alike, source for source.
"""

import ast
import difflib
import importlib.util
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_ddp
from common import acting
from common.launch import Fault
from runs import ROOT, edited

ACTOR_CRITIC = {"total_timesteps": 1024, "num_steps": 64, "eval_every": 0, "learning_rate": 3e-3}
REPLAY = {"total_timesteps": 1200, "learning_starts": 200, "batch_size": 8, "train_frequency": 8, "eval_every": 0}
SETTINGS = {"ppo_ddp.py": ACTOR_CRITIC, "ppg_ddp.py": ACTOR_CRITIC | {"n_pi": 2, "update_epochs": 4}}
SETTINGS |= {"dqn_ddp.py": REPLAY, "sac_ddp.py": REPLAY}
BOX, DUELING = {"env_id": "Pendulum-v1"}, {"dueling": True}

CAST = "        obs = obs.to(torch.get_default_dtype())\n"
APPLY = "        return self.layers(obs if self.scale == 1.0 else obs / self.scale)\n"
RESIDUAL = "        x = self.layers[:2](obs)\n        return self.layers[2:](x) + x\n"
CONCAT = "torch.cat([out, self.log_std.expand_as(out)], -1)"
HEAD = "layer_init(nn.Linear(self.trunk.num_features, size), std=0.01)"
WIDE_HEAD = "nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, size))"
BOUNDED = "log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std.tanh() + 1)"
DIFFERS = r"numpy_\w+ differs from the networks, .*: do in \w+\.numpy_\w+ what the networks do, or let it return None"
UNKNOWN = "does not fit the networks .LayerNorm is not a layer it knows.: .* or let it return None"

# edit: (what stands there, what the user writes, what the run says or nothing, settings)
PPO = {
    "deeper": ("nn.Tanh()]", "nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]", "", {}),
    "ReLU": ("nn.Tanh()", "nn.ReLU()", "", {}),
    "another head": (HEAD, WIDE_HEAD, "", BOX),
    "the networks act": (APPLY, RESIDUAL, "", {}),
    "layer norm": ("64)), nn.Tanh()]", "64)), nn.LayerNorm(64)]", UNKNOWN, {}),
    "residual": (APPLY, RESIDUAL, DIFFERS, {}),
    "input scaling": (CAST, CAST.replace("())\n", "()) / 10\n"), DIFFERS, {}),
    "squashed mean": (CONCAT, CONCAT.replace("[out,", "[out.tanh(),"), DIFFERS, BOX),
    "clamped deviation": ("self.log_std.exp", "self.log_std.clamp(-5, 2).exp", DIFFERS, BOX),
    "deviation of the state": (CONCAT, "torch.cat([out, features[:, :1]], -1)", DIFFERS, BOX),
}
DQN = {
    "deeper": ("width, size)", "width, 32), nn.Tanh(), nn.Linear(32, size)", "", {}),
    "layer norm": ("num_features), nn.ReLU()]", "num_features), nn.LayerNorm(120)]", UNKNOWN, {}),
    "input scaling": (CAST, CAST.replace("())\n", "()) / 10\n"), DIFFERS, {}),
    "another head": ("        q = self.head(features)\n", "        q = 2 * self.head(features)\n", DIFFERS, {}),
    "dueling by maximum": ("q.mean(-1, keepdim=True)", "q.amax(-1, keepdim=True)", DIFFERS, DUELING),
}
SAC = {
    "deeper": ("(256, 256), nn.ReLU()\n", "(256, 64), nn.Tanh(), nn.Linear(64, 256), nn.ReLU()\n", "", {}),
    "layer norm": ("256), nn.ReLU()\n", "256), nn.LayerNorm(256)\n", "takes others without parameters, not Layer", {}),
    "clamped deviation": (BOUNDED, "log_std = log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)", DIFFERS, {}),
    "squashed mean": ("u = mean + ", "u = mean.tanh() + ", DIFFERS, {}),
    "input scaling": ("self.layers(obs.to(noise.dtype))", "self.layers(obs.to(noise.dtype) / 10)", DIFFERS, {}),
}
EDITS = {"ppo_ddp.py": PPO, "ppg_ddp.py": PPO, "dqn_ddp.py": DQN, "sac_ddp.py": SAC}


def train(tmp_path, script, *edits, **settings):
    """Run an edited script in this process -> its module."""
    (tmp_path / script).write_text(edited(script, (ROOT / script).read_text(), *edits))
    spec = importlib.util.spec_from_file_location("edited", tmp_path / script)
    module = sys.modules["edited"] = importlib.util.module_from_spec(spec)  # where a dataclass looks for its own
    spec.loader.exec_module(module)
    module.main(module.Args(**SETTINGS[script] | settings, cuda=False, run_dir=str(tmp_path / "run")))
    return module


@pytest.mark.parametrize("script, edit", [(script, edit) for script in EDITS for edit in EDITS[script]])
def test_an_edited_network_acts_or_is_told(script, edit, tmp_path):
    """Right: the run ends well. Told: before anything is learned, in one line; and nothing is left of the run."""
    before, after, told, settings = EDITS[script][edit]
    edits = [(before, after)]
    if edit == "the networks act":
        edits.append(("        mean = numpy_layers(", "        return None\n        mean = numpy_layers("))
    if not told:
        train(tmp_path, script, *edits, **settings)
        assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") >= 3
        return
    with pytest.raises(Fault, match=told) as caught:
        train(tmp_path, script, *edits, **settings)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


GATE = "self.gate = nn.Parameter(torch.zeros(()))\n"
SHAPE = "        self.image, self.channels_first = len(space.shape) == 3, channels_first\n"
GATED = "        x = self.layers[:2](obs)\n        return self.layers[2:](x) + self.gate * x\n"
LATER = {
    "ppo_ddp.py": [(SHAPE, f"{SHAPE}        {GATE}"), (APPLY, GATED)],
    "dqn_ddp.py": [
        ("        self.head = ", f"        {GATE}        self.head = "),
        ("q = self.head(features)\n", "q = self.head(features) + self.gate * features[:, :2]\n"),
    ],
    "sac_ddp.py": [
        ("        self.layers = mlp(", f"        {GATE}        self.layers = mlp("),
        ("u = mean + ", "u = mean + self.gate * obs[:, :1] + "),
    ],
}
LATER["ppg_ddp.py"] = LATER["ppo_ddp.py"]


@pytest.mark.parametrize("script", LATER)
def test_an_edit_that_shows_after_updates_is_told_then(script, tmp_path, monkeypatch):
    """A gate that is closed at first, in a run that does not look ahead: found while it learns, and its rows stay."""
    monkeypatch.setattr(acting, "set_values", lambda parameters, values: None)
    with pytest.raises(Fault, match=DIFFERS):
        train(tmp_path, script, *LATER[script], **({"log_every": 100} if SETTINGS[script] is REPLAY else {}))
    rows = (tmp_path / "run" / "metrics.csv").read_text().count("\n") - 1
    assert 1 <= rows < 12
    with pytest.raises(Fault, match=DIFFERS):
        monkeypatch.undo()
        (tmp_path / "ahead").mkdir()
        train(tmp_path / "ahead", script, *LATER[script])
    assert not (tmp_path / "ahead" / "run").exists()


def test_looking_ahead_leaves_the_networks_alone():
    """What is tried with other parameters is put back bit for bit, and takes no draw from torch's generator."""
    torch.manual_seed(0)
    agent = ppo_ddp.Agent(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,)), channels_first=False)
    before, state = [p.detach().clone() for p in agent.parameters()], torch.get_rng_state()
    seen = []

    def networks(obs):
        seen.append(agent.log_std[0].item())
        return agent.policy(agent.trunk(torch.from_numpy(obs))).detach().numpy()

    acting.checked(agent.numpy_policy, networks, np.ones((2, 3), np.float32), thorough=True)
    assert len(set(seen)) == 5 and seen[-1] == 0.0
    assert all(x.equal(y) for x, y in zip(before, agent.parameters(), strict=True))
    assert state.equal(torch.get_rng_state())


ONLY_PPO = {  # lines of PPO that PPG does not have; all others stand in it, in the same order
    "Args.__post_init__": [],
    "Agent.__init__": ["self.value_trunk = None if self.trunk.image else Trunk(obs_space, channels_first, network)"],
    "Agent.value": ["return self.critic(features if self.value_trunk is None else self.value_trunk(obs)).squeeze(-1)"],
    "main": [],
    "train": [
        "options = {'gradient_as_bucket_view': True, 'static_graph': True}",
        "restart = iteration < num_iterations and crossed(args.checkpoint_every, before, global_step)",
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


def test_a_layer_whose_weight_is_made_by_a_hook_is_told():
    """A copy of such a weight would be that of the last forward pass, not of the last update."""
    layer = torch.nn.utils.weight_norm(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="Linear with hooks is not a layer it knows"):
        acting.numpy_layers(torch.nn.Linear(2, 2), layer)
