"""In a user's edited script, what acts is what learns; and what PPO and PPG define alike is alike in source."""

import ast
import difflib
import importlib.util
import sys

import numpy as np
import pytest

from common.acting import PERIOD, Policy
from common.processes import BadInput
from runs import ROOT, edited, train

ACTOR_CRITIC = {"total_timesteps": 1024, "num_steps": 64, "learning_rate": 3e-3}
REPLAY = {"total_timesteps": 1200, "learning_starts": 200, "batch_size": 8, "train_frequency": 8}
FEATURES = "        features = self.network(obs)\n"
BRANCH = f"        obs = obs / 10 if len(obs) > 1 else obs\n{FEATURES}"
NEVER = f"        if obs.abs().max() > 1e9:\n            obs = obs / 10\n{FEATURES}"
DEEPER = ("nn.Linear(width, size)", "nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, size)")
# script, what stands there and what the user writes, settings, and whether numpy acts
RUNS = {
    "branch": ("ppo_ddp.py", [(FEATURES, BRANCH)], ACTOR_CRITIC, False),
    "branch on numbers": ("ppo_ddp.py", [(FEATURES, NEVER)], ACTOR_CRITIC, False),
    "ReLU, Box": ("ppo_ddp.py", [("nn.Tanh()", "nn.ReLU()")], ACTOR_CRITIC | {"env_id": "Pendulum-v1"}, True),
    "none": ("ppg_ddp.py", [], ACTOR_CRITIC | {"n_pi": 2, "update_epochs": 4}, True),
    "dueling": ("dqn_ddp.py", [], REPLAY | {"log_every": 100, "dueling": True}, False),
    "deeper": ("dqn_ddp.py", [DEEPER], REPLAY | {"log_every": 100}, True),
}


def edited_module(tmp_path, script, edits):
    (tmp_path / script).write_text(edited(script, (ROOT / script).read_text(), *edits))
    return loaded(tmp_path / script)


def loaded(path):
    spec = importlib.util.spec_from_file_location("edited", path)
    module = sys.modules["edited"] = importlib.util.module_from_spec(spec)  # where a dataclass looks for its own
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("edit", RUNS)
def test_what_acts_is_the_network(edit, tmp_path, monkeypatch, capfd):
    """At each step of a run, which says once, in one line, if the network itself acts."""
    script, edits, settings, expected = RUNS[edit]
    module = edited_module(tmp_path, script, edits)
    by_numpy = []  # of each call
    call = Policy.__call__

    def watched(self, obs):
        results = call(self, obs)
        for result, of_module in zip(results, self._torch(obs), strict=True):
            np.testing.assert_allclose(result, of_module, rtol=1e-4, atol=1e-5)
        by_numpy.append(*map(bool, self.steps))
        return results

    monkeypatch.setattr(Policy, "__call__", watched)
    train(module, tmp_path / "run", **settings)
    assert len(by_numpy) >= 2 * PERIOD and set(by_numpy) == {expected}
    assert capfd.readouterr().out.count("acts by torch, more slowly than by numpy (it is not Linear") == (not expected)


# in what PPG defines otherwise, how many lines of PPO it does not have: for images, one network with two heads; in
# `train`, what is a phase's in PPG
ONLY_PPO = {"Args.__post_init__": 0, "Agent.__init__": 7, "Agent.forward": 2, "train": 2}


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
    """What both define is equal, except that PPG adds to some functions."""
    ppo, ppg = definitions("ppo_ddp.py"), definitions("ppg_ddp.py")
    assert set(ppo) <= set(ppg)
    lacking = {}
    for name in ppo:
        if ppo[name] != ppg[name]:
            lines = difflib.ndiff(ppo[name].split("\n"), ppg[name].split("\n"))
            lacking[name] = sum(line.startswith("- ") for line in lines)
    assert lacking == ONLY_PPO


UNREGISTERED = {  # what is left out of `run.register`, and what is said
    "optimizer=optimizer, ": ("ppo_ddp.py", r"agent.*weight is trained, but its optimiser"),
    "agent=agent, ": ("ppo_ddp.py", r"agent.*weight is trained, but its module"),
    ", log_alpha=log_alpha": ("sac_ddp.py", "log_alpha is trained, but its module"),
}


@pytest.mark.parametrize("left_out", UNREGISTERED)
def test_what_is_trained_and_not_registered_is_refused(left_out, tmp_path):
    """A resumed run would start it anew."""
    script, said = UNREGISTERED[left_out]
    module = edited_module(tmp_path, script, [(left_out, "")])
    settings = ACTOR_CRITIC if script == "ppo_ddp.py" else REPLAY
    with pytest.raises(BadInput, match=f"^run.register: {said} is not registered.$"):
        train(module, tmp_path / "run", **settings)
