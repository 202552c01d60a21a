"""Bad inputs, users' edits and faults of the machine, each tried in a process of its own, and what the user is told.

    python tests/faults.py [--only WORD] [--output FILE.md]

Prints a Markdown table. Ends with code 1, and the reasons on stderr, where a row is not as it must be: the exit code,
the text, exactly one message, no traceback of ours, no process left, nothing left of a run that did not start, and
whole rows of one that did, unless a disk was full.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 240.0  # seconds for one case
REFUSED_FLAGS = [  # script, flags, what is said
    ("ppo", "--no-such-flag 1", "--no-such-flag"),
    ("ppo", "--env-id", "--env-id"),
    ("ppo", "--resume", "--run-dir None: must be a directory with --resume"),
    ("ppo", "--resume --run-dir= --checkpoint-every 512", "--run-dir : must be a directory with --resume"),
    ("dqn", "--resume --run-dir somewhere", "--checkpoint-every 0: must be at least 1 with --resume"),
    ("sac", "--checkpoint-every -1", "--checkpoint-every -1: must be an integer of at least 0"),
    ("ppo", "--norm-obs True", "--norm-obs True: takes no value"),
    ("ppo", "--norm-obs=False", "--norm-obs False: takes no value"),
    ("ppo", "--total-timesteps 1e6", "--total-timesteps"),
    ("ppo", "--vectorization thread", "--vectorization"),
    ("ppo", "--learning-rate nan", "--learning-rate nan: must be a number above 0"),
    ("ppo", "--learning-rate -0.1", "--learning-rate -0.1: must be a number above 0"),
    ("ppo", "--num-envs 0", "--num-envs 0: must be an integer of at least 1"),
    ("ppo", "--num-steps 10", "--num-steps 10: must be a multiple of --num-minibatches (4), such as 8 or 12"),
    ("ppo", "--seed 4294967296", "--seed 4294967296: must be an integer from 0 to 2**32 - 1"),
    ("ppo", "--seed -1", "--seed -1: must be an integer from 0"),
    ("ppo", "--gamma 1.1", "--gamma 1.1: must be a number from 0 to 1"),
    ("ppo", "--target-kl 0.01 --update-epochs 1", "--update-epochs 1: must be at least 2 with --target-kl"),
    ("ppg", "--target-kl 0.01", "--update-epochs 1: must be at least 2 with --target-kl"),
    ("ppo", "--env-kwargs nonsense", "--env-kwargs nonsense: must be a JSON object, such as '{"),
    ("ppo", "--load-model nothing.pt", "--load-model nothing.pt: cannot be read (No such file or directory)"),
    ("dqn", "--capture-video --eval-every 0", "--eval-every 0: must be at least 1 with --capture-video"),
    ("sac", "--total-timesteps 0", "--total-timesteps 0: must be at least"),
    (
        "ppo",
        "--total-timesteps 0 --load-model a --eval-every 0",
        "--eval-every 0: must be at least 1 with --total-time",
    ),
    ("ppo", "--timeout 1e10", "--timeout 10000000000.0: must be a number from 2 to 1e6"),
    ("ppo", "--timeout 1", "--timeout 1.0: must be a number from 2 to 1e6"),  # a run feeds its watchdog once a second
    ("ppo", "--total-timesteps 100", "--total-timesteps 100: must be at least one iteration"),
    ("ppo", "--num-envs 1 --num-steps 16 --num-minibatches 16", "--norm-adv minibatch: must be none"),
    ("ppo", "--shards 3", "--shards 3: must be a power of two, such as 2 or 4"),
    ("ppo", "--shards 8", "--num-envs 4: must be a multiple of --shards (8), such as 8"),
    ("ppo", "--stop-at-return 100 --eval-every 0", "--eval-every 0: must be at least 1 with --stop-at-return"),
    ("ppg", "--num-aux-minibatches 3", "--num-aux-minibatches 3: must be a divisor of"),
    ("ppg", "--total-timesteps 5000", "--total-timesteps 5000: must be at least 8192"),
    ("dqn", "--buffer-size 1001", "--buffer-size 1001: must be a multiple of --num-envs (4), such as 1000 or 1004"),
    ("dqn", "--batch-size 20000", "--batch-size 20000: must be at most --buffer-size (10000)"),
    ("dqn", "--total-timesteps 5000", "--total-timesteps 5000: must be at least 1000"),
    ("dqn", "--buffer-size 1000000000000", "--buffer-size 1000000000000: must be at most"),
    ("dqn", "--n-step 5000", "--buffer-size 10000: must be at least 20000 with --n-step"),
    ("sac", "--tau 0", "--tau 0.0: must be a number above 0"),
    ("sac", "--alpha nan", "--alpha nan: must be a number above 0"),
]
REFUSED_ENVIRONMENTS = [  # script, id, what is said; what begins with ":" is made below
    ("ppo", "NoSuchEnv-v0", "Environment `NoSuchEnv` doesn't exist."),
    ("ppo", "CartPole-v7", "`v7`"),
    ("ppo", "LunarLander-v2", "use `LunarLander-v3`"),
    ("ppo", "nomodule:Env-v0", "No module named 'nomodule'"),
    ("ppo", "my/envs.py:Env-v0", "must be an id, such as"),
    ("ppo", "ALE/NoSuchGame-v5", "NoSuchGame"),
    ("ppo", "MinAtar/NoSuch-v1", "NoSuch"),
    ("ppo", "phys2d/CartPole-v1", "pip install jax"),
    ("ppo", ":Discrete-v0", "observation space Discrete(2): must be a vector"),
    ("ppo", ":Dict-v0", "observation space Dict("),
    ("ppo", ":Matrix-v0", "observation space Box("),
    ("ppo", ":Middle-v0", "fewer channels, first or last, than rows and columns"),
    ("dqn", ":Square-v0", "fewer channels, first or last, than rows and columns"),
    ("ppo", ":Empty-v0", "observation space Box("),
    ("ppo", ":Tiny-v0", "3-D Box, at least 3 x 3"),
    ("ppo", ":Image-v0 --norm-obs", "--norm-obs True: must be left off for image observations"),
    ("ppo", "CartPole-v1 --network impala", "--network impala: must be left off for vector observations"),
    ("ppg", "CartPole-v1 --network impala", "--network impala: must be left off for vector observations"),
    ("dqn", "CartPole-v1 --network impala", "--network impala: must be left off for vector observations"),
    ("dqn", "CartPole-v1 --no-scale-pixels", "--scale-pixels False: must be left on, except for images of whole"),
    ("dqn", "MinAtar/Breakout-v1 --no-scale-pixels", "--scale-pixels False: must be left on, except for images"),
    ("ppo", ":MultiDiscrete-v0", "action space MultiDiscrete([2 2]): must be Discrete or Box"),
    ("ppo", ":IntBox-v0", "a Box must hold floats"),
    ("dqn", "Pendulum-v1", "must be Discrete;"),
    ("sac", "CartPole-v1", "action space Discrete(2): must be Box;"),
    ("sac", ":ImageBox-v0", "must be an environment with vector observations, not images"),
    ("sac", ":OpenBox-v0", "must be an environment whose actions have distinct bounds"),
    ("sac", ":HugeBox-v0", "must be an environment whose actions have distinct bounds"),
]
FAULTY_ENVIRONMENTS = [  # script, id, what is said, whether in the user's own traceback
    ("ppo", ":RewardNan-v0", "environment 0, its step 37: a reward is not finite (nan)", False),
    ("ppo", ":ObsNan-v0", "environment 0, its step 37: an observation is not finite (nan)", False),
    ("dqn", ":LastNan-v0", "environment 0, its step 40: its last observation is not finite (nan)", False),
    ("ppo", ":EvalNan-v0 --eval-every 64", "evaluation episode 0, its step 1: a reward is not finite (nan)", False),
    ("ppo", ":Large-v0 --no-norm-reward", "not finite", False),
    ("ppo", ":Exits-v0", "--env-id: an environment called sys.exit(3).", False),
    ("ppo", ":Raises-v0", 'KeyError: "the user\'s own fault"', True),
    ("ppo", ":Leaves-v0", "no server", True),
    ("ppo", ":Raises-v0 --vectorization async", 'KeyError: "the user\'s own fault"', True),
]
PPO_LAYERS = "[layer_init(nn.Linear(size, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]"
EDITS = [  # what, script, what is said ("": it trains), the replacement
    ("none", "ppg", "", []),
    ("dropout", "ppo", "", [(PPO_LAYERS, PPO_LAYERS.replace("nn.Tanh()", "nn.Dropout(0.1)", 1))]),
    ("bad layers", "ppo", "shapes cannot be multiplied", [(PPO_LAYERS, PPO_LAYERS.replace("64))", "32))", 1))]),
    ("a new column", "ppo", "metrics.csv has no column mine", [('row["charts/learning_rate"] =', 'row["mine"] =')]),
    ("a loss that is nan", "ppo", "losses/entropy is not finite", [("entropy.mean()", "(-entropy).log().mean()")]),
]


@dataclass
class Case:
    """A command, what must come of it, and what is done to it; all that is done is said in the shell's words."""

    what: str
    script: str
    flags: str
    code: int
    says: str = ""  # in the one message; "": there is none
    before: str = ""  # done in the folder before
    first: str = ""  # done by the shell that becomes the process
    shell: str = ""  # after the command
    during: str = ""  # done once it has written 3 rows, or has made a file `begun` in its HOME
    edits: list[tuple[str, str]] | None = None  # of a copy of the script, beside a copy of common/
    processes: int = 1
    ran: bool = False  # it got so far that it must leave rows, and otherwise nothing
    traceback: bool = False  # the fault is in the user's own code, and shown as Python shows it


ONLINE = "export WANDB_MODE=online WANDB_API_KEY= NETRC=$HOME/netrc"
FULL, WORKER = "metrics.csv: cannot be written", "async_vector_env.py"
ASYNC, TRACK, PONG = "--vectorization async", "--track", "--env-id ALE/Pong-v5"
STEP = "optimizer.step()"
MOVED = f"{STEP}; optimizer.param_groups[0]['params'][0].data += 1e-6 * torch.distributed.get_rank()"
MACHINE = [
    Case("--run-dir that holds a run", "ppo", "--run-dir a", 2, "holds a run already", "mkdir a; touch a/metrics.csv"),
    Case(
        "--run-dir that is a file", "ppo", "--run-dir a", 2, "--run-dir a: cannot be written (File exists)", "touch a"
    ),
    Case("--run-dir below a file", "ppo", "--run-dir a/b", 2, "--run-dir a/b: cannot be written", "touch a"),
    Case("--run-dir /proc/nowhere", "ppo", "--run-dir /proc/nowhere", 2, "--run-dir /proc/nowhere: cannot be written"),
    Case("--track, no login", "ppo", TRACK, 2, "--track: ", first=ONLINE),
    Case(
        *("--track, no network", "ppo", TRACK, 2, "--track: "),
        first=f"{ONLINE}; export WANDB_API_KEY={'0123456789' * 4} WANDB_BASE_URL=http://127.0.0.1:9",
    ),
    Case("a ROM that is missing", "ppo", PONG, 2, "pong.bin", first="export ALE_ROMS_DIR=$PWD"),
    Case(
        *("a script copied without common/", "ppo", "", 1, "No module named 'common'"),
        first="rm -r common; export PYTHONPATH=",
        edits=[],
        traceback=True,
    ),
    Case("two ranks: --num-envs 5", "ppo", "--num-envs 5", 1, "such as 4 or 6", processes=2),
    Case("two ranks: --track, no login", "ppo", TRACK, 1, "--track: ", first=ONLINE, processes=2),
    Case("two ranks: a reward is nan", "ppo", "--env-id :RewardNan-v0", 1, "its step 37: a reward is", processes=2),
    Case(
        *("two ranks: parameters moved on one", "ppo", "--check-sync-every 64", 1, "differs from rank 0's"),
        edits=[(STEP, MOVED)],
        processes=2,
        ran=True,
    ),
    Case("two ranks: one killed", "ppo", "", 1, "because another rank ended", during="kill -9 $LAST", processes=2),
    Case(
        "two ranks: one stands still",
        "sac",
        "--timeout 10",
        1,
        "Timeout (0:00:10)!",
        during="kill -STOP $LAST",
        processes=2,
        traceback=True,
    ),
    Case("two ranks: torchrun killed", "dqn", "", -9, during="kill -9 $PID", processes=2),
    Case("two ranks: SIGTERM", "ppg", "", 1, during="kill $PID", processes=2),
    Case("disk full", "ppo", "", 1, FULL, first="ulimit -f 4", ran=True),
    Case("disk full at the start", "ppo", "", 1, "run/config.json: cannot be written", first="ulimit -f 1"),
    Case("the run's folder deleted", "ppo", "", 1, FULL, during="rm -r run"),
    Case("no console: stdout is full", "ppo", "", 0, shell="> /dev/full"),
    Case("no console: | head -n 1", "ppo", "", 0, first="set -o pipefail", shell="| head -n 1"),
    Case("no git", "ppo", "", 0, first="export PATH=/nowhere"),
    Case("too many open files", "ppo", f"{ASYNC} --num-envs 64", 2, "Too many open files", first="ulimit -n 64"),
    Case("an environment's process killed", "ppo", ASYNC, 1, WORKER, during="kill -9 $FIRST", traceback=True),
    Case(
        *("an environment stands still", "dqn", f"{ASYNC} --timeout 10", 1, "Timeout (0:00:10)!"),
        during="kill -STOP $FIRST",
        traceback=True,
    ),
    Case("--learning-rate 1e38", "ppo", "--learning-rate 1e38", 1, "not finite", ran=True),
    Case("--learning-rate 1e38", "dqn", "--learning-rate 1e38", 1, "losses/td_loss is not finite", ran=True),
    Case("SIGINT", "ppo", "", 130, during="kill -INT $PID"),
    Case("SIGTERM", "sac", "", 143, during="kill $PID"),
    Case("Ctrl-C, and environments' processes", "ppg", ASYNC, 130, during="kill -INT -- -$PID"),
    Case("SIGKILL", "dqn", "", -9, during="kill -9 $PID"),
    Case("Ctrl-C while an environment is made", "ppo", "--env-id :Slow-v0", 130, during="kill -INT $PID"),
]


class Wrong(gym.Env):
    """Episodes of 10 steps in any spaces; at a step of its life something goes wrong."""

    made = 0

    def __init__(self, obs=None, actions=None, fault="", at=37):
        self.observation_space = gym.spaces.Box(-1, 1, (3,), np.float32) if obs is None else obs
        self.action_space = gym.spaces.Discrete(2) if actions is None else actions
        Wrong.made += 1
        self.fault, self.at, self.steps = fault, at if fault != "evaluation" or Wrong.made > 4 else 0, 0
        if fault == "leaves":
            sys.exit("no server")
        if fault == "slow":
            (Path.home() / "begun").touch()
            time.sleep(1000)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        obs, reward, fault = self.observation_space.sample(), 1.0, self.fault if self.steps == self.at else ""
        if fault == "observation":
            obs[0] = np.nan
        elif fault == "raises":
            raise KeyError("the user's own fault")
        elif fault == "exits":
            sys.exit(3)
        elif fault:
            reward = 1e30 if fault == "large" else np.nan
        return obs, reward, False, self.steps % 10 == 0, {}


vector, box = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Box(-1, 1, (2,), np.float32)
for name, settings in {
    "Discrete": {"obs": gym.spaces.Discrete(2)},
    "Dict": {"obs": gym.spaces.Dict(x=vector)},
    "Matrix": {"obs": gym.spaces.Box(-1, 1, (3, 3), np.float32)},
    "Middle": {"obs": gym.spaces.Box(0, 255, (84, 4, 84), np.uint8)},
    "Square": {"obs": gym.spaces.Box(0, 255, (8, 8, 8), np.uint8)},
    "Tiny": {"obs": gym.spaces.Box(0, 255, (2, 9, 1), np.uint8)},
    "Image": {"obs": gym.spaces.Box(0, 255, (12, 12, 3), np.uint8)},
    "ImageBox": {"obs": gym.spaces.Box(0, 255, (12, 12, 3), np.uint8), "actions": box},
    "MultiDiscrete": {"actions": gym.spaces.MultiDiscrete([2, 2])},
    "IntBox": {"actions": gym.spaces.Box(0, 5, (2,), np.int64)},
    "OpenBox": {"actions": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)},
    "HugeBox": {"actions": gym.spaces.Box(-1e30, 1e30, (2,), np.float32)},
    "RewardNan": {"fault": "nan"},
    "ObsNan": {"fault": "observation"},
    "LastNan": {"fault": "observation", "at": 40},
    "EvalNan": {"fault": "evaluation", "at": 1},
    "Large": {"fault": "large"},
    "Raises": {"fault": "raises"},
    "Exits": {"fault": "exits"},
    "Empty": {"obs": gym.spaces.Box(-1, 1, (0,), np.float32)},
    "Slow": {"fault": "slow"},
    "Leaves": {"fault": "leaves"},
}.items():
    gym.register(f"{name}-v0", Wrong, kwargs=settings)

ITERATIONS = "--num-steps 16 --total-timesteps 1024 --eval-every 0 --run-dir run"
REPLAY = "--buffer-size 4000 --learning-starts 100 --batch-size 16 --total-timesteps 1000 --log-every 100"
REPLAY += " --eval-every 0 --run-dir run"
SHORT = {"ppo": ITERATIONS, "ppg": f"{ITERATIONS} --n-pi 4", "dqn": REPLAY, "sac": REPLAY}
LONG = " --total-timesteps 100000000"


def all_cases() -> list[Case]:
    cases = [Case(flags, script, flags, 2, says) for script, flags, says in REFUSED_FLAGS]
    for script, id, says in REFUSED_ENVIRONMENTS:
        cases.append(Case(f"--env-id {id}", script, f"--env-id {id}", 2, says))
    for script, id, says, traceback in FAULTY_ENVIRONMENTS:
        flags = f"{SHORT[script]} --env-id {id}"
        cases.append(Case(f"--env-id {id}", script, flags, 1, says, traceback=traceback))
    for what, script, says, edits in EDITS:
        own = what == "bad layers"
        cases.append(Case(f"edit: {what}", script, SHORT[script], int(says != ""), says, edits=edits, traceback=own))
    for case in MACHINE:
        full = case.first.startswith("ulimit -f 4")
        flags = f"{SHORT[case.script]}{LONG if case.during or full else ''} {case.flags}"
        cases.append(replace(case, flags=flags))
    return cases


@dataclass
class Result:
    code: int
    line: str  # what the user is told
    wrong: list[str]  # what is not as it must be


def tried(case: Case) -> Result:
    home = Path(tempfile.mkdtemp(prefix="lockstep-fault-"))
    folder = home / "work"
    folder.mkdir()
    script = ROOT / f"{case.script}_ddp.py"
    if case.edits is not None:
        script = edited_copy(script, case.edits, folder)
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    env |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(["bash", "-c", case.before], cwd=folder, check=True)
    there = names(folder)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if case.processes > 1 else []
    words = [sys.executable, *launch, str(script), *case.flags.replace(" :", " tests.faults:").split()]
    line = f"{case.first}\nexec {shlex.join(words)} {case.shell}"
    process = subprocess.Popen(
        ["bash", "-c", line],
        **{"cwd": folder, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
        **{"text": True, "errors": "replace", "start_new_session": True},
    )
    wrong, family, rows, deadline = [], set(), None, time.monotonic() + PATIENCE
    while True:
        try:
            out, err = process.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            with suppress(psutil.NoSuchProcess):
                family |= {psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)}
        if case.during and rows is None and ((home / "begun").exists() or len(table(folder)) > 3):
            rows = len(table(folder)) - 1
            ids = "FIRST=$(pgrep -P $PID | head -n 1); LAST=$(pgrep -P $PID | tail -n 1); "
            subprocess.run(["bash", "-c", f"PID={process.pid}; {ids}{case.during}"], cwd=folder, check=True)
        if time.monotonic() > deadline:
            wrong.append(f"still running after {PATIENCE:.0f} s")
            kill(family)
            deadline += 10
    _, alive = psutil.wait_procs(family, timeout=10)
    if alive:
        wrong.append(f"processes left: {len(alive)}")
        kill(alive)
    if case.during and rows is None:
        wrong.append("ended before anything was done to it")
    result = judged(case, process.returncode, out, err, wrong)
    wrong += left(case, folder, there, rows)
    shutil.rmtree(home)
    return result


def edited_copy(script: Path, edits: list[tuple[str, str]], folder: Path) -> Path:
    """A copy of the script with its replacements, and common/ beside it."""
    from runs import edited  # here, because a run that imports our environments has no path to it

    text = edited(script.name, script.read_text(), *edits)
    shutil.copytree(ROOT / "common", folder / "common", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / script.name).write_text(text)
    return folder / script.name


def kill(processes: set[psutil.Process] | list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def table(folder: Path) -> list[list[str]]:
    """Header and rows of the run's metrics.csv, wherever it is; nothing where there is none."""
    found = [path for path in folder.rglob("metrics.csv") if path.stat().st_size]
    return list(csv.reader(found[0].read_text().splitlines())) if found else []


def judged(case: Case, code: int, out: str, err: str, wrong: list[str]) -> Result:
    """Exit code, messages and tracebacks against what they must be."""
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", err + out).split())
    boxes = [" ".join(re.sub("[│─╮]", " ", box).split()) for box in re.findall("╭(.*?)╰", err + out, re.DOTALL)]
    messages = boxes + re.findall(r"^(?:error: |rank \d+: ).*", err + out, re.MULTILINE)
    if "another rank ended" not in case.says:  # which the other rank may add
        messages = [message for message in messages if "another rank ended" not in message]
    if code != case.code:
        wrong.append(f"code {code}, not {case.code}")
    if case.says not in text:
        wrong.append(f"does not say {case.says!r}")
    if len(messages) != (case.says != "" and not case.traceback):
        wrong.append(f"{len(messages)} messages")
    ours = r'(?:common/[\w/]+|_ddp)\.py", line \d+, in ' if case.processes > 1 else "Traceback"
    if not case.traceback and re.search(ours, err):
        wrong.append("a traceback")
    last = (err.strip().splitlines() or [""])[-1]
    return Result(code, messages[0] if messages else last if code else "", wrong)


def left(case: Case, folder: Path, there: set[str], rows: int | None) -> list[str]:
    """What is wrong with what is left: no file after bad input, else whole rows, at least as many as there were."""
    new, (header, *body) = names(folder) - there, table(folder) or [[]]
    new = {name for name in new if not name.startswith("wandb") and not name.endswith("/lock")}
    wrong = [f"{name} is left" for name in new if name.endswith(".part")]
    files = sorted(name for name in new if (folder / name).is_file())
    if files and case.code == 2:
        wrong.append(f"left: {' '.join(files)}")
    if FULL != case.says and any(len(row) != len(header) for row in body):
        wrong.append("a row is not whole")
    least = 0 if case.during.startswith("rm") else rows or 0
    if len(body) < max(least, case.ran or case.code == 0):
        wrong.append(f"{len(body)} rows are left")
    return wrong


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored by what is started, as a shell's & would
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases that hold this word")
    parser.add_argument("--output", type=Path, help="write the table there too")
    args = parser.parse_args()
    cases = [case for case in all_cases() if args.only in f"{case.script}: {case.what}"]
    lines = ["| | what | exit code | what the user is told |", "| --- | --- | --- | --- |"]
    faults = 0
    with ThreadPoolExecutor(2) as pool:
        for number, (case, result) in enumerate(zip(cases, pool.map(tried, cases), strict=True), 1):
            told = result.line if len(result.line) < 200 else f"{result.line[:200]} ..."
            told = told or ("trains" if result.code == 0 else "")
            lines.append(f"| {number} | {case.script}: {case.what} | {result.code} | {told} |".replace("\n", " "))
            print("\n".join(lines[-1 if number > 1 else 0 :]), flush=True)
            faults += bool(result.wrong)
            for reason in result.wrong:
                print(f"row {number}, {case.script}: {case.what}: {reason}", file=sys.stderr, flush=True)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")
    print(f"{len(cases)} cases, {faults} not as they must be", file=sys.stderr)
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
