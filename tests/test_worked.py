"""The worked changes of docs/modify.md: each applies, keeps the promise, goes on after a kill, and learns."""

import os
import shutil
import signal
import subprocess

import gymnasium as gym
import pytest
import torch
from test_changes import ACTOR_CRITIC, DISCRETE, REPLAY, words_of
from test_edits import loaded

from runs import ROOT, descendants, finish, same_run, send, start, train, wait_until

DIFFS = sorted(path.stem for path in (ROOT / "docs" / "changes").glob("*.diff"))
FLAGS = {"ppo_ddp.py": ACTOR_CRITIC, "dqn_ddp.py": REPLAY | {"env-kwargs": DISCRETE}, "sac_ddp.py": REPLAY}
OWN = {"redq": {"num-critics": "3", "updates-per-step": "2"}}
OWN["multidiscrete"] = {"env-kwargs": '{"shape":[5],"dtype":"float32","actions":[3,2],"action_dtype":"parts"}'}
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


def begin(script, processes, flags, run_dir):
    """Start a changed script, in its tree."""
    words = " ".join(words_of(flags, run_dir))
    return start(script, processes, words, cwd=script.parent, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")


def ended(*launch):
    done = finish(begin(*launch), launch[-1])
    assert done.code == 0, done.err
    return done


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


@pytest.mark.parametrize("dtype, sizes", [("parts", [3, 2]), ("bits", [2, 2, 2])])
def test_each_part_of_an_action_is_drawn_from_its_own_distribution(dtype, sizes, tmp_path):
    """As torch's categorical distributions have it; and a run of such an environment ends well."""
    tree, script = changed("multidiscrete", tmp_path)
    module = loaded(tree / script)
    actions = sizes if dtype == "parts" else [len(sizes)]
    options = f'{{"shape":[5],"dtype":"float32","actions":{actions},"action_dtype":"{dtype}"}}'
    flags = {"env_id": "tests.envs:Drawn-v0", "env_kwargs": options, "num_envs": 2, "num_steps": 16}
    train(module, tmp_path / "run", **flags, total_timesteps=64, eval_every=64, eval_episodes=1)
    space = gym.spaces.MultiDiscrete(sizes) if dtype == "parts" else gym.spaces.MultiBinary(len(sizes))
    agent = module.Agent(gym.spaces.Box(-1, 1, (5,)), space)
    obs = torch.randn(1, 5)
    torch.nn.init.normal_(agent.actor[-1].weight)
    parts = [torch.distributions.Categorical(logits=x) for x in agent(obs)[0].detach().split(sizes, -1)]
    out = agent(obs)[0].detach().expand(4000, -1).numpy()
    drawn = torch.from_numpy(agent.sample(out, torch.rand(4000, len(sizes)).numpy()))
    for i, part in enumerate(parts):
        found = torch.bincount(drawn[:, i], minlength=sizes[i]) / len(drawn)
        torch.testing.assert_close(found, part.probs[0], atol=0.04, rtol=0)
    log_prob, entropy = agent.log_prob(agent(obs)[0].expand(4000, -1), drawn)
    torch.testing.assert_close(log_prob, sum(part.log_prob(drawn[:, i]) for i, part in enumerate(parts)))
    torch.testing.assert_close(entropy[:1], sum(part.entropy() for part in parts))


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFS)
def test_a_worked_change_keeps_the_promise(name, tmp_path):
    """The same bytes on one process, on two, and killed on two and resumed on one; what it adds learns."""
    tree, script = changed(name, tmp_path)
    flags = FLAGS[script] | OWN.get(name, {})
    flags |= {"checkpoint-every": str(int(flags["total-timesteps"]) // 4), "resume": ""}
    path, killed = tree / script, tmp_path / "killed"
    alone = ended(path, 1, flags, tmp_path / "one")
    assert same_run(alone, ended(path, 2, flags, tmp_path / "two")) == ""
    dying = begin(path, 2, flags, killed)
    wait_until(lambda: any(x.name.isdigit() for x in (killed / "checkpoints").glob("*")), dying)
    send(descendants(dying), signal.SIGKILL)
    dying.communicate()
    assert not (killed / "finished").exists()
    again = ended(path, 1, flags, killed)
    assert "going on from" in again.out and same_run(alone, again) == ""
    if name in USED:
        module, part = USED[name]
        longer = alone.model[module]
        shorter = ended(path, 1, flags | {"total-timesteps": "160"}, tmp_path / "short").model[module]
        assert any(key.startswith(part) for key in longer)
        for key, value in longer.items():
            assert torch.equal(value, shorter[key]) == key.startswith("target")


def test_the_grus_state_ends_with_its_episode(tmp_path, watch):
    """Sequences are unrolled to the values of the steps that acted; after an end they are those of an episode alone."""
    tree, script = changed("gru", tmp_path)
    module = loaded(tree / script)
    acted = watch(module.Agent, "forward")
    unrolled = watch(module.Agent, "unroll")
    sizes = {"num_envs": 2, "num_steps": 64, "num_minibatches": 2, "update_epochs": 1}
    train(module, tmp_path / "run", **sizes, total_timesteps=128, learning_rate=1e-12)
    assert len(acted) == 65  # of the steps, and for the value of what follows
    of_steps = torch.stack([values for _, (_, values, _) in acted[:64]])
    # two minibatches, each of one sequence of 32 steps of each environment
    calls = [(*inputs, values) for (_, *inputs), (_, values) in unrolled]
    obs, dones, state, values = (torch.cat(x) for x in zip(*calls, strict=True))
    assert dones[:, :-1].any() and state.ne(0).any(1).sum() == 2  # the later sequences'
    for sequence in range(4):
        start = 32 if state[sequence].any() else 0
        torch.testing.assert_close(values[sequence], of_steps[start : start + 32, sequence % 2], atol=1e-6, rtol=1e-5)
    agent = module.Agent(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2))
    sequence, step = dones[:, :-1].nonzero()[0].tolist()
    _, values = agent.unroll(obs, dones, state)
    _, alone = agent.unroll(obs[[sequence], step + 1 :], dones[[sequence], step + 1 :], torch.zeros(1, 64))
    torch.testing.assert_close(values[sequence, step + 1 :], alone[0])
