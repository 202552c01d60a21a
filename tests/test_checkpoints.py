"""`--checkpoint-every` and `--resume`: a run killed in any way ends in the bytes of one that was never disturbed."""

import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from types import SimpleNamespace

import filelock
import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch

import chaos
import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common.environments import Environments, make_envs
from common.errors import BadInput, Fault
from common.replay import ReplayBuffer
from common.run import logger, loop
from common.run.arguments import MAY_CHANGE_ON_RESUME, RunArgs
from common.run.checkpoint import Checkpoints
from common.run.logger import Logger
from common.watchdog import Watchdog
from runs import Run, command, descendants, finish, flat, run, same_run, start, wait_until
from test_replay import VECTOR, FakeWorld

# script, flags, and how it is disturbed: processes and the fault, in turn, the last time none
PPO = "--num-envs 4 --num-steps 32 --total-timesteps 1024 --checkpoint-every 256 --eval-every 500 --eval-episodes 3"
DQN = "--num-envs 4 --total-timesteps 1400 --learning-starts 600 --buffer-size 1000 --checkpoint-every 300"
DQN += " --log-every 170 --eval-every 700 --eval-episodes 3"
SAC = "--num-envs 4 --batch-size 64 --total-timesteps 800 --learning-starts 540 --buffer-size 600"
SAC += " --checkpoint-every 150 --eval-every 0"
PONG = "--env-id ALE/Pong-v5 --num-envs 4 --eval-every 0"
CASES = {
    "ppo": ("ppo_ddp.py", f"{PPO} --norm-obs --shards 4", [(1, "kill@0@12"), (2, "write@0@2"), (4, None)]),
    "ppo, two processes": ("ppo_ddp.py", PPO, [(2, "write@0@2"), (2, None)]),
    "ppg": (
        "ppg_ddp.py",
        f"{PPO} --n-pi 2 --aux-epochs 1 --num-aux-minibatches 8 --shards 2",
        [(2, "kill@1@12"), (1, None)],
    ),
    "dqn": ("dqn_ddp.py", f"{DQN} --prioritized --n-step 3 --shards 4", [(2, "kill@1@10"), (1, None)]),
    "dqn, uniform": ("dqn_ddp.py", f"{DQN} --env-id tests.envs:Counting-v0 --shards 2", [(2, "write@1@2"), (1, None)]),
    "sac": ("sac_ddp.py", f"{SAC} --prioritized --shards 2", [(1, "write@0@14"), (2, None)]),
    "dqn pong": (
        "dqn_ddp.py",
        f"{PONG} --buffer-size 400 --total-timesteps 560 --learning-starts 480 --batch-size 16 --log-every 200"
        " --checkpoint-every 120 --shards 2",
        [(2, "write@1@4"), (1, None)],
    ),
    "libraries": (
        "ppo_ddp.py",
        f"{PPO} --env-id tests.envs:LibraryCartPole-v0 --vectorization async --shards 2",
        [(1, "write@0@2"), (2, None)],
    ),
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
    """Thirteen of each script."""
    assert chaos.chaos(case, 13, 1, tmp_path).kills == 13


# what is in the run directory, damaged: in this process, one run of PPO and one of DQN for all

SMALL = {"num_envs": 2, "cuda": False, "eval_every": 0, "num_threads": 1}
RUNS = {
    ppo_ddp: {"num_steps": 8, "num_minibatches": 2, "total_timesteps": 80, "checkpoint_every": 16},
    dqn_ddp: {
        **{"total_timesteps": 200, "learning_starts": 20, "buffer_size": 60, "batch_size": 8, "checkpoint_every": 50},
        **{"prioritized": True, "log_every": 40},
    },
}


def continued(module, run_dir, **changes) -> None:
    module.main(module.Args(**SMALL | RUNS[module] | {"run_dir": str(run_dir), "resume": True} | changes))


def rows(run_dir) -> list[dict[str, str]]:
    return Run(0, "", "", run_dir).rows


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A folder for each script, of a run with two checkpoints that lacks its end, and the rows of the whole run."""
    folder, whole = tmp_path_factory.mktemp("interrupted"), {}
    for module in RUNS:
        run_dir = folder / module.__name__
        continued(module, run_dir, resume=False)
        whole[module] = rows(run_dir)
        (run_dir / "finished").unlink()
        assert len(kept(run_dir)) == 2
    return folder, whole


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def longer(path):
    path.write_bytes(path.read_bytes() + b"0")


@pytest.mark.parametrize("module, name", [(ppo_ddp, "state.pt"), (dqn_ddp, "replay-0")])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(module, name, interrupted, tmp_path, capfd):
    """One that torch does not read. What a user copies there stays."""
    folder, whole = interrupted
    run_dir = shutil.copytree(folder / module.__name__, tmp_path / "run")
    before, newest = sorted((run_dir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    cut(newest / name)
    shutil.copytree(before, run_dir / "checkpoints" / "best")
    continued(module, run_dir)
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if str(newest) in line and "looking for an older" in line]
    assert [line for line in lines if "going on from" in line] == [f"going on from {before}"]
    assert rows(run_dir) == whole[module]
    assert "best" in kept(run_dir) and len(kept(run_dir)) == 3


def test_where_no_checkpoint_can_be_read_the_rows_stay(interrupted, tmp_path):
    """The fault may pass: the run does not begin again over them."""
    run_dir = shutil.copytree(interrupted[0] / "ppo_ddp", tmp_path / "run")
    for folder in (run_dir / "checkpoints").iterdir():
        cut(folder / "state.pt")
    before = content(run_dir)
    with pytest.raises(BadInput, match="^--resume: .* holds no checkpoint that can be read; name another --run-dir"):
        continued(ppo_ddp, run_dir)
    assert content(run_dir) == before


class EditedAgent(ppo_ddp.Agent):
    def __init__(self, *args):
        super().__init__(*args)
        self.more = torch.nn.Linear(1, 1)


@pytest.mark.parametrize("name", ["agent", "mine"])
def test_what_an_edited_script_registers_is_refused_by_name(name, interrupted, tmp_path, monkeypatch):
    """A network with another layer; a tensor that the checkpoint lacks. The rows stay."""
    run_dir = shutil.copytree(interrupted[0] / "ppo_ddp", tmp_path / "run")
    before = content(run_dir)
    register = loop.Run.register
    if name == "agent":
        monkeypatch.setattr(ppo_ddp, "Agent", EditedAgent)
    else:
        monkeypatch.setattr(loop.Run, "register", lambda self, **state: register(self, **state, mine=torch.zeros(2)))
    with pytest.raises(BadInput, match=rf"^--run-dir \S*: does not fit what this script registers as {name} \("):
        continued(ppo_ddp, run_dir)
    assert content(run_dir) == before


def test_other_columns_are_refused_by_name(interrupted, tmp_path, monkeypatch):
    """Rows under the old header would be in the wrong columns."""
    run_dir = shutil.copytree(interrupted[0] / "ppo_ddp", tmp_path / "run")
    monkeypatch.setattr(ppo_ddp, "COLUMNS", (*ppo_ddp.COLUMNS, "losses/mine"))
    with pytest.raises(BadInput, match="^--run-dir: .*run was recorded with other COLUMNS .losses/mine"):
        continued(ppo_ddp, run_dir)


def test_each_shard_of_a_checkpoint_is_progress(tmp_path, monkeypatch):
    """A process's part of a large buffer may take longer than --timeout to write, and to read."""
    happened, feed, shard_state = [], Watchdog.feed, ReplayBuffer.shard_state
    monkeypatch.setattr(Watchdog, "feed", lambda self: (happened.append("fed"), feed(self)))
    monkeypatch.setattr(ReplayBuffer, "shard_state", lambda *x: (happened.append("shard"), shard_state(*x))[1])
    continued(dqn_ddp, tmp_path / "run", shards=2, resume=False)
    (tmp_path / "run" / "finished").unlink()
    continued(dqn_ddp, tmp_path / "run", shards=2)
    after = [next_one for one, next_one in zip(happened, happened[1:], strict=False) if one == "shard"]
    assert after == ["fed"] * (3 * 2 + 2)  # three checkpoints; one that is read


def test_feeding_sets_the_watchdog_back_once_a_second(monkeypatch):
    """And costs nothing between."""
    times, armed = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: times[-1])
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda timeout, exit: armed.append((times[-1], timeout)))
    watchdog = Watchdog(0)
    with watchdog.watching(60.0):
        for now in (100.5, 101.2, 102.0, 102.5):
            times.append(now)
            watchdog.feed()
    times.append(200.0)
    watchdog.feed()  # not after the end
    assert armed == [(100.0, 60.0), (101.2, 60.0), (102.5, 60.0)]


@pytest.mark.parametrize("damage", [cut, longer])
def test_metrics_csv_is_cut_back_to_the_checkpoint(damage, interrupted, tmp_path):
    """What came after it is written again."""
    folder, whole = interrupted
    run_dir = shutil.copytree(folder / "ppo_ddp", tmp_path / "run")
    damage(run_dir / "metrics.csv")
    continued(ppo_ddp, run_dir)
    assert rows(run_dir) == whole[ppo_ddp]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda x: x.update(script="dqn_ddp"), "^--run-dir: .* holds a run of dqn_ddp.py; name another"),
        (lambda x: x["args"].update(total_timesteps=96), "^--total-timesteps 80: must be 96 to go on"),
        (lambda x: x["args"].update(eval_every=100), "^--eval-every 0: must be 100 to go on with"),
        (lambda x: x["args"].update(checkpoint_every=0), "^--resume: .* was recorded without --checkpoint"),
        (lambda x: x.update(world_size=2), "^--shards: .* was recorded without, .* 2 process.es. only, not"),
    ],
)
def test_what_another_run_left_is_refused(change, said, interrupted, tmp_path):
    run_dir = shutil.copytree(interrupted[0] / "ppo_ddp", tmp_path / "run")
    record = json.loads((run_dir / "config.json").read_text())
    change(record)
    (run_dir / "config.json").write_text(json.dumps(record))
    before = content(run_dir)
    with pytest.raises(BadInput, match=said) as caught:
        continued(ppo_ddp, run_dir)
    assert "\n" not in str(caught.value) and before == content(run_dir), "it was touched"


def test_a_metrics_csv_that_was_cut_ends_the_run(interrupted, tmp_path):
    """Rows before the checkpoint are lost: nothing can write them again."""
    run_dir = shutil.copytree(interrupted[0] / "ppo_ddp", tmp_path / "run")
    (run_dir / "metrics.csv").write_text("global_step\n")
    with pytest.raises(Fault, match="metrics.csv: is shorter than at the checkpoint"):
        continued(ppo_ddp, run_dir)


def content(run_dir) -> list[tuple]:
    return sorted((x, x.read_bytes()) for x in run_dir.rglob("*") if x.is_file() and x.name != "lock")


def test_free_flags_may_change_and_another_machine_is_told(interrupted, tmp_path, capfd, monkeypatch):
    """Once, and it is kept. A flag that the code did not have before does not stand in the way."""
    run_dir = shutil.copytree(interrupted[0] / "ppo_ddp", tmp_path / "run")
    config = run_dir / "config.json"
    config.write_text(config.read_text().replace('"network": "auto",', ""))
    monkeypatch.setattr("common.run.logger.source_record", lambda path: ({"commit": "c", "sources": "s"}, "+y\n"))
    for path in (run_dir / "checkpoints").iterdir():
        state = torch.load(path / "state.pt", weights_only=True)
        state["checkpoint"]["record"]["device"] = "an abacus"
        torch.save(state, path / "state.pt")
    continued(ppo_ddp, run_dir, timeout=100.0, save_model=True, check_sync_every=16)
    told = [line for line in capfd.readouterr().out.splitlines() if "no longer the same bytes" in line]
    assert len(told) == 1 and "before an abacus" in told[0] and "threads" not in told[0]
    (kept,) = json.loads((run_dir / "config.json").read_text())["continued"]
    assert kept["global_step"] == 64 and kept["commit"] == "c" and "before an abacus" in kept["changes"][0]
    assert "sources s, before " in told[0]
    assert (run_dir / "model.pt").exists() and rows(run_dir) == interrupted[1][ppo_ddp]
    assert MAY_CHANGE_ON_RESUME < {*RunArgs.__annotations__}
    assert not MAY_CHANGE_ON_RESUME & {"seed", "shards", "checkpoint_every", "eval_every"}


def test_a_finished_run_says_so(interrupted, tmp_path, capfd):
    run_dir = shutil.copytree(interrupted[0] / "ppo_ddp", tmp_path / "run")
    continued(ppo_ddp, run_dir)
    before = content(run_dir)
    with pytest.raises(SystemExit) as ended:
        continued(ppo_ddp, run_dir)
    assert ended.value.code == 0 and "holds the finished run" in capfd.readouterr().out
    assert content(run_dir) == before
    with pytest.raises(BadInput, match="holds a run already; name a new directory, or go on with it by --resume"):
        continued(ppo_ddp, run_dir, resume=False)


def test_a_finished_run_is_lengthened_to_the_bytes_of_a_longer_one(tmp_path, capfd, monkeypatch):
    """Where no schedule depends on the budget; also one that was killed while it read the checkpoint for that."""
    continued(ppo_ddp, tmp_path / "long", anneal_lr=False, total_timesteps=144, save_model=True)
    whole, model = rows(tmp_path / "long"), torch.load(tmp_path / "long" / "model.pt", weights_only=True)
    run_dir = tmp_path / "run"
    continued(ppo_ddp, run_dir, anneal_lr=False)
    short = rows(run_dir)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Logger, "continued", lambda *_: 1 / 0)
        continued(ppo_ddp, run_dir, anneal_lr=False, total_timesteps=144)
    continued(ppo_ddp, run_dir, anneal_lr=False)
    assert rows(run_dir) == short, "the shorter run lost its end"
    capfd.readouterr()
    continued(ppo_ddp, run_dir, anneal_lr=False, total_timesteps=144, save_model=True)
    assert "longer than it was to be: total_timesteps 144, before 80" in capfd.readouterr().out
    assert rows(run_dir) == whole
    longer = dict(flat(torch.load(run_dir / "model.pt", weights_only=True)))
    assert all(x.equal(longer[key]) for key, x in flat(model))
    assert json.loads((run_dir / "config.json").read_text())["args"]["total_timesteps"] == 144
    with pytest.raises(SystemExit):
        continued(ppo_ddp, run_dir, anneal_lr=False, total_timesteps=144)
    with pytest.raises(BadInput, match="^--total-timesteps 80: must be 144 to go on with"):
        continued(ppo_ddp, run_dir, anneal_lr=False)
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(BadInput, match="^--total-timesteps 160: .* holds no checkpoint from which a longer run"):
        continued(ppo_ddp, run_dir, anneal_lr=False, total_timesteps=160)
    assert rows(run_dir) == whole and (run_dir / "finished").exists()


UNIFORM = {"anneal_lr": False, "prioritized": False}


@pytest.mark.parametrize(
    "module, flags, longer, said",
    [
        (ppo_ddp, {}, 96, "80 to go on with .*64, because --anneal-lr changes until transition 96"),
        (dqn_ddp, {"anneal_lr": False, "exploration_fraction": 0.375}, 400, ".*, because --per-beta changes until"),
        (dqn_ddp, UNIFORM | {"exploration_fraction": 0.375}, 400, None),
    ],
)
def test_a_schedule_that_would_change_is_named(module, flags, longer, said, tmp_path):
    """And nothing is touched; past it, the run goes on."""
    run_dir = tmp_path / "run"
    continued(module, run_dir, **flags)
    before = content(run_dir)
    if said is None:
        continued(module, run_dir, **flags, total_timesteps=longer)
        assert rows(run_dir)[-1]["global_step"] == str(longer)
        return
    with pytest.raises(BadInput, match=f"^--total-timesteps {longer}: must be {said}"):
        continued(module, run_dir, **flags, total_timesteps=longer)
    assert before == content(run_dir), "it was touched"


def test_a_run_without_a_checkpoint_begins_again(tmp_path, capfd):
    """Killed before its first, at any file that it then has."""
    for number, names in enumerate([[], ["config.json"], ["metrics.csv", "config.json"]]):
        run_dir = tmp_path / str(number)
        continued(ppo_ddp, run_dir)
        whole = rows(run_dir)
        for path in (run_dir / "finished", *(run_dir / x for x in ("metrics.csv", "config.json") if x not in names)):
            path.unlink()
        if "config.json" in names:  # otherwise what is left there is nobody's
            shutil.rmtree(run_dir / "checkpoints")
        if "metrics.csv" in names:
            cut(run_dir / "metrics.csv")
        continued(ppo_ddp, run_dir)
        assert rows(run_dir) == whole
        said = capfd.readouterr().out
        assert ("begins again" in said) == ("config.json" in names) and "going on" not in said
    (run_dir / "config.json").unlink()  # no start of ours leaves metrics.csv alone
    before = content(run_dir)
    with pytest.raises(BadInput, match="holds a run already; name a new directory"):
        continued(ppo_ddp, run_dir)
    assert content(run_dir) == before


def test_a_removed_run_does_not_finish_the_next(tmp_path):
    """Its mark may be left where config.json and metrics.csv were removed by hand."""
    (tmp_path / "finished").touch()
    continued(ppo_ddp, tmp_path, resume=False, checkpoint_every=0)
    assert rows(tmp_path) and not (tmp_path / "finished").exists()


class Mode(StrEnum):
    FAST = "fast"


@dataclass
class MoreArgs(ppo_ddp.Args):
    widths: tuple[int, ...] = (64, 64)
    mode: Mode = Mode.FAST


def test_flags_of_ones_own_that_json_has_no_type_for(tmp_path):
    """A tuple and an Enum: the run goes on, model.pt is read, another value is refused."""
    flags = SMALL | RUNS[ppo_ddp] | {"run_dir": str(tmp_path), "resume": True, "save_model": True}
    ppo_ddp.main(MoreArgs(**flags))
    before = rows(tmp_path)
    (tmp_path / "finished").unlink()
    with pytest.raises(BadInput, match="^--widths .*: must be .* to go on with"):
        ppo_ddp.main(MoreArgs(**flags, widths=(64, 32)))
    ppo_ddp.main(MoreArgs(**flags))
    assert rows(tmp_path) == before
    assert Run(0, "", "", tmp_path).model["args"]["widths"] == [64, 64]


@pytest.mark.parametrize(
    "size, fault",
    [
        (3, "--checkpoint-every 24: must be 0 on 3 processes, which are no power of two"),
        (4, "--shards None: must be set with --checkpoint-every on 4 processes, to 4, 8, ..."),
    ],
)
def test_three_processes_have_no_checkpoints_and_four_need_shards(size, fault, tmp_path):
    """Their sums depend on the layout of DDP's buckets, which each start makes anew."""
    flags = "--num-envs 12 --num-steps 8 --total-timesteps 96 --checkpoint-every 24"
    assert fault in run("ppo_ddp.py", size, flags, tmp_path / "run", code=2).err


def test_a_directory_that_another_node_does_not_see_is_refused(tmp_path):
    class TwoNodes:
        rank, world_size, sharded, stop = 0, 2, False, 0

        def gather_objects(self, value):
            return [value, False if value is True else value]

    rank_0 = SimpleNamespace(enabled=True, resumed=False, finished=False, dir=tmp_path)
    args = ppo_ddp.Args(checkpoint_every=512)
    with pytest.raises(BadInput, match="^--run-dir .*: is not there for all ranks; checkpoints need a shared file"):
        Checkpoints(args, TwoNodes(), rank_0, {}, None).read_newest({})


def test_a_full_disk_at_a_checkpoint(tmp_path):
    """Files of at most 250 kB: a rank's part of the buffer no longer fits, rows and the networks still do."""
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
    """The last transition of each running episode bootstraps from the observation after it, n-step tails are done."""
    world = FakeWorld(0, 1)
    world.gather = lambda values: np.array([values])
    rb = ReplayBuffer(40, 2, world, VECTOR, (), np.int64, n_step=3, gamma=0.5)
    rb.start(np.zeros((2, 2)))
    for step in range(1, 6):  # environment 1 ends in its last step
        ends = np.array([False, step == 5])
        obs = np.full((2, 2), float(step))
        rb.add(np.zeros(2, int), np.ones(2), ends, np.zeros(2, bool), obs, {"episode_ended": ends})
    rb.cut()
    rb.start(np.full((2, 2), 100.0))
    assert (rb.priorities[:, :5] > 0).all()
    batch = rb._batch(np.arange(5), np.arange(5), np.ones(5))
    assert batch.rewards.tolist() == [1.75, 1.75, 1.75, 1.5, 1.0]
    assert batch.discounts.tolist() == [0.125, 0.125, 0.125, 0.25, 0.5]
    assert batch.next_obs[:, 0].tolist() == [3.0, 4.0, 5.0, 5.0, 5.0]
    ended = rb._batch(np.arange(1), np.array([rb.width + 4]), np.ones(1))
    assert ended.discounts.tolist() == [0.0] and not rb.truncations[1, 4]


@pytest.mark.parametrize(
    "env_id",
    ["CartPole-v1", "MinAtar/Breakout-v1", "ALE/Breakout-v5", "LunarLander-v3", "Hopper-v5"],
)
def test_what_environments_did_before_a_start_does_not_matter(env_id):
    """A used environment and a new one, started at a checkpoint, give the same; another checkpoint, something else."""

    def played(before: int, checkpoint: int) -> list[np.ndarray]:
        envs = make_envs(env_id, 1, 0, range(2), (gym.spaces.Space,))
        envs.action_space.seed(0)
        envs.start()
        for _ in range(before):
            envs.step(envs.action_space.sample())
        found = [envs.start(checkpoint).copy()]
        envs.action_space.seed(1)
        for _ in range(60):
            obs, rewards, *_ = envs.step(envs.action_space.sample())
            found += [obs.copy(), rewards.copy()]
        envs.close()
        return found

    used, new, other = played(150, 3), played(0, 3), played(0, 4)
    assert all(np.array_equal(x, y) for x, y in zip(used, new, strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(new, other, strict=True))


def test_torchrun_restarts_go_on_by_themselves(tmp_path):
    """`--max-restarts`: rank 1 kills itself in the first attempt; the second goes on from the checkpoint."""
    flags = f"{PPO} --shards 2 --save-model"
    calm = run("ppo_ddp.py", 1, flags, tmp_path / "calm", "float32")
    words = command("ppo_ddp.py", 2, f"{flags} --resume --run-dir {tmp_path / 'run'}", launched=True)
    words.insert(words.index("--standalone"), "--max-restarts=1")
    env = os.environ | {"LOCKSTEP_FAULT": "kill@1@12", "LOCKSTEP_DTYPE": "float32"}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "going on from" in done.stdout, done.stderr
    assert same_run(calm, Run(0, "", "", tmp_path / "run")) == ""


def test_no_rank_outlives_a_launcher_that_dies_before_they_meet(tmp_path):
    process = start("ppo_ddp.py", 2, f"--run-dir {tmp_path / 'run'}")
    wait_until(lambda: len(descendants(process)) >= 3, process)
    family = descendants(process)
    process.kill()
    run = finish(process, tmp_path / "run")
    assert run.code == -signal.SIGKILL and "torchrun, which started this, is gone" in run.err
    assert not psutil.wait_procs(family, 10)[1]


@pytest.mark.parametrize("module", [ppo_ddp, ppg_ddp, dqn_ddp, sac_ddp])
def test_cut_write_start_anew(module, tmp_path, monkeypatch):
    """The order at each checkpoint, the environments' new seeds, and none at the run's end."""
    happened = []

    def note(owner, name, text):
        function = getattr(owner, name)

        def noted(self, *args):
            happened.append(text(*args))
            return function(self, *args)

        monkeypatch.setattr(owner, name, noted)

    note(Environments, "start", lambda checkpoint=0: f"start {checkpoint}")
    note(Checkpoints, "write", lambda step, number: f"write {step}")
    note(ReplayBuffer, "cut", lambda: "cut")
    note(ReplayBuffer, "start", lambda obs: "fill")
    settings = SMALL | RUNS[dqn_ddp] | {"total_timesteps": 160, "prioritized": False, "num_threads": 1}
    fill = ["fill"]
    if module in (ppo_ddp, ppg_ddp):
        settings, fill = SMALL | RUNS[ppo_ddp] | {"total_timesteps": 160, "checkpoint_every": 50}, []
    if module is ppg_ddp:
        settings |= {"n_pi": 3, "aux_epochs": 1, "num_aux_minibatches": 2}
    module.main(module.Args(**settings, run_dir=str(tmp_path / "run")))
    steps = {ppo_ddp: (64, 112), ppg_ddp: (96, 144)}.get(module, (50, 100, 150))
    expected = ["start 0", *fill]
    for number, step in enumerate(steps, 1):
        expected += [*(["cut"] if fill else []), f"write {step}", f"start {number}", *fill]
    assert happened == expected
