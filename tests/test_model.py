"""model.pt in use: evaluated alone, trained on, and loaded in a program of one's own."""

import re

import gymnasium as gym
import numpy as np
import pytest
import torch

import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common.environments import EVALUATION, environment_seeds
from common.errors import BadInput
from runs import ROOT, edited, flat, run

SCRIPTS = {"ppo_ddp.py": ppo_ddp, "ppg_ddp.py": ppg_ddp, "dqn_ddp.py": dqn_ddp, "sac_ddp.py": sac_ddp}
EVALS = "--eval-every 1000000 --eval-episodes 5"
CASES = {
    "ppo": ("ppo_ddp.py", "--num-envs 4 --num-steps 64 --total-timesteps 2048 --norm-obs"),
    "ppo continuous": (
        "ppo_ddp.py",
        "--env-id Pendulum-v1 --num-envs 4 --num-steps 64 --total-timesteps 1024 --norm-obs",
    ),
    "ppg image": (
        "ppg_ddp.py",
        "--env-id MinAtar/Breakout-v1 --num-envs 4 --num-steps 32 --n-pi 2 --aux-epochs 1 --total-timesteps 1024",
    ),
    "dqn": ("dqn_ddp.py", "--num-envs 4 --learning-starts 500 --total-timesteps 1200 --dueling"),
    "sac": ("sac_ddp.py", "--num-envs 4 --learning-starts 500 --total-timesteps 580"),
}


def model_of(folder, case, size, flags="--shards 2"):
    script, own = CASES[case]
    return run(script, size, f"{own} {EVALS} {flags} --save-model", folder / "first", dtype="float32")


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] if x == "ppo" else []) for x in CASES])
def test_a_model_is_evaluated_as_it_was_at_its_end(case, tmp_path):
    """Trained on two processes, evaluated on one, to the bit, as it was trained: on the same environment, with the same
    networks and normalisers. Then trained on: its first row is that evaluation too.
    """
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
    assert any(not x.equal(dict(flat(first.model))[name]) for name, x in flat(on.model)), "nothing was learned"


def test_only_the_first_start_loads(tmp_path):
    """A run that goes on needs the file no more, and ends in the bytes of one without a kill."""
    path = tmp_path / "model.pt"
    model_of(tmp_path, "ppo", 1).dir.joinpath("model.pt").rename(path)
    flags = f"{CASES['ppo'][1]} {EVALS} --load-model {path} --checkpoint-every 512 --save-model"
    calm = run("ppo_ddp.py", 1, flags, tmp_path / "calm", dtype="float32")
    killed = {"LOCKSTEP_FAULT": "kill@0@24", "code": -9}
    run("ppo_ddp.py", 1, f"{flags} --resume", tmp_path / "killed", dtype="float32", **killed)
    path.unlink()
    again = run("ppo_ddp.py", 1, f"{flags} --resume", tmp_path / "killed", dtype="float32")
    assert again.model["args"]["norm_obs"]
    assert "going on from" in again.out and again.rows == calm.rows
    assert all(x.equal(dict(flat(calm.model))[name]) for name, x in flat(again.model))


def refusal(script, tmp_path, **settings):
    module = SCRIPTS[script]
    with pytest.raises(BadInput) as info:
        module.main(module.Args(cuda=False, run_dir=str(tmp_path / "run"), **settings))
    return str(info.value)


def test_a_model_that_does_not_fit_is_refused(tmp_path):
    """By the tensor's name where shapes differ or it is another script's; by the flag where that decides."""
    path = str(model_of(tmp_path, "ppo", 1).dir / "model.pt")
    said = refusal("ppo_ddp.py", tmp_path, load_model=path, env_id="Acrobot-v1", norm_obs=True)
    assert said.startswith(f"--load-model {path}: ") and said.endswith("; it is of CartPole-v1.")
    assert "size mismatch for trunk.layers.0.weight" in said and "\n" not in said
    assert "Missing key(s) in state_dict" in refusal("dqn_ddp.py", tmp_path, load_model=path)
    assert "Missing key(s) in state_dict" in refusal("ppg_ddp.py", tmp_path, load_model=path, norm_obs=True)
    for name, other in (("norm_obs", False), ("norm_reward", False)):
        settings = {"load_model": path, "norm_obs": True} | {name: other}
        flag = "--" + name.replace("_", "-")
        trained = torch.load(path, weights_only=True)["args"][name]
        assert refusal("ppo_ddp.py", tmp_path, **settings).startswith(f"{flag} {other}: must be {trained} with ")
    absent = str(tmp_path / "nothing.pt")
    expected = f"--load-model {absent}: cannot be read (No such file or directory)."
    assert refusal("ppo_ddp.py", tmp_path, load_model=absent) == expected
    (tmp_path / "nothing.pt").write_bytes(b"not a model")
    assert refusal("sac_ddp.py", tmp_path, load_model=absent).startswith(f"--load-model {absent}: cannot be read (")
    torch.save({"weights": torch.zeros(3)}, absent)
    assert refusal("ppo_ddp.py", tmp_path, load_model=absent).endswith("cannot be read (no model.pt).")


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_transitions_without_a_model_or_an_evaluation_are_refused(script):
    with pytest.raises(BadInput, match="^--total-timesteps 0: must be at least "):
        SCRIPTS[script].Args(total_timesteps=0)
    with pytest.raises(BadInput, match="^--eval-every 0: must be at least 1 with --total-timesteps 0"):
        SCRIPTS[script].Args(total_timesteps=0, load_model="a", eval_every=0)


def program_of(script):
    """The program of docs/models.md that loads a model of a script; PPG's is PPO's with its name."""
    if script == "ppg_ddp.py":
        return edited("docs/models.md", program_of("ppo_ddp.py"), ("ppo_ddp", "ppg_ddp"))
    blocks = re.findall(r"(?:^    .*\n)+", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    (block,) = (block for block in blocks if f"from {script.removesuffix('.py')} import" in block)
    assert block.count("\n") <= 10
    return re.sub(r"^    ", "", block, flags=re.MULTILINE)


@pytest.mark.parametrize("case", ["ppo continuous", "ppg", "dqn", "sac"])
def test_the_programs_of_the_docs_act_as_the_evaluation_did(case, tmp_path, monkeypatch):
    """Each plays the evaluation's episodes to the evaluation's mean return."""
    if case == "ppg":
        script, own = "ppg_ddp.py", "--num-envs 4 --num-steps 32 --n-pi 2 --aux-epochs 1 --total-timesteps 1024"
        own += " --norm-obs"
    else:
        script, own = CASES[case]
    (tmp_path / "runs").mkdir()
    done = run(script, 1, f"{own} {EVALS} --save-model", tmp_path / "runs" / "a", dtype="float32")
    monkeypatch.chdir(tmp_path)
    program = program_of(script)
    if "continuous" in case:
        edits = ("= gym.make(", "= gym.wrappers.ClipAction(gym.make("), ('"env_id"])', '"env_id"]))')
        program = edited("docs/models.md", program, *edits)
    names = {}
    exec(program, names)
    env, returns = names["env"], []
    for seed in environment_seeds(1, EVALUATION, range(5)):
        obs, _ = env.reset(seed=int(seed))
        returns.append(0.0)
        done_now = False
        while not done_now:
            obs, reward, termination, truncation, _ = env.step(names["act"](obs))
            returns[-1] += float(reward)
            done_now = termination or truncation
    assert isinstance(env, gym.Env)
    assert np.mean(returns) == pytest.approx(done.column("eval/episodic_return")[-1], rel=1e-4)
