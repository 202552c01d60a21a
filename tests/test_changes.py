"""What users change in a script keeps the promise: the same bytes on two processes as on one, under `--shards 2`."""

import runpy
import sys
from pathlib import Path

import pytest

from runs import ROOT, Run, edited, fork, same_run

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


def start_script(words: list[str]) -> None:
    """In a forked process: what `python` with these words does."""
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def words_of(flags: dict[str, str], run_dir: Path) -> list[str]:
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
        fork(start_script, ([str(script), *words_of(FLAGS[name], run_dir)],), processes, output, {})
        runs.append(Run(0, output.read_text(), "", run_dir))
    assert same_run(*runs) == ""
    losses = {name for name in runs[0].rows[-2] if name.startswith("losses/") and runs[0].rows[-2][name]}
    assert len(losses) >= 2
