"""What environments, sweeps and programs of others do must not change a number, lose a run or go unsaid."""

import io
import os
import random
import re
import runpy
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import dqn_ddp
import ppo_ddp
import sac_ddp
from common import environments, processes
from common.arguments import parse
from common.encoders import Pixels
from common.environments import TRAINING, Environments
from common.logger import run_record
from common.processes import BadInput, World
from common.replay import ReplayBuffer
from common.shards import Gradient
from runs import ROOT, Run, finish, fork, run, start
from tests.envs import Plain

PLAIN = "tests.envs:Plain-v0"
SHORT = f"--env-id {PLAIN} --num-steps 16 --num-minibatches 2 --total-timesteps 256 --eval-every 0"
REPLAY = f"--env-id {PLAIN} --total-timesteps 256 --learning-starts 64 --buffer-size 400 --batch-size 8 --eval-every 0"


def options(**given: object) -> str:
    text = ",".join(f'"{name}":{value}' if name != "how" else f'"how":"{value}"' for name, value in given.items())
    return f"--env-kwargs {{{text}}}"


def rows_of(module, flags: str, run_dir: Path) -> list[dict[str, str]]:
    module.main(parse(module.Args, [*flags.split(), "--run-dir", str(run_dir)]))
    return Run(0, "", "", run_dir).rows


@pytest.mark.parametrize("script, flags", [("ppo_ddp.py", SHORT), ("ppg_ddp.py", SHORT), ("sac_ddp.py", REPLAY)])
def test_units_of_actions_do_not_matter(script, flags, tmp_path):
    """Bounds of +-1, +-0.001, +-1000, and 99 to 101: the same curve to rounding."""
    if script == "ppg_ddp.py":
        flags += " --n-pi 2 --num-aux-minibatches 2"
    found = []
    for scale, shift in ((1.0, 0.0), (0.001, 0.0), (1000.0, 0.0), (1.0, 100.0)):
        more = f"--save-model {options(scale=scale, shift=shift)}"
        done = run(script, 1, f"{flags} {more}", tmp_path / f"{scale}_{shift}")
        found.append([float(row[name] or 0) for row in done.rows for name in row])
    assert len(found[0]) > 10
    for others in found[1:]:
        np.testing.assert_allclose(others, found[0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("how, again", [("spaces", "spaces"), ("seeds_itself", "seeds_itself"), ("", "array_of_one")])
@pytest.mark.parametrize("module, flags", [(ppo_ddp, SHORT), (dqn_ddp, REPLAY)])
def test_what_environments_draw_elsewhere_repeats(how, again, module, flags, tmp_path):
    """From spaces, and from generators that they seed in a reset. A reward may be an array."""
    first = rows_of(module, f"{flags} {options(how=how)}", tmp_path / "first")
    assert rows_of(module, f"{flags} {options(how=again)}", tmp_path / "again") == first and first


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("how, kind, said", [
    ("bytes", BadInput, r"observed float64\[3\], where its space has uint8\[3\]"),
    ("shape", ValueError, "environment 0, its step 15"),
    ("two_rewards", ValueError, r"array of size 1(.|\n)*environment 0, its step 15"),
    ("raise", ZeroDivisionError, "environment 0, its step 15"),
    ("huge_observation", FloatingPointError, "environment 0, its step 15: its observation is not finite"),
    ("huge_reward", FloatingPointError, "environment 0, its step 15: its reward is not finite"),
    ("remove", FileNotFoundError, "metrics.csv"),  # rows that cannot be kept
])  # fmt: skip
def test_an_environments_fault_is_told_with_its_step(vectorization, how, kind, said, tmp_path, monkeypatch, recwarn):
    """In this process and in processes of their own, whose errors gymnasium prints as warnings."""
    monkeypatch.setenv("LOCKSTEP_RUN", str(tmp_path / "run"))
    with pytest.raises(kind) as raised:
        rows_of(ppo_ddp, f"{SHORT} {options(how=how)} --vectorization {vectorization}", tmp_path / "run")
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", []), *(str(x.message) for x in recwarn)])
    assert re.search(said, told)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("where", ["made", "reset", "close"])
def test_an_environment_that_exits_is_a_fault(where, world_size, tmp_path):
    run("ppo_ddp.py", world_size, f"{SHORT} {options(how='exit_' + where)}", tmp_path / "run", code=1)


def test_a_run_outlives_what_an_environment_does_at_its_end_and_with_the_folder(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for how in ("close", "chdir"):
        words = f"{SHORT} {options(how=how)} --save-model --run-dir {how}".split()
        ppo_ddp.main(parse(ppo_ddp.Args, words))
        os.chdir(tmp_path)
        assert (tmp_path / how / "model.pt").exists()
    assert "closed already" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["unseeded", ""])
def test_a_task_that_does_not_repeat_is_told(how, tmp_path, monkeypatch, capfd):
    """By what evaluations begin with; and a long evaluation says how far it is."""
    monkeypatch.setattr(environments, "PROGRESS_PERIOD", 0.0)
    monkeypatch.setattr(environments, "EVALUATION_BOUNDARY", 5)
    rows_of(ppo_ddp, f"{SHORT} {options(how=how)} --eval-every 128 --eval-episodes 2", tmp_path / "run")
    said = capfd.readouterr().out
    assert said.count("no run of this task repeats") == (2 if how else 0)
    assert said.count("evaluation: 2 of 2 episodes go on after 5 steps") == 3


def test_a_rank_may_wait_for_long_for_another_that_goes_on(tmp_path):
    """Of an evaluation of one episode, four seconds long on rank 0, rank 1 has nothing to do."""
    flags = f"{SHORT} {options(how='slow')} --total-timesteps 64 --eval-every 64 --eval-episodes 1 --timeout 3"
    assert len(run("ppo_ddp.py", 2, flags, tmp_path / "run").column("eval/episodic_return")) == 2


@pytest.mark.parametrize("what, code, said", [
    ("flag", 2, r"error: --gamma 0.99: must be 0.9 as on rank 1.$"),
    ("resume", 2, r"error: --resume: must be on all ranks or on none.$"),
    ("code", 2, r"error: the code on rank 1: must be the same as on rank 0.$"),
    ("processor", 0, r"^no longer the same bytes as on one process: blas .*, on rank 1 .*Nehalem"),
    ("", 0, r"^writing to"),
])  # fmt: skip
def test_ranks_compare_what_they_were_given(what, code, said, tmp_path):
    """Other flags and code are refused by name, another processor is said."""
    flags = f"{SHORT} --env-id CartPole-v1 --shards 2 --checkpoint-every 512 --run-dir {tmp_path / 'run'}"
    program = tmp_path / "program.py"
    program.write_text(f"""
import os, sys
other = "{what}" if os.environ["RANK"] == "1" else ""
if other == "processor":
    os.environ["OPENBLAS_CORETYPE"] = "Nehalem"
import ppo_ddp
sys.argv = ["ppo_ddp.py", *"{flags}".split(), *dict(flag=["--gamma", "0.9"], resume=["--resume"]).get(other, [])]
if other == "code":
    ppo_ddp.__file__ = __file__
ppo_ddp.launch(ppo_ddp.main, ppo_ddp.Args)
""")
    if what == "processor":  # numpy asks which when it is imported
        done = finish(start(str(program), 2, ""), tmp_path / "run")
        text = done.out + done.err
        assert done.code == code, text
    else:
        text = fork(runpy.run_path, (str(program),), 2, tmp_path / "out", {}, code)
    assert re.search(said, text, re.MULTILINE), text
    assert ("no longer" in text) == (what == "processor")
    assert (tmp_path / "run" / "metrics.csv").exists() == (code == 0)


def test_a_run_leaves_its_process_as_it_was(tmp_path):
    """Generators, threads, small numbers; in a thread too, and twice in one process."""

    def state() -> list:
        drawn = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
        return [*drawn, torch.get_num_threads(), float(torch.tensor(1e-39) * 1.0)]

    rows = [rows_of(ppo_ddp, SHORT, tmp_path / "a")]
    torch.set_num_threads(2)
    args = parse(ppo_ddp.Args, [*SHORT.split(), "--run-dir", str(tmp_path / "again")])  # tyro draws
    fault = parse(ppo_ddp.Args, f"{SHORT} {options(how='raise')} --run-dir {tmp_path / 'fault'}".split())
    before = state()
    ppo_ddp.main(args)
    assert state() == before and before[-1] > 0
    with pytest.raises(ZeroDivisionError):
        ppo_ddp.main(fault)
    assert state() == before
    thread = threading.Thread(target=lambda: rows.append(rows_of(ppo_ddp, SHORT, tmp_path / "b")))
    thread.start()
    thread.join()
    torch.set_num_threads(1)
    assert rows[0] == rows[1]


SWEEPS = {
    "--anneal_lr=False --clip-vloss False": {"anneal_lr": False, "clip_vloss": False},
    "--anneal-lr=true --norm_obs True --num_envs=8": {"anneal_lr": True, "norm_obs": True, "num_envs": 8},
    "--track=False --target_kl=None --no-clip-vloss": {"track": False, "target_kl": None, "clip_vloss": False},
}


@pytest.mark.parametrize("words", SWEEPS)
def test_flags_as_sweeps_write_them(words):
    args = parse(ppo_ddp.Args, words.split())
    assert {name: getattr(args, name) for name in SWEEPS[words]} == SWEEPS[words]


TAKEN = [("total_timesteps", 1e5, 100_000), ("seed", np.int64(2), 2), ("learning_rate", np.float32(0.5), 0.5)]
TAKEN += [("run_dir", Path("x"), "x"), ("norm_obs", np.bool_(True), True), ("target_kl", None, None)]


@pytest.mark.parametrize("name, given, value", TAKEN)
def test_what_a_program_may_give(name, given, value):
    taken = getattr(ppo_ddp.Args(**{name: given}), name)
    assert taken == value and type(taken) is type(value)


@pytest.mark.parametrize("module, name, given", [
    (ppo_ddp, "norm_adv", True),
    (dqn_ddp, "loss", "smooth_l1"),
    (ppo_ddp, "anneal_lr", "False"),
    (sac_ddp, "total_timesteps", 100_000.5),
    (ppo_ddp, "num_envs", True),
    (ppo_ddp, "learning_rate", "fast"),
    (ppo_ddp, "run_dir", 5),
])  # fmt: skip
def test_what_means_nothing_is_refused_from_a_program_too(module, name, given):
    with pytest.raises(BadInput, match=f"--{name.replace('_', '-')} {given}: must be"):
        module.Args(**{name: given})


def test_variables_of_launchers_that_are_empty_or_alone(monkeypatch):
    for rank in ("", "0"):
        monkeypatch.setenv("RANK", rank)
        world = World(False)
        assert (world.rank, world.world_size) == (0, 1)
    monkeypatch.setattr(processes, "container_limit", lambda name: 0.5)
    assert World(False).cores == 1


def test_records_do_not_depend_on_other_libraries(monkeypatch):
    """threadpoolctl finds scipy's BLAS too once that is loaded, before numpy's or after it."""
    found = [{"user_api": "blas", "internal_api": "openblas", "version": x, "filepath": x} for x in ("numpy", "scipy")]
    records = []
    for order in (found, found[::-1], found[:1]):
        monkeypatch.setattr("common.logger.threadpool_info", lambda order=order: order)
        records.append(run_record(ppo_ddp.Args(), Path("ppo_ddp.py"), (), World(False)))
    assert records[0] == records[1] == records[2] and len(records[0]["blas"]) == 1


def test_a_console_of_few_letters(tmp_path, monkeypatch):
    """And streams that are no files, as in a notebook."""
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    rows_of(ppo_ddp, SHORT, tmp_path / "Läufe")
    console.flush()
    assert b"writing to" in console.buffer.getvalue() and rb"L\xe4ufe" in console.buffer.getvalue()


def test_what_gymnasium_can_flatten_is_learned_from(tmp_path, capfd):
    rows_of(dqn_ddp, REPLAY.replace(PLAIN, "Blackjack-v1"), tmp_path / "run")
    said = "observations are flattened: Tuple(Discrete(32), Discrete(11), Discrete(2)) to 45 numbers"
    assert said in capfd.readouterr().out


def test_a_priority_that_is_no_number_is_an_error():
    """It would make every sum of priorities NaN, and batches empty."""
    buffer = ReplayBuffer(8, 2, World(False), Plain.observation_space, (), np.int64, alpha=0.6)
    with pytest.raises(FloatingPointError, match="TD error is not finite"):
        buffer.update_priorities(np.array([0]), torch.tensor([torch.nan]))


def test_a_parameter_that_a_loss_does_not_use_is_told_on_one_process_too():
    """As on several, where DDP refuses it."""

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used = torch.nn.Linear(2, 1)
            self.unused = torch.nn.Linear(2, 1)

        def forward(self, x):
            return self.used(x).mean(), {}

    with pytest.raises(BadInput, match="^Loss: its result must depend on unused.weight, unused.bias[.]$"):
        Gradient(Loss(), World(False), False, print)((torch.ones(3, 2),), None)


def test_nothing_stays_of_a_checkpoint_that_could_not_be_read():
    """A longer buffer whose second shard was damaged, then the shorter one before it."""

    def filled(steps: int) -> ReplayBuffer:
        buffer = ReplayBuffer(8, 2, world, Plain.observation_space, (), np.int64, alpha=0.6)
        buffer.observe(np.zeros((2, 3), np.float32))
        for step in range(steps):
            ends = np.full(2, step == 2)
            infos = {"final_obs": {i: np.ones(3) for i in np.flatnonzero(ends)}, "episode_ended": ends}
            buffer.add(np.zeros(2), np.ones(2), ~ends & ends, ends, np.ones((2, 3), np.float32), infos)
        return buffer

    world = World(False, 2)
    longer, shorter, read, new = filled(3), filled(1), filled(0), filled(0)
    read.load_shard(0, longer.shard_state(0), longer.state_dict())
    for buffer in (read, new):
        for shard in (0, 1):
            buffer.load_shard(shard, shorter.shard_state(shard), shorter.state_dict())
    assert np.array_equal(read.priorities, new.priorities) and read.final_obs == new.final_obs == {}
    assert read.priorities.sum() == 2
    for shard in (0, 1):
        new.load_shard(shard, longer.shard_state(shard), longer.state_dict())
    assert all(np.array_equal(x, getattr(new, name)) for name, x in vars(longer).items() if isinstance(x, np.ndarray))


def test_whole_numbers_without_a_useful_bound_are_not_scaled():
    for high, scale in ((255, 255), (1, 1), (2**16 - 1, 2**16 - 1), (2**31 - 1, 1)):
        assert Pixels(gym.spaces.Box(0, high, (3, 8, 8), np.int32)).scale == scale


def test_bounds_that_a_type_has_by_itself_are_none(monkeypatch):
    """Such a dimension is neither scaled nor clipped into one."""
    large = np.finfo(np.float32).max
    space = gym.spaces.Box(np.float32([-large, -2, 0]), np.float32([large, 6, np.inf]))
    simulators = SimpleNamespace(single_action_space=space, single_observation_space=space)
    monkeypatch.setattr(Environments, "_make", lambda self: simulators)
    envs = Environments(ppo_ddp.Args(env_id=PLAIN), TRAINING, [range(1)], World(False))
    assert envs.single_action_space.low.tolist() == [-large, -1, 0]
    assert envs.for_simulator(np.array([[50.0, 0.5, -3.0]])).tolist() == [[50.0, 4.0, 0.0]]


SPAWNED = """
import multiprocessing, ppo_ddp
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    words = dict(num_envs=1, num_steps=8, num_minibatches=2, total_timesteps=16, eval_every=0, vectorization="async")
    ppo_ddp.main(ppo_ddp.Args(**words, env_id="MinAtar/Breakout-v1", run_dir="run"))
"""


def test_spawned_workers_find_every_environment_that_the_run_finds(tmp_path):
    """As on macOS, and on Linux from Python 3.14."""
    (tmp_path / "go.py").write_text(SPAWNED)
    done = finish(start(str(tmp_path / "go.py"), 1, "", cwd=tmp_path, PYTHONPATH=str(ROOT)), tmp_path / "run")
    assert done.code == 0, done.err
