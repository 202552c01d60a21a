"""What is done on a GPU, which two ranks share: `pytest -m gpu -n 4`. Cases for two cards and NCCL may be skipped."""

import json
import os
import signal

import pytest
import torch
from test_clean_end import begin, ended

import dqn_ddp
import ppg_ddp
import ppo_ddp
import runs
import sac_ddp
from common.logger import Logger
from runs import Run, assert_close, same_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PPO = "--num-envs 8 --num-steps 32 --total-timesteps 2560 --eval-every 1280 --eval-episodes 4"
PPG = f"{PPO} --n-pi 5 --aux-epochs 2 --num-aux-minibatches 4"
REPLAY = "--num-envs 4 --total-timesteps 800 --learning-starts 400 --batch-size 32 --buffer-size 600"
REPLAY += " --train-frequency 4 --log-every 200 --eval-every 400 --eval-episodes 4"
MINATAR, PONG = "--env-id MinAtar/Breakout-v1", "--env-id ALE/Pong-v5 --eval-every 0"
CASES = {
    "ppo": ("ppo_ddp.py", PPO),
    "ppo box": ("ppo_ddp.py", f"{PPO} --env-id Pendulum-v1 --norm-obs --target-kl 0.02"),
    "ppo minatar": ("ppo_ddp.py", f"{PPO} {MINATAR} --network impala"),
    "ppo pong": ("ppo_ddp.py", f"{PPO} {PONG} --total-timesteps 1280"),
    "ppg": ("ppg_ddp.py", PPG),
    "ppg minatar": ("ppg_ddp.py", f"{PPG} {MINATAR}"),
    "dqn": ("dqn_ddp.py", f"{REPLAY} --double-q --dueling --max-grad-norm 10"),
    "dqn pong": ("dqn_ddp.py", f"{REPLAY} {PONG} --prioritized"),
    "sac": ("sac_ddp.py", f"{REPLAY} --env-id Pendulum-v1 --prioritized"),
}
KEPT = "--checkpoint-every 256 --shards 2"
CARDS = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
BOTH = {"CUDA_VISIBLE_DEVICES": ",".join(CARDS[:2])}  # other runs see the first alone
TWO_CARDS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LONG = "--total-timesteps 100000000 --num-steps 16 --num-envs 8 --eval-every 0 --timeout 200"


def run(script, size, flags, run_dir, dtype="float32", code=0, **env) -> Run:
    """In forked processes, which have imported all and not touched the GPU."""
    env = {"CUDA_VISIBLE_DEVICES": CARDS[0]} | env
    done = runs.run(script, size, f"{flags} --save-model", run_dir, dtype, code, **env)
    if code == 0:
        device = json.loads((run_dir / "config.json").read_text())["device"]
        assert device.startswith(torch.cuda.get_device_name()) == ("--no-cuda" not in flags.split())
    return done


def assert_same_bytes(one: Run, other: Run) -> None:
    assert same_run(one, other) == "" and len(one.rows) >= 2


@pytest.mark.parametrize("case", CASES)
def test_a_run_repeats_and_shards_give_the_same_bytes_on_one_rank_and_on_two(case, tmp_path):
    script, flags = CASES[case]
    assert_same_bytes(*(run(script, 1, flags, tmp_path / name) for name in ("one", "again")))
    assert_same_bytes(*(run(script, size, f"{flags} --shards 4", tmp_path / str(size)) for size in (1, 2)))


@pytest.mark.parametrize("case", CASES)
def test_one_rank_and_two_agree(case, tmp_path):
    """In float64, within 1e-9; with the CPU within 1e-5, since a GPU's learning rates are float32."""
    script, flags = CASES[case]
    one, two = (run(script, size, flags, tmp_path / str(size), "float64") for size in (1, 2))
    assert_close(one, two)
    assert_close(one, run(script, 1, f"{flags} --no-cuda", tmp_path / "cpu", "float64"), 1e-5, 1e-7)


@pytest.mark.parametrize("case", ["ppo box", "ppo pong", "ppg", "dqn", "sac"])
def test_compiled_losses_give_the_same_numbers(case, tmp_path):
    """As without, in float64; with shards the same bytes, except of prioritised batches."""
    script, flags = CASES[case]
    runs = [run(script, 1, flags + x, tmp_path / f"run{x[3:]}", "float64") for x in ("", " --compile")]
    assert_close(*runs, 1e-7, 1e-9)
    if case != "sac":
        flags += " --shards 2 --compile"
        runs += [run(script, size, flags, tmp_path / str(size)) for size in (1, 2)]
        assert_same_bytes(*runs[2:])
    assert not any("--compile:" in x.out for x in runs), "a loss is not compiled"


@TWO_CARDS
@pytest.mark.parametrize("case", ["ppo", "ppo pong", "ppg", "dqn", "sac"])
def test_two_cards_give_the_bytes_of_one(case, tmp_path):
    """With --shards 4 by NCCL's exchange; without by DDP's own average, in float64."""
    script, flags = CASES[case]
    one, two = (run(script, size, f"{flags} --shards 4", tmp_path / str(size), **BOTH) for size in (1, 2))
    assert_same_bytes(one, two)
    assert "cuda:0" in two.out and "shared memory" not in two.out
    assert_close(*(run(script, size, flags, tmp_path / f"{size}-64", "float64", **BOTH) for size in (1, 2)))


@pytest.mark.parametrize("case", ["ppo", "ppg", "dqn", "sac"])
def test_a_killed_run_goes_on(case, tmp_path):
    """In the bytes of one that was not killed; on the CPU to an end, which a line says is another."""
    script, flags = CASES[case]
    flags = f"{flags} {KEPT} --n-pi 1" if case == "ppg" else f"{flags} {KEPT}"
    whole = run(script, 1, flags, tmp_path / "whole")
    kill = {"LOCKSTEP_FAULT": "write@0@2" if script.startswith("pp") else "write@0@5"}  # in its second checkpoint
    for more in ("", " --no-cuda"):
        where = tmp_path / f"killed{more[1:]}"
        run(script, 1, f"{flags} --resume", where, code=-signal.SIGKILL, **kill)
        done = run(script, 1, f"{flags} --resume{more}", where)
        assert "going on from" in done.out
        assert ("no longer the same bytes" in done.out) == bool(more), done.out
        assert (more or same_run(whole, done) == "") and len(done.rows) == len(whole.rows)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("fault", ["interrupt", "raise", "kill"])
def test_a_run_ends_well(size, fault, tmp_path):
    env = {"LOCKSTEP_DTYPE": "float32", "CUDA_VISIBLE_DEVICES": CARDS[0]}
    env |= {} if fault == "interrupt" else {"LOCKSTEP_FAULT": f"{fault}@{size - 1}@60"}
    process, family = begin("ppo_ddp.py", size, LONG, tmp_path / "run", **env)
    if fault == "interrupt":
        process.send_signal(signal.SIGINT)
    done = ended(process, family, tmp_path / "run", timeout=120)
    code = {"interrupt": 130, "raise": 1, "kill": -signal.SIGKILL}[fault]
    assert done.code == code if size == 1 else done.code != 0, done.err


@pytest.mark.parametrize("module", [ppo_ddp, ppg_ddp, dqn_ddp, sac_ddp])
def test_memory_does_not_grow(module, tmp_path, monkeypatch):
    """What tensors take and torch holds, from the second fifth of a run on."""
    taken, log = [], Logger.log

    def noted(*args):
        taken.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        log(*args)

    monkeypatch.setattr(Logger, "log", noted)
    sizes = {"num_envs": 8, "num_steps": 16, "total_timesteps": 128 * 100, "eval_every": 0}
    if module is ppg_ddp:
        sizes |= {"n_pi": 2, "aux_epochs": 2, "num_aux_minibatches": 4}
    if module in (dqn_ddp, sac_ddp):
        sizes = {"total_timesteps": 3000, "learning_starts": 200, "log_every": 100, "eval_every": 0, "batch_size": 64}
    env_id = "Pendulum-v1" if module is sac_ddp else "CartPole-v1"
    module.main(module.Args(env_id=env_id, run_dir=str(tmp_path / "run"), **sizes))
    held, kept = zip(*taken[len(taken) // 5 :], strict=True)
    assert len(held) > 10 and max(held) - min(held[:3]) < 2**20, held
    assert max(kept) - kept[0] <= 2**25, kept  # torch takes 20 MiB and more at once
