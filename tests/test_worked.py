"""What users change keeps the promise; the worked changes of docs/modify.md apply, go on, learn."""

import os
import shutil
import signal
import subprocess

import gymnasium as gym
import pytest
import torch
from test_edits import loaded

from fuzz import start_rank
from runs import ROOT, Run, descendants, edited, finish, fork, same_run, send, start, train, wait_until

ENV = '{"shape":[5],"dtype":"float32","actions":[2],"action_dtype":"float32","end":0.05,"cut":0.05}'
DISCRETE = '{"shape":[5],"dtype":"float32","actions":[3,0],"end":0.05,"cut":0.05}'
SHARED = {"env-id": "tests.envs:Drawn-v0", "env-kwargs": ENV, "num-envs": "4", "shards": "2", "eval-episodes": "3"}
ACTOR_CRITIC = SHARED | {"num-steps": "32", "num-minibatches": "2", "update-epochs": "2", "total-timesteps": "1280"}
ACTOR_CRITIC |= {"eval-every": "640", "norm-obs": ""}
REPLAY = SHARED | {"learning-starts": "64", "train-frequency": "8", "batch-size": "17", "total-timesteps": "320"}
REPLAY |= {"eval-every": "160", "log-every": "80"}
FLAGS = {"ppo": ACTOR_CRITIC, "ppg": ACTOR_CRITIC | {"n-pi": "2", "update-epochs": "4", "num-aux-minibatches": "4"}}
FLAGS |= {"dqn": REPLAY | {"env-kwargs": DISCRETE}, "sac": REPLAY}

ADAM = "torch.optim.Adam(parameters, lr=args.learning_rate, eps=args.adam_eps, fused=True)"
PARTS = """
    value_parameters = list(agent.critic.parameters())
    policy_parameters = [p for name, p in agent.named_parameters() if not name.startswith("critic")]
"""
SECOND = """    value_optimizer = torch.optim.SGD(value_parameters, lr=1e-2)
    run.register(value_optimizer=value_optimizer)
"""
MOVES = f"\n    optimizer = {ADAM}"
GROUPS = '[{"params": policy_parameters}, {"params": value_parameters}]'
ADAMW = ADAM.replace("Adam(parameters", f"AdamW({GROUPS}").replace("fused=True", "weight_decay=0.1")
RATES = """        for group in optimizer.param_groups:
            group["lr"] = fraction * args.learning_rate
"""
TWO_RATES = """        for group, rate in zip(optimizer.param_groups, (args.learning_rate, 1e-3), strict=True):
            group["lr"] = fraction * rate
"""
ZERO = "                optimizer.zero_grad()\n"
STEP = "                optimizer.step()\n"
LOSS = "        loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss\n"
TERM = "        activity = newvalue.square().mean()\n" + LOSS.replace("args.ent", "self.ent")
TERM = TERM.replace("v_loss\n", "v_loss + 0.01 * activity\n")
MADE = "    loss_fn = PPOLoss(agent, args)\n"
HEAD = "        self.head = stream(num_actions)\n"
DUE = "        if updates and global_step > smallest:"

CHANGES = {
    "AdamW, two parameter groups": ("ppg", (MOVES, f"{PARTS}    optimizer = {ADAMW}"), (RATES, TWO_RATES)),
    "a second optimiser": (
        "ppo",
        (MOVES, f"{PARTS}    optimizer = {ADAM.replace('parameters', 'policy_parameters', 1)}"),
        (MADE, f"{SECOND}{MADE}"),
        (ZERO, f"{ZERO}                value_optimizer.zero_grad()\n"),
        (STEP, f"{STEP}                value_optimizer.step()\n"),
    ),
    "a scheduled coefficient, a loss term and its metric": (
        "ppo",
        (LOSS, TERM),
        (MADE, f"{MADE}    loss_fn.ent_coef = torch.tensor(args.ent_coef, device=run.device)\n"),
        (RATES, f"{RATES}        loss_fn.ent_coef.fill_(args.ent_coef * fraction)\n"),
        ('stats = {"policy_loss"', 'stats = {"activity": activity.detach(), "policy_loss"'),
        ('    "losses/entropy",\n', '    "losses/entropy",\n    "losses/activity",\n'),
    ),
    "a number that changes": (
        "dqn",
        ("        features = self.network(obs)\n", "        features = self.network(obs) * self.factor\n"),
        (HEAD, f"        self.factor = 1.0\n{HEAD}"),
        (DUE, f"        q_network.factor = 1.0 + global_step / 32\n{DUE}"),
    ),
    "LayerNorm": ("sac", ("256), nn.ReLU()\n", "256), nn.LayerNorm(256), nn.ReLU()\n")),
    "a shared trunk": ("ppo", ("        if len(obs_space.shape) == 3:\n", "        if True:\n")),
}


def words_of(flags, run_dir):
    words = [word for name, value in flags.items() for word in (f"--{name}", value) if word]
    return [*words, "--save-model", "--run-dir", str(run_dir)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_has_the_same_bytes_on_two_processes(change, tmp_path):
    name, *edits = CHANGES[change]
    script = tmp_path / f"{name}_ddp.py"
    script.write_text(edited(script.name, (ROOT / script.name).read_text(), *edits))
    runs = []
    for processes in (1, 2):
        run_dir, output = tmp_path / str(processes), tmp_path / f"{processes}.out"
        fork(start_rank, (str(script), words_of(FLAGS[name], run_dir), "", False), processes, output, {})
        runs.append(Run(0, output.read_text(), "", run_dir))
    assert same_run(*runs) == ""
    losses = {name for name in runs[0].rows[-2] if name.startswith("losses/") and runs[0].rows[-2][name]}
    assert len(losses) >= 2


DIFFS = sorted(path.stem for path in (ROOT / "docs" / "changes").glob("*.diff"))
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
    words = " ".join(words_of(flags, run_dir))
    return start(script, processes, words, cwd=script.parent, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")


def ended(*launch):
    done = finish(begin(*launch), launch[-1])
    assert done.code == 0, done.err
    return done


@pytest.mark.parametrize("name", DIFFS)
def test_a_diff_applies(name, tmp_path):
    """docs/modify.md names it with its script and the numbers of places and lines."""
    _, script = changed(name, tmp_path)
    lines = (ROOT / "docs" / "changes" / f"{name}.diff").read_text().splitlines()
    places = sum(line.startswith("@@") for line in lines)
    added, removed = (sum(x.startswith(sign) and not x.startswith(3 * sign) for x in lines) for sign in "+-")
    rows = (ROOT / "docs" / "modify.md").read_text().splitlines()
    (row,) = (row for row in rows if row.startswith(f"| [{name}](changes/{name}.diff)"))
    assert f"| {script.removesuffix('_ddp.py').upper()} |" in row
    assert row.endswith(f"| {places} | +{added} -{removed} |")


@pytest.mark.parametrize("dtype, sizes", [("parts", [3, 2]), ("bits", [2, 2, 2])])
def test_each_part_of_an_action_is_drawn_from_its_own_distribution(dtype, sizes, tmp_path):
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
    """The same bytes on one process, on two, and killed on two and resumed on one."""
    tree, script = changed(name, tmp_path)
    flags = FLAGS[script.removesuffix("_ddp.py")] | OWN.get(name, {})
    flags |= {"checkpoint-every": str(int(flags["total-timesteps"]) // 4), "resume": ""}
    path, killed = tree / script, tmp_path / "killed"
    alone = ended(path, 1, flags, tmp_path / "one")
    assert same_run(alone, ended(path, 2, flags, tmp_path / "two")) == ""
    dying = begin(path, 2, flags, killed)
    wait_until(lambda: any(x.name.isdigit() for x in (killed / "checkpoints").glob("*")), dying)
    send(descendants(dying), signal.SIGKILL)
    dying.communicate()
    assert not (killed / "model.pt").exists()
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
    """Unrolled values are those of the steps that acted; after an end, of an episode alone."""
    tree, script = changed("gru", tmp_path)
    module = loaded(tree / script)
    acted = watch(module.Agent, "forward")
    unrolled = watch(module.Agent, "unroll")
    sizes = {"num_envs": 2, "num_steps": 64, "num_minibatches": 2, "update_epochs": 1}
    train(module, tmp_path / "run", **sizes, total_timesteps=128, learning_rate=1e-12)
    assert len(acted) == 65  # of the steps, and for the value of what follows
    of_steps = torch.stack([values for _, (_, values, _) in acted[:64]])
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
