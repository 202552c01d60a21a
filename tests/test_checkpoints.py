"""`--checkpoint-every` and `--resume`: a run killed in any way ends in the bytes of an undisturbed one."""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import filelock
import gymnasium as gym
import numpy as np
import pytest
import torch

import chaos
import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common import logger
from common.arguments import MAY_CHANGE_ON_RESUME, RunArgs
from common.checkpoint import Checkpoints
from common.environments import TRAINING, Environments
from common.processes import BadInput, World
from common.replay import ReplayBuffer
from common.run import Run as Loop
from runs import Run, command, run, same_run, train

# script, flags, and how it is disturbed: processes and the fault, in turn, the last time none
PPO = "--num-envs 4 --num-steps 32 --total-timesteps 1024 --checkpoint-every 256 --eval-every 500 --eval-episodes 3"
DQN = "--num-envs 4 --total-timesteps 1400 --learning-starts 600 --buffer-size 1000 --checkpoint-every 300"
DQN += " --log-every 170 --eval-every 700 --eval-episodes 3"
SAC = "--num-envs 4 --batch-size 64 --total-timesteps 800 --learning-starts 540 --buffer-size 600"
SAC += " --checkpoint-every 150 --eval-every 0"
PPG = f"{PPO} --n-pi 2 --aux-epochs 1 --num-aux-minibatches 8"
PONG = "--env-id ALE/Pong-v5 --num-envs 4 --eval-every 0 --buffer-size 400 --total-timesteps 560 --learning-starts 480"
PONG += " --batch-size 16 --log-every 200 --checkpoint-every 120"
LIBRARY = f"{PPO} --env-id tests.envs:LibraryCartPole-v0 --vectorization async"
CASES = {
    "ppo": ("ppo_ddp.py", f"{PPO} --norm-obs --shards 4", [(1, "kill@0@24"), (2, "write@0@2"), (4, None)]),
    "ppo, two processes": ("ppo_ddp.py", f"{PPO} --norm-obs", [(2, "write@0@2"), (2, None)]),
    "ppg": ("ppg_ddp.py", f"{PPG} --shards 2", [(2, "kill@1@24"), (1, None)]),
    "dqn": ("dqn_ddp.py", f"{DQN} --prioritized --n-step 3 --shards 4", [(2, "kill@1@10"), (1, None)]),
    "dqn, uniform": ("dqn_ddp.py", f"{DQN} --env-id tests.envs:Counting-v0 --shards 2", [(2, "write@1@2"), (1, None)]),
    "sac": ("sac_ddp.py", f"{SAC} --prioritized --shards 2", [(1, "write@0@14"), (2, None)]),
    "dqn pong": ("dqn_ddp.py", f"{PONG} --shards 2", [(2, "write@1@4"), (1, None)]),
    "libraries": ("ppo_ddp.py", f"{LIBRARY} --shards 2", [(1, "write@0@2"), (2, None)]),
}
SLOW = {"ppo", "sac", "dqn pong"}


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.slow] if x in SLOW else []) for x in CASES])
def test_a_killed_run_ends_in_the_bytes_of_an_undisturbed_one(case, tmp_path):
    script, flags, attempts = CASES[case]
    flags += " --save-model"
    calm = run(script, attempts[-1][0], flags, tmp_path / "calm", "float32")
    for size, fault in attempts:
        env = {"LOCKSTEP_FAULT": fault} if fault else {}
        code = -signal.SIGKILL if fault else 0
        last = run(script, size, f"{flags} --resume", tmp_path / "run", "float32", code=code, **env)
        if fault and "write" in fault:
            assert any((last.dir / "checkpoints").glob("*.part")), "no checkpoint was being written"
    assert "going on from" in last.out
    assert same_run(calm, last) == ""
    assert kept(last.dir) == kept(calm.dir)


def kept(run_dir) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo", "ppg", "dqn", "sac"])
def test_fifty_kills(case, tmp_path):
    assert chaos.chaos(case, 13, 1, tmp_path).startswith("13 kills")


# what is in the run directory, damaged: in this process, one run of PPO and one of DQN for all

SMALL = {"num_envs": 2, "cuda": False, "eval_every": 0, "num_threads": 1}
RUNS = {
    ppo_ddp: {"num_steps": 8, "num_minibatches": 2, "total_timesteps": 80, "checkpoint_every": 16, "norm_obs": True},
    dqn_ddp: {"total_timesteps": 200, "learning_starts": 20, "buffer_size": 60, "batch_size": 8, "log_every": 40},
}
RUNS[dqn_ddp] |= {"checkpoint_every": 50, "prioritized": True}


def continued(module, run_dir, **changes) -> Run:
    return train(module, run_dir, **SMALL | RUNS[module] | {"resume": True} | changes)


def copied(interrupted, tmp_path, name="ppo_ddp"):
    return shutil.copytree(interrupted[0] / name, tmp_path / "run")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A folder for each script, of a run with two checkpoints, and its rows."""
    folder, whole = tmp_path_factory.mktemp("interrupted"), {}
    for module in RUNS:
        run_dir = folder / module.__name__
        whole[module] = continued(module, run_dir, resume=False).rows
        assert len(kept(run_dir)) == 2
    return folder, whole


def content(run_dir) -> list[tuple]:
    return sorted((x, x.read_bytes()) for x in run_dir.rglob("*") if x.is_file() and x.name != "lock")


def assert_refused(run_dir, said) -> None:
    """To go on is refused in one line, and nothing is touched."""
    before = content(run_dir)
    with pytest.raises(BadInput, match=said) as caught:
        continued(ppo_ddp, run_dir)
    assert "\n" not in str(caught.value) and content(run_dir) == before


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("module, name", [(ppo_ddp, "state.pt"), (dqn_ddp, "replay-0")])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(module, name, interrupted, tmp_path, capfd):
    """One that torch does not read. What a user copies there stays."""
    run_dir = copied(interrupted, tmp_path, module.__name__)
    before, newest = sorted((run_dir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    cut(newest / name)
    shutil.copytree(before, run_dir / "checkpoints" / "best")
    done = continued(module, run_dir)
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if str(newest) in line and "looking for an older" in line]
    assert [line for line in lines if "going on from" in line] == [f"going on from {before}"]
    assert done.rows == interrupted[1][module]
    assert "best" in kept(run_dir) and len(kept(run_dir)) == 3


def test_where_no_checkpoint_can_be_read_the_rows_stay(interrupted, tmp_path):
    """The fault may pass: the run does not begin again over them."""
    run_dir = copied(interrupted, tmp_path)
    for folder in (run_dir / "checkpoints").iterdir():
        cut(folder / "state.pt")
    assert_refused(run_dir, "^--resume: no checkpoint in .* can be read; name another --run-dir")


class EditedAgent(ppo_ddp.Agent):
    def __init__(self, *args):
        super().__init__(*args)
        self.more = torch.nn.Linear(1, 1)


@pytest.mark.parametrize("name", ["agent", "mine"])
def test_what_an_edited_script_registers_is_refused_by_name(name, interrupted, tmp_path, monkeypatch):
    """A network with another layer; a tensor that the checkpoint lacks. The rows stay."""
    run_dir = copied(interrupted, tmp_path)
    register = Loop.register
    if name == "agent":
        monkeypatch.setattr(ppo_ddp, "Agent", EditedAgent)
    else:
        monkeypatch.setattr(Loop, "register", lambda self, **state: register(self, **state | {"mine": torch.zeros(2)}))
    assert_refused(run_dir, rf"^--run-dir \S*: does not fit .* {name} \(")


def test_each_shard_of_a_checkpoint_is_progress(tmp_path, monkeypatch):
    """A process's part of a large buffer may take longer than --timeout to write, and to read."""
    happened = []

    def note(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (happened.append(name), function(*args))[1])

    for owner, name in ((World, "feed"), (ReplayBuffer, "shard_state"), (ReplayBuffer, "load_shard")):
        note(owner, name)
    continued(dqn_ddp, tmp_path / "run", shards=2, resume=False)
    continued(dqn_ddp, tmp_path / "run", shards=2)
    after = [next_one for one, next_one in zip(happened, happened[1:], strict=False) if "shard" in one]
    assert after == ["feed"] * (3 * 2 + 2)  # three checkpoints; one that is read


@pytest.mark.parametrize("damage", [cut, lambda path: path.write_bytes(path.read_bytes() + b"0")])
def test_metrics_csv_is_cut_back_to_the_checkpoint(damage, interrupted, tmp_path):
    run_dir = copied(interrupted, tmp_path)
    damage(run_dir / "metrics.csv")
    assert continued(ppo_ddp, run_dir).rows == interrupted[1][ppo_ddp]


@pytest.mark.parametrize("change, said", [
    (lambda x: x.update(script="dqn_ddp"), "^--run-dir: holds a run of dqn_ddp.py, .* name another"),
    (lambda x: x["columns"].append("losses/mine"), "^--run-dir: .* other COLUMNS; name another"),
    (lambda x: x["args"].update(total_timesteps=96), "^--total-timesteps 80: must be 96 to go on with"),
    (lambda x: x["args"].update(eval_every=100), "^--eval-every 0: must be 100 to go on with"),
    (lambda x: x.update(world_size=2), "^--shards: must be set .* processes than 2"),
])  # fmt: skip
def test_what_another_run_left_is_refused(change, said, interrupted, tmp_path):
    run_dir = copied(interrupted, tmp_path)
    record = json.loads((run_dir / "config.json").read_text())
    change(record)
    (run_dir / "config.json").write_text(json.dumps(record))
    assert_refused(run_dir, said)


def test_a_metrics_csv_that_was_cut_ends_the_run(interrupted, tmp_path):
    """Rows before the checkpoint are lost: nothing can write them again."""
    run_dir = copied(interrupted, tmp_path)
    (run_dir / "metrics.csv").write_text("global_step\n")
    with pytest.raises(RuntimeError, match="metrics.csv: is shorter than at the checkpoint"):
        continued(ppo_ddp, run_dir)


def test_free_flags_may_change_and_another_machine_is_told(interrupted, tmp_path, capfd):
    """By each name of the record. A flag that is new since does not stand in the way."""
    run_dir = copied(interrupted, tmp_path)
    config = run_dir / "config.json"
    record = json.loads(config.read_text())
    continued(ppo_ddp, run_dir)
    assert "no longer the same bytes" not in capfd.readouterr().out
    record |= dict.fromkeys(logger.DECIDES_BYTES, "an abacus")
    del record["args"]["network"]
    config.write_text(json.dumps(record))
    done = continued(ppo_ddp, run_dir, timeout=100.0, save_model=True)
    said = capfd.readouterr().out
    told = re.findall(r"^no longer the same bytes as without a stop: (\w+) .*, before an abacus$", said, re.MULTILINE)
    assert told == [*logger.DECIDES_BYTES]
    assert (run_dir / "model.pt").exists() and done.rows == interrupted[1][ppo_ddp]
    assert MAY_CHANGE_ON_RESUME < {*RunArgs.__annotations__}
    assert not MAY_CHANGE_ON_RESUME & {"seed", "shards", "checkpoint_every", "eval_every"}


def test_a_finished_run_repeats_its_end(tmp_path, monkeypatch):
    """From its newest checkpoint, with the seconds that had passed there."""
    state = logger.Logger.state
    monkeypatch.setattr(logger.Logger, "state", lambda self: state(self) | {"wall": 1e6})
    done = continued(ppo_ddp, tmp_path, save_model=True)
    rows, model = done.rows, done.model
    done = continued(ppo_ddp, tmp_path, save_model=True)
    assert done.rows == rows and repr(done.model) == repr(model) and float(done.timed_rows[-1]["time/wall"]) > 1e6
    with pytest.raises(BadInput, match="holds a run already; name a new directory, or go on with it by --resume"):
        continued(ppo_ddp, tmp_path, resume=False)


@pytest.mark.parametrize("names", [(), ("config.json",), ("config.json", "metrics.csv")])
def test_a_run_without_a_checkpoint_begins_again(names, interrupted, tmp_path, capfd):
    """Killed before its first, at any file that it then has."""
    for name in names:
        shutil.copy(interrupted[0] / "ppo_ddp" / name, tmp_path)
        cut(tmp_path / "metrics.csv") if name == "metrics.csv" else None
    assert continued(ppo_ddp, tmp_path).rows == interrupted[1][ppo_ddp]
    assert "going on" not in capfd.readouterr().out
    for name in ("config.json", "metrics.csv"):  # no start of ours leaves the rest, or checkpoints, alone
        (tmp_path / name).unlink()
        assert_refused(tmp_path, "holds a run already; name a new directory[.]")


@dataclass
class MoreArgs(ppo_ddp.Args):
    widths: tuple[int, ...] = (64, 64)


def test_flags_of_ones_own_that_json_has_no_type_for(tmp_path):
    flags = SMALL | RUNS[ppo_ddp] | {"run_dir": str(tmp_path), "resume": True}
    ppo_ddp.main(MoreArgs(**flags))
    with pytest.raises(BadInput, match="^--widths .*: must be .* to go on with"):
        ppo_ddp.main(MoreArgs(**flags, widths=(64, 32)))
    ppo_ddp.main(MoreArgs(**flags))


def test_three_processes_need_shards_to_have_checkpoints(tmp_path):
    """Their sums depend on the layout of DDP's buckets, which each start makes anew."""
    flags = "--num-envs 12 --num-steps 8 --total-timesteps 96 --checkpoint-every 24"
    refused = run("ppo_ddp.py", 3, flags, tmp_path / "run", code=2)
    assert "--shards: must be set with --checkpoint-every on 3 processes." in refused.err


def test_a_directory_that_another_node_does_not_see_is_refused(tmp_path):
    def gather_objects(value):
        return [value, False if value is True else value]

    world = SimpleNamespace(rank=0, world_size=2, sharded=False, gather_objects=gather_objects)
    with pytest.raises(BadInput, match="^--run-dir .* file system that all ranks share"):
        Checkpoints(world, SimpleNamespace(dir=tmp_path), {}, None)


def test_a_full_disk_at_a_checkpoint(tmp_path):
    """A rank's part of the buffer no longer fits, rows and the networks still do."""
    flags = '--env-id tests.envs:Drawn-v0 --env-kwargs {"shape":[100],"dtype":"float32","actions":[3,0]} --num-envs 2'
    flags += " --total-timesteps 3000 --learning-starts 2900 --buffer-size 4000 --eval-every 0 --log-every 1000"
    flags += " --checkpoint-every 1000"
    calm = run("dqn_ddp.py", 2, flags, tmp_path / "calm", "float32")
    full = run("dqn_ddp.py", 2, f"{flags} --resume", tmp_path / "run", "float32", LOCKSTEP_FSIZE="250000")
    assert len(re.findall(r"cannot be written .*File too large.*; the run goes on", full.out)) == 1
    assert full.rows == calm.rows
    assert kept(full.dir) == ["1000"], "whole ones stay, and nothing else"


def test_two_writers_never_meet(tmp_path, monkeypatch):
    """A second waits for a dying owner, and is refused where the owner stays."""
    (tmp_path / "run").mkdir()
    owner = filelock.FileLock(tmp_path / "run" / "lock", thread_local=False)
    owner.acquire()
    monkeypatch.setattr(logger, "LOCK_TIMEOUT", 0.3)
    with pytest.raises(BadInput, match="^--run-dir .*run: another process is writing there"):
        continued(ppo_ddp, tmp_path / "run")
    monkeypatch.setattr(logger, "LOCK_TIMEOUT", 60.0)
    threading.Timer(0.5, owner.release).start()
    continued(ppo_ddp, tmp_path / "run")
    assert not owner.is_locked


def test_a_cut_ends_episodes_of_a_replay_buffer():
    """Their last transitions bootstrap from what follows. The largest priority is that of all ranks."""
    world = World(cuda=False)
    world.gather = lambda values: np.array([values, [7.0]])
    vector = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    rb = ReplayBuffer(40, 2, world, vector, (), np.int64, n_step=3, gamma=0.5, alpha=0.6)
    rb.observe(np.zeros((2, 2)))
    for step in range(1, 6):  # environment 1 ends in its last step
        ends = np.array([False, step == 5])
        obs = np.full((2, 2), float(step))
        infos = {"episode_ended": ends, "final_obs": {}}
        rb.add(np.zeros(2, int), np.ones(2), ends, np.zeros(2, bool), obs, infos)
    rb.cut()
    rb.observe(np.full((2, 2), 100.0))
    assert rb.state_dict()["largest"] == 7.0
    batch = rb._batch(np.arange(5), np.ones(5))
    assert batch.rewards.tolist() == [1.75, 1.75, 1.75, 1.5, 1.0]
    assert batch.discounts.tolist() == [0.125, 0.125, 0.125, 0.25, 0.5]
    assert batch.next_obs[:, 0].tolist() == [3.0, 4.0, 5.0, 5.0, 5.0]
    ended = rb._batch(np.array([rb.width + 4]), np.ones(1))
    assert ended.discounts.tolist() == [0.0] and not rb.truncations[1, 4]


SIMULATORS = ("CartPole-v1", "MinAtar/Breakout-v1", "ALE/Breakout-v5", "LunarLander-v3", "Hopper-v5")


@pytest.mark.parametrize("env_id", SIMULATORS)
def test_what_environments_did_before_a_start_does_not_matter(env_id):
    def played(before: int, checkpoint: int) -> list[np.ndarray]:
        envs = Environments(ppo_ddp.Args(env_id=env_id), TRAINING, [range(2)], World(cuda=False))
        envs.single_action_space.seed(0)
        found = [envs.reset()]
        for step in range(before + 60):
            if step == before:
                found = [envs.reset(checkpoint).copy()]
                envs.single_action_space.seed(1)
            action = np.array([envs.single_action_space.sample() for _ in range(2)])
            obs, rewards, *_ = envs.step(action)
            found += [obs.copy(), rewards.copy()]
        envs.close()
        return found

    used, new, other = played(150, 3), played(0, 3), played(0, 4)
    assert all(np.array_equal(x, y) for x, y in zip(used, new, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(new, other, strict=True))


def test_torchrun_restarts_go_on_by_themselves(tmp_path):
    """`--max-restarts`: rank 1 kills itself in the first attempt."""
    flags = f"{PPO} --shards 2 --save-model"
    calm = run("ppo_ddp.py", 1, flags, tmp_path / "calm", "float32")
    words = command("ppo_ddp.py", 2, f"{flags} --resume --run-dir {tmp_path / 'run'}", launched=True)
    words.insert(words.index("--standalone"), "--max-restarts=1")
    env = os.environ | {"LOCKSTEP_FAULT": "kill@1@12", "LOCKSTEP_DTYPE": "float32"}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "going on from" in done.stdout, done.stderr
    assert same_run(calm, Run(0, "", "", tmp_path / "run")) == ""


STEPS = {ppo_ddp: ("112", "64"), ppg_ddp: ("144", "96"), dqn_ddp: ("100", "150"), sac_ddp: ("100", "150")}


@pytest.mark.parametrize("module", STEPS)
def test_checkpoints_are_written_at_or_past_each_multiple(module, tmp_path, watch):
    """Where an iteration, phase or vector step ends, but not the run. Then seeds change. The newest two are kept."""
    resets, seeds = watch(Environments, "reset"), watch(torch, "manual_seed")
    settings = RUNS[dqn_ddp] if module in (dqn_ddp, sac_ddp) else RUNS[ppo_ddp] | {"checkpoint_every": 50}
    if module is ppg_ddp:
        settings |= {"n_pi": 3, "aux_epochs": 1, "num_aux_minibatches": 2}
    train(module, tmp_path / "run", **SMALL | settings | {"total_timesteps": 160, "seed": 7})
    assert seeds[0][0] == (7,)
    assert [count for (_, count), _ in resets] == [*range(len(resets))] and len(resets) > 2
    assert kept(tmp_path / "run") == [*STEPS[module]]
