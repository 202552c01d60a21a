"""C4, C5 and C7: unequal ranks are named; however a run ends, it leaves no process, and its rows."""

import csv
import os
import random
import re
import signal
import time
from collections.abc import Mapping
from typing import NamedTuple

import psutil
import pytest

import ppo_ddp
import sac_ddp
from common.environments import Episode
from common.processes import World
from runs import Run, descendants, finish, free_port, run, send, start, train, wait_until

SHORT = "--num-steps 16 --total-timesteps 2048 --eval-every 1024 --eval-episodes 4"
LONG = "--num-steps 32 --total-timesteps 100000000 --eval-every 2000 --eval-episodes 6"
PHASES = "--n-pi 2 --aux-epochs 4 --num-aux-minibatches 4"
REPLAY = "--buffer-size 4000 --learning-starts 100 --batch-size 16 --log-every 64 --prioritized"
SHORT_REPLAY = f"{REPLAY} --total-timesteps 512 --eval-every 256 --eval-episodes 4"
LONG_REPLAY = f"{REPLAY} --total-timesteps 100000000 --eval-every 2000 --eval-episodes 6"


def begin(script, world_size, flags, run_dir, launched=True, **env):
    """Start a run and wait until it has written some rows."""
    process = start(script, world_size, f"{flags} --run-dir {run_dir}", launched, **env)
    path = run_dir / "metrics.csv"
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) > 3, process)
    return process, descendants(process)


def ended(process, family, run_dir, timeout=60) -> Run:
    """Wait for the end; no process must be left, and each row must be whole."""
    run = finish(process, run_dir, timeout)
    assert_gone(family, timeout / 6)
    assert whole_rows(run_dir) >= 3
    return run


def assert_gone(processes, timeout=10) -> None:
    """In ten seconds; what is left is ended."""
    _, alive = psutil.wait_procs(processes, timeout)
    send(alive, signal.SIGKILL)
    assert not alive, f"left: {alive}"


def whole_rows(run_dir) -> int:
    """How many rows metrics.csv has; each must be whole."""
    with open(run_dir / "metrics.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert all(len(row) == len(header) for row in rows)
    return len(rows)


@pytest.mark.parametrize("script, flags, name", [
    ("ppo_ddp.py", SHORT, "['agent']['actor.4.bias']"),
    ("ppg_ddp.py", f"{SHORT} {PHASES}", "['agent']['actor.4.bias']"),
    ("dqn_ddp.py", SHORT_REPLAY, "['q_network']['head.2.bias']"),
    ("sac_ddp.py", f"{SHORT_REPLAY} --eval-every 0 --checkpoint-every 256", "['actor']['layers.4.bias']"),
])  # fmt: skip
def test_a_changed_parameter_is_named(script, flags, name, tmp_path):
    """Moved by 1e-7 on rank 1, with its name and the step."""
    ended = run(script, 2, flags, tmp_path / "run", code=1, LOCKSTEP_FAULT="parameter@1@6")
    step = 256 if "--log-every" in flags else 1024
    assert f"RuntimeError: step {step}: {name} on rank 1 differs from rank 0's" in ended.err, ended.err


def test_a_crash_on_one_rank_shows_its_traceback(tmp_path):
    """The other rank ends with one line, without a traceback, and is not blamed."""
    process, family = begin("dqn_ddp.py", 2, LONG_REPLAY, tmp_path, LOCKSTEP_FAULT="raise@1@200")
    run = ended(process, family, tmp_path)
    assert run.code == 1 and "ZeroDivisionError: a fault on purpose" in run.err
    assert "rank 0: stopped, because another rank ended." in run.err
    assert not re.search("Connection closed by peer|RuntimeError: rank 0", run.err)
    assert re.search(r"Root Cause[^\n]*\n(?:[^\n]*\n){3} +rank +: 1 ", run.err), "the waiting rank is blamed"


def test_a_rank_that_hangs_is_reported_with_its_stack(tmp_path):
    """Where it stands. The other, in the collective, may end before."""
    note = {"LOCKSTEP_FAULT": "hang@1@40", "LOCKSTEP_NOTE": str(tmp_path / "hangs")}
    hung = run("ppo_ddp.py", 2, f"{LONG} --timeout 10", tmp_path / "run", code=1, **note)
    assert whole_rows(hung.dir) >= 3 and "Timeout (0:00:10)!" in hung.err
    assert "in stand_still" in hung.err and "in train" in hung.err


def test_a_process_that_an_environment_forks_is_no_rank(tmp_path):
    """Checkpoints and the end of the run end it by SIGTERM, which is no request to the run."""
    flags = "--env-id tests.envs:HelpedCartPole-v0 --num-steps 16 --total-timesteps 512 --checkpoint-every 128"
    process = start("ppo_ddp.py", 1, f"{flags} --eval-every 0 --run-dir {tmp_path}")
    run = ended(process, descendants(process), tmp_path)
    assert run.code == 0, run.err


def test_gradient_steps_are_progress(tmp_path, watch):
    """An iteration of many may take longer than --timeout."""
    fed = watch(World, "feed")
    train(ppo_ddp, tmp_path / "run", num_steps=8, total_timesteps=32, update_epochs=50)
    assert len(fed) >= 8 + 50 * 4  # vector steps, gradient steps


def test_divergence_ends_both_ranks(tmp_path):
    diverged = run("ppo_ddp.py", 2, f"{SHORT} --learning-rate 1e38", tmp_path / "run", "float32", code=1)
    assert re.search(r"Error: step \d+: losses/\S+ is not finite; try", diverged.err), diverged.err


@pytest.mark.parametrize(
    "script, flags, number, code",
    [("ppg_ddp.py", f"{LONG} {PHASES}", signal.SIGINT, 130), ("sac_ddp.py", LONG_REPLAY, signal.SIGTERM, 143)],
)
def test_one_process_stops_on_request(script, flags, number, code, tmp_path):
    """With asynchronous environments: the next boundary, the model, the right code."""
    process, family = begin(script, 1, f"{flags} --vectorization async --save-model", tmp_path)
    os.killpg(process.pid, number)  # to all of its group, as a terminal's Ctrl-C
    run = ended(process, family, tmp_path)
    assert run.code == code and run.model["global_step"] > 0 and "Traceback" not in run.err, run.err


def test_two_ranks_stop_on_request(tmp_path):
    """One rank alone is asked; both agree at the next boundary, and the model is written."""
    process, family = begin("dqn_ddp.py", 2, f"{LONG_REPLAY} --save-model", tmp_path)
    ranks = [process for process in family if "torch.distributed.run" not in process.cmdline()]
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGTERM)
    run = ended(process, family, tmp_path)
    assert run.code == 1 and run.model["global_step"] > 0 and "in train" not in run.err


@pytest.mark.parametrize("grace", [3, 1000])
def test_a_run_that_reaches_no_boundary_is_ended(grace, tmp_path):
    """Some seconds after a request, not sooner; or by a second one, half a second after the first."""
    note = {"LOCKSTEP_FAULT": "hang@0@40", "LOCKSTEP_NOTE": str(tmp_path / "hangs"), "LOCKSTEP_GRACE": str(grace)}
    process, family = begin("ppo_ddp.py", 1, LONG, tmp_path, **note)
    wait_until((tmp_path / "hangs").exists, process)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    for wait in (0.1, 1.0) if grace > 3 else ():  # launchers may deliver one request twice
        time.sleep(wait)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    assert ended(process, family, tmp_path).code == 143 and (grace > 3 or time.monotonic() - begun > 3)


def test_a_stop_in_the_first_evaluation_learns_nothing(tmp_path, monkeypatch):
    def evaluate(act, args, world, note):
        world.stop = signal.SIGTERM
        return {"eval/episodic_return": 0.0}, Episode(None, [], 0.0)

    monkeypatch.setattr("common.run.evaluate", evaluate)
    with pytest.raises(SystemExit, match="143"):
        sac_ddp.main(sac_ddp.Args(run_dir=str(tmp_path / "run"), learning_starts=50, total_timesteps=100))
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 1


def test_no_rank_outlives_a_launcher_that_dies_before_they_meet(tmp_path):
    process = start("ppo_ddp.py", 2, f"--run-dir {tmp_path / 'run'}")
    wait_until(lambda: len(descendants(process)) >= 3, process)
    family = descendants(process)
    process.kill()
    assert finish(process, tmp_path / "run").code == -signal.SIGKILL
    assert_gone(family)


def test_a_run_whose_second_rank_never_comes_says_so(tmp_path):
    """Before --timeout ends it, and in torch's own words."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "2"}
    run = finish(start("ppo_ddp.py", 1, f"--timeout 6 --run-dir {tmp_path / 'run'}", **place), tmp_path / "run")
    assert run.code == 1 and "waiting for clients. 1/2 clients joined." in run.err, run.err


class Fault(NamedTuple):
    """A command, what must come of it, and what is done to it once it has written three rows."""

    script: str
    flags: str
    code: int  # of the script: torchrun makes 1 of each
    says: str = ""  # with code 2 in the one message
    processes: int = 1
    kill: tuple[int, int] | None = None  # which process of its family, and the signal
    env: Mapping[str, str] = {}


PLAIN = "--env-id tests.envs:Plain-v0 --env-kwargs"
ASYNC, HUNG = "--vectorization async", "Timeout (0:00:10)!"
ONLINE = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": "/nowhere"}
OFFLINE = ONLINE | {"WANDB_API_KEY": "0123456789" * 4, "WANDB_BASE_URL": "http://127.0.0.1:9"}
APART = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LAUNCHER, FIRST, LAST = 0, 1, -1
HOW = ("nan", "exit_step", "raise", "slow_made", "files")
NAN, EXIT, RAISE, SLOW, FILES = (f'{PLAIN} {{"how":"{x}"}}' for x in HOW)
FAULTS = {
    "sys.exit of an environment": Fault("ppo", EXIT, 1, "RuntimeError: sys.exit(3) was called"),
    "two ranks, a flag": Fault("ppo", "--no-such-flag", 2, "--no-such-flag", processes=2),
    "two ranks, a number": Fault("ppo", "--num-envs 5", 2, "such as 4", processes=2),
    "torchrun killed": Fault("dqn", "", -9, processes=2, kill=(LAUNCHER, signal.SIGKILL), env=APART),
    "a worker killed": Fault("ppo", ASYNC, 1, "async_vector_env.py", kill=(FIRST, signal.SIGKILL)),
}
SLOW_FAULTS = {
    "two ranks, nan": Fault("ppo", NAN, 1, "environment 0, its step 7: its reward", processes=2),
    "raised in a worker": Fault("ppo", f"{RAISE} {ASYNC}", 1, "lidar lost"),
    "nan in an evaluation": Fault("ppo", f"{NAN} --eval-every 64", 1, "evaluation episode 0, its step 7: its reward"),
    "two ranks, no login": Fault("ppo", "--track", 2, "--track: ", processes=2, env=ONLINE),
    "no network": Fault("ppo", "--track", 2, "--track: ", env=OFFLINE),
    "too many open files": Fault("ppo", f"{FILES} --num-envs 64 {ASYNC}", 1, "Too many open files"),
    "no git": Fault("ppo", "", 0, env={"PATH": "/nowhere"}),
    "a rank killed": Fault("ppo", "", 1, "exitcode : -9", processes=2, kill=(LAST, signal.SIGKILL)),
    "a rank stands still": Fault("sac", "--timeout 10", 1, HUNG, processes=2, kill=(LAST, signal.SIGSTOP)),
    "a worker stands still": Fault("dqn", f"{ASYNC} --timeout 10", 1, HUNG, kill=(FIRST, signal.SIGSTOP)),
    "Ctrl-C while one is made": Fault("ppo", SLOW, 130, kill=(LAUNCHER, signal.SIGINT)),
}
CASES = [*FAULTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAULTS)]


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_told_once_and_leaves_nothing_behind(name, tmp_path):
    """No process, and no file of a run that did not start; the rows of one that did are whole."""
    fault = (FAULTS | SLOW_FAULTS)[name]
    steps = 100000000 if fault.kill else 1024
    sizes = f"{REPLAY} --eval-every 0" if fault.script in ("dqn", "sac") else "--num-steps 16 --eval-every 0"
    flags = f"{sizes} --total-timesteps {steps} --run-dir run {fault.flags}"
    process = start(f"{fault.script}_ddp.py", fault.processes, flags, cwd=tmp_path, **fault.env)
    path = tmp_path / "run" / "metrics.csv"
    if fault.kill:
        begun = tmp_path / "begun"
        wait_until(lambda: begun.exists() or (path.exists() and path.read_text().count("\n") > 3), process)
        which, number = fault.kill
        descendants(process)[which].send_signal(number)
    run = finish(process, tmp_path / "run")
    assert_gone([process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(tmp_path)])
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", run.err + run.out).split())
    assert fault.says in text
    assert run.code == (min(fault.code, 1) if fault.processes > 1 else fault.code), text
    messages = re.findall("^error: |^╭", run.err + run.out, re.MULTILINE)
    assert len(messages) == (fault.code == 2), text
    if fault.code != 1:
        assert not re.search(r'(?:common/\w+|_ddp)\.py", line \d+, in ', run.err), text
    if fault.code == 2:
        assert {x.name for x in tmp_path.rglob("*") if x.is_file() and "wandb" not in x.parts} <= {"lock"}
    elif path.exists():
        assert whole_rows(tmp_path / "run") >= 3 * (fault.kill is not None)


@pytest.mark.slow
def test_signals_at_random_moments(tmp_path):
    """30, to torchrun: in rollouts, updates, auxiliary phases and evaluations."""
    chance = random.Random(1)
    for trial in range(30):
        script, flags = (("ppg_ddp.py", f"{LONG} {PHASES}"), ("sac_ddp.py", LONG_REPLAY))[trial % 2]
        flags += " --vectorization async" if trial % 3 == 0 else ""
        process, family = begin(script, 2, flags, tmp_path / str(trial), launched=False)
        time.sleep(chance.uniform(0, 2))
        family = descendants(process)
        process.send_signal(chance.choice([signal.SIGINT, signal.SIGTERM]))
        run = ended(process, family, tmp_path / str(trial))
        assert run.code != 0 and "Aborted" not in run.err
