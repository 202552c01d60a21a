"""The worked changes of docs/modify.md: each applies, keeps the promise, goes on after a kill, and learns."""

import importlib.util
import os
import shutil
import subprocess
import sys

import gymnasium as gym
import psutil
import pytest
import torch
from test_changes import ACTOR_CRITIC, DISCRETE, REPLAY

from benchmark.compare import compare_models, compare_rows, load
from runs import PATIENCE, ROOT, wait_until

DIFFS = sorted(path.stem for path in (ROOT / "docs" / "changes").glob("*.diff"))
FLAGS = {"ppo_ddp.py": ACTOR_CRITIC, "dqn_ddp.py": REPLAY | {"env-kwargs": DISCRETE}, "sac_ddp.py": REPLAY}
OWN = {"redq": {"num-critics": "3", "updates-per-step": "2"}}
USED = {"rnd": ("curiosity", ("predictor", "values")), "gru": ("agent", "gru")}  # in model.pt, and what learns there


def changed(name, tmp_path):
    """A copy of the scripts and `common/` with the diff, and the script that it changes."""
    tree, diff = tmp_path / "tree", ROOT / "docs" / "changes" / f"{name}.diff"
    shutil.copytree(ROOT / "common", tree / "common", ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("*_ddp.py"):
        shutil.copy(script, tree)
    subprocess.run(["git", "apply", str(diff)], cwd=tree, check=True, env=os.environ | {"GIT_DIR": str(tree / ".git")})
    (script,) = (x.name for x in tree.glob("*_ddp.py") if x.read_bytes() != (ROOT / x.name).read_bytes())
    return tree, script


def start(tree, script, processes, flags, run_dir):
    words = [f"--{name} {value}".strip().split(" ", 1) for name, value in flags.items()]
    words = [word for pair in words for word in pair]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launch, script, *words, "--save-model", "--run-dir", str(run_dir)]
    with open(f"{run_dir}.out", "a") as out:
        return subprocess.Popen(command, cwd=tree, env=env, stdout=out, stderr=out)


@pytest.mark.parametrize("name", DIFFS)
def test_a_diff_applies(name, tmp_path):
    """To the scripts as they are; docs/modify.md names it with its script and the numbers of places and lines."""
    _, script = changed(name, tmp_path)
    lines = (ROOT / "docs" / "changes" / f"{name}.diff").read_text().splitlines()
    places = sum(line.startswith("@@") for line in lines)
    added, removed = (sum(x.startswith(sign) and not x.startswith(3 * sign) for x in lines) for sign in "+-")
    rows = (ROOT / "docs" / "modify.md").read_text().splitlines()
    (row,) = (row for row in rows if row.startswith(f"| [{name}](changes/{name}.diff)"))
    assert f"| {script.removesuffix('_ddp.py').upper()} |" in row and row.endswith(
        f"| {places} | +{added} -{removed} |"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFS)
def test_a_worked_change_keeps_the_promise(name, tmp_path):
    """The same bytes on one process, on two, and killed on two and resumed on one; what it adds learns."""
    tree, script = changed(name, tmp_path)
    flags = FLAGS[script] | OWN.get(name, {})
    flags |= {"checkpoint-every": str(int(flags["total-timesteps"]) // 4), "resume": ""}
    runs = [tmp_path / x for x in ("one", "two", "killed")]
    for processes, run_dir in ((1, runs[0]), (2, runs[1])):
        assert start(tree, script, processes, flags, run_dir).wait(PATIENCE) == 0, open(f"{run_dir}.out").read()
    dying = start(tree, script, 2, flags, runs[2])
    wait_until(lambda: any(x.name.isdigit() for x in (runs[2] / "checkpoints").glob("*")), dying)
    for process in [*psutil.Process(dying.pid).children(recursive=True), dying]:
        process.kill()
    dying.wait(PATIENCE)
    assert not (runs[2] / "finished").exists()
    assert start(tree, script, 1, flags, runs[2]).wait(PATIENCE) == 0
    assert "going on from" in open(f"{runs[2]}.out").read()
    for other in runs[1:]:
        a, b = load(runs[0]), load(other)
        assert not [*compare_rows(a, b), *compare_models(a.model, b.model)]
    if name in USED:
        module, part = USED[name]
        longer = torch.load(runs[0] / "model.pt", weights_only=True)[module]
        assert start(tree, script, 1, flags | {"total-timesteps": "160"}, tmp_path / "short").wait(PATIENCE) == 0
        shorter = torch.load(tmp_path / "short" / "model.pt", weights_only=True)[module]
        assert any(key.startswith(part) for key in longer)
        for key, value in longer.items():
            assert torch.equal(value, shorter[key]) == key.startswith("target")


def test_the_grus_state_ends_with_its_episode(tmp_path, monkeypatch):
    """The same states as when each episode is unrolled alone; and the update unrolls those that acted: its first ratios
    are 1. Without the reset in either place one of both fails.
    """
    tree, script = changed("gru", tmp_path)
    flags = FLAGS[script] | {"num-minibatches": "1", "update-epochs": "1", "total-timesteps": "128", "eval-every": "0"}
    assert start(tree, script, 1, flags, tmp_path / "run").wait(PATIENCE) == 0, open(f"{tmp_path / 'run'}.out").read()
    (row,) = load(tmp_path / "run").rows
    assert int(row["charts/episodes"]) > 2 and abs(float(row["losses/old_approx_kl"])) < 1e-7
    spec = importlib.util.spec_from_file_location("gru", tree / script)
    monkeypatch.setitem(sys.modules, "gru", module := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    agent = module.Agent(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2))
    obs, state, dones = torch.rand(2, 9, 3), torch.rand(2, 64), torch.zeros(2, 9, dtype=torch.bool)
    dones[0, 3] = True
    states = agent.unroll(obs, state, dones)
    alone = agent.unroll(obs[:1, 4:], torch.zeros(1, 64), dones[:1, 4:])
    torch.testing.assert_close(states[0, 4:], alone[0])
    torch.testing.assert_close(states[1, 4:], agent.unroll(obs[:, 4:], states[:, 3], dones[:, 4:])[1])
