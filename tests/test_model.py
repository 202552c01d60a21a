"""model.pt in use: evaluated alone, trained on, and loaded in a program of one's own."""

import re

import numpy as np
import pytest
import torch

import dqn_ddp
import ppo_ddp
from common.environments import EVALUATION, environment_seeds
from common.processes import BadInput
from common.tensors import for_model
from runs import ROOT, edited, flat, run, same_run

EVALS = "--eval-every 1000000 --eval-episodes 5"
CASES = {
    "ppo": ("ppo_ddp.py", "--env-id Pendulum-v1 --num-envs 4 --num-steps 64 --total-timesteps 1024 --norm-obs"),
    "ppg": ("ppg_ddp.py", "--num-envs 4 --num-steps 32 --n-pi 2 --aux-epochs 1 --total-timesteps 512 --norm-obs"),
    "dqn": ("dqn_ddp.py", "--num-envs 4 --learning-starts 500 --total-timesteps 1200 --dueling"),
    "sac": ("sac_ddp.py", "--num-envs 4 --batch-size 32 --learning-starts 500 --total-timesteps 580"),
}


def model_of(folder, case, size):
    script, own = CASES[case]
    return run(script, size, f"{own} {EVALS} --shards 2 --save-model", folder / "first", dtype="float32")


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_evaluated_as_it_was_at_its_end(case, tmp_path):
    """Trained on two processes, evaluated on one, to the bit. Trained on, its first row is that evaluation too."""
    first, (script, own) = model_of(tmp_path, case, 2), CASES[case]
    flags = f"{own} {EVALS} --shards 2 --load-model {first.dir / 'model.pt'}"
    alone = run(script, 1, f"{flags} --total-timesteps 0", tmp_path / "alone", dtype="float32")
    (row,) = alone.rows
    last = {name: cell for name, cell in first.rows[-1].items() if name.startswith("eval/")}
    assert row["global_step"] == "0" and last["eval/episodic_return"] and last.items() <= row.items()
    assert not (alone.dir / "model.pt").exists()
    if case not in ("ppo", "sac"):
        return
    on = run(script, 1, f"{flags} --save-model", tmp_path / "on", dtype="float32")
    assert on.rows[0] == row and on.model["args"]["load_model"]
    (begun, learned) = ([x for name, x in flat(y.model) if name.startswith(("agent", "actor"))] for y in (first, on))
    assert not all(x.equal(y) for x, y in zip(begun, learned, strict=True)), "nothing was learned"


def test_only_the_first_start_loads(tmp_path):
    """A run that goes on needs the file no more, and ends in the bytes of one without a kill."""
    path = model_of(tmp_path, "ppo", 1).dir / "model.pt"
    flags = f"{CASES['ppo'][1]} {EVALS} --load-model {path} --checkpoint-every 256 --save-model"
    calm = run("ppo_ddp.py", 1, flags, tmp_path / "calm", dtype="float32")
    killed = {"LOCKSTEP_FAULT": "kill@0@24", "code": -9}
    run("ppo_ddp.py", 1, f"{flags} --resume", tmp_path / "killed", dtype="float32", **killed)
    path.unlink()
    again = run("ppo_ddp.py", 1, f"{flags} --resume", tmp_path / "killed", dtype="float32")
    assert "going on from" in again.out and same_run(again, calm) == ""


def test_a_model_that_does_not_fit_is_refused(tmp_path):
    """By the tensor's name where shapes differ or it is another script's; by the flag where that decides."""
    path = str(model_of(tmp_path, "ppo", 1).dir / "model.pt")
    other = str(tmp_path / "other.pt")
    torch.save({"weights": torch.zeros(3)}, other)
    optimizer = torch.optim.Adam([torch.zeros(1)])  # begins anew, as its schedule does
    assert for_model({"a": optimizer, "b": torch.optim.lr_scheduler.LinearLR(optimizer), "c": other}) == {"c": other}
    mismatch = r"\(of Pendulum-v1\): does not fit.*mismatch for actor.0"
    for module, settings, expected in (
        (ppo_ddp, {"env_id": "Acrobot-v1", "norm_obs": True}, mismatch),
        (dqn_ddp, {}, "does not fit .*q_network"),
        (ppo_ddp, {"env_id": "Pendulum-v1"}, "^--norm-obs False: must be True with "),
        (ppo_ddp, {"load_model": other}, "is no model.pt of --save-model"),
    ):
        with pytest.raises(BadInput, match=expected) as refused:
            module.main(module.Args(**{"load_model": path} | settings, cuda=False, run_dir=str(tmp_path / "run")))
        assert "\n" not in str(refused.value)


def program_of(script):
    """The program of docs/outputs.md that loads a model of a script; PPG's is PPO's with its name."""
    if script == "ppg_ddp.py":
        return edited("docs/outputs.md", program_of("ppo_ddp.py"), ("ppo_ddp", "ppg_ddp"))
    blocks = re.findall(r"(?:^    .*\n)+", (ROOT / "docs" / "outputs.md").read_text(), re.MULTILINE)
    parts = ("import gymnasium as gym", f"from {script.removesuffix('.py')} import")
    block = "".join(block for block in blocks if any(part in block for part in parts))
    assert block.count("\n") <= 13
    return re.sub(r"^    ", "", block, flags=re.MULTILINE)


@pytest.mark.parametrize("case", CASES)
def test_the_programs_of_the_docs_act_as_the_evaluation_did(case, tmp_path, monkeypatch):
    script, own = CASES[case]
    (tmp_path / "runs").mkdir()
    done = run(script, 1, f"{own} {EVALS} --save-model", tmp_path / "runs" / "a", dtype="float32")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(program_of(script), names)
    env, returns = names["env"], []
    for seed in environment_seeds(1, EVALUATION, range(5)):
        obs, _ = env.reset(seed=int(seed))
        returns.append(0.0)
        done_now = False
        while not done_now:
            obs, reward, termination, truncation, _ = env.step(names["act"](obs))
            returns[-1] += float(reward)
            done_now = termination or truncation
    assert np.mean(returns) == pytest.approx(done.column("eval/episodic_return")[-1], rel=1e-4)
