"""Bad inputs, users' edits and faults of the machine, each tried in a process of its own, and what the user is told.

    python tests/faults.py [--only WORD]

Prints a Markdown table. Ends with code 1, and the reasons on stderr, where a row is not as it must be: the exit code,
the text, exactly one message, no traceback of ours, no process left, nothing left of a run that did not start, and
whole rows of one that did, unless a disk was full.
"""

from __future__ import annotations

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
import tyro

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 240.0  # seconds for one case
REFUSED_FLAGS = [  # script, flags, what is said
    ("ppo", "--no-such-flag 1", "--no-such-flag"),
    ("ppo", "--env-id", "--env-id"),
    ("ppo", "--resume --run-dir= --checkpoint-every 512", "--run-dir : must be a directory with --resume"),
    ("dqn", "--resume --run-dir somewhere", "--checkpoint-every 0: must be at least 1 with --resume"),
    ("ppo", "--norm-obs True", "--norm-obs True: takes no value"),
    ("ppo", "--norm-obs=False", "--norm-obs False: takes no value"),
    ("ppo", "--total-timesteps 1e6", "--total-timesteps"),
    ("ppo", "--vectorization thread", "--vectorization"),
    ("ppo", "--learning-rate nan", "--learning-rate nan: must be a number above 0"),
    ("ppo", "--num-steps 10", "--num-steps 10: must be a multiple of --num-minibatches (4), such as 8"),
    ("ppo", "--target-kl 0.01 --update-epochs 1", "--update-epochs 1: must be at least 2 with --target-kl"),
    ("ppg", "--target-kl 0.01", "--update-epochs 1: must be at least 2 with --target-kl"),
    ("ppo", "--env-kwargs nonsense", "--env-kwargs nonsense: must be a JSON object, such as '{"),
    (
        "ppo",
        '--env-kwargs {"gravity":1}',
        '--env-kwargs {"gravity":1}: CartPoleEnv.__init__() got an unexpected keyword',
    ),
    ("ppo", "--load-model nothing.pt", "--load-model nothing.pt: cannot be read (FileNotFoundError)"),
    ("dqn", "--capture-video --eval-every 0", "--eval-every 0: must be at least 1 with"),
    ("sac", "--total-timesteps 0", "--total-timesteps 0: must be at least"),
    ("ppo", "--total-timesteps 0 --load-model a --eval-every 0", "--total-timesteps 0: must be at least"),
    ("ppo", "--timeout 1", "--timeout 1.0: must be a number from 2 to 1e6"),  # a run feeds its watchdog once a second
    (
        "ppo",
        "--total-timesteps 100",
        "--total-timesteps 100: must be at least 512",
    ),
    ("ppo", "--num-envs 1 --num-steps 16 --num-minibatches 16", "--norm-adv minibatch: must be none"),
    ("ppo", "--shards 3", "--shards 3: must be a power of two"),
    ("ppo", "--shards 8", "--num-envs 4: must be a multiple of --shards (8), such as 8"),
    ("ppo", "--stop-at-return 100 --eval-every 0", "--eval-every 0: must be at least 1 with"),
    ("ppg", "--num-aux-minibatches 3", "--num-aux-minibatches 3: must be a divisor of"),
    ("ppg", "--total-timesteps 5000", "--total-timesteps 5000: must be at least 8192"),
    ("dqn", "--buffer-size 1001", "--buffer-size 1001: must be a multiple of --num-envs (4), such as 1000"),
    ("dqn", "--batch-size 20000", "--batch-size 20000: must be at most --buffer-size (10000)"),
    ("dqn", "--total-timesteps 5000", "--total-timesteps 5000: must be at least 100"),
    ("dqn", "--buffer-size 1000000000000", "--buffer-size 1000000000000: must be at most"),
    ("dqn", "--n-step 5000", "--buffer-size 10000: must be at least 20000"),
]
OBSERVATIONS = "its observations must be a vector (1-D Box) or an image (a 3-D Box with fewer channels, first or last"
BOUNDS = "must be an environment whose actions have distinct bounds"
NO_IMAGE = "--network impala: must be left off for vector observations"
WHOLE = "--scale-pixels False: must be left on, except for images of whole numbers"
REFUSED_ENVIRONMENTS = [  # script, id, what is said; what begins with ":" is made below
    ("ppo", "NoSuchEnv-v0", "Environment `NoSuchEnv` doesn't exist."),
    ("ppo", "LunarLander-v2", "use `LunarLander-v3`"),
    ("ppo", "nomodule:Env-v0", "No module named 'nomodule'"),
    ("ppo", "ALE/NoSuchGame-v5", "NoSuchGame"),
    ("ppo", "MinAtar/NoSuch-v1", "NoSuch"),
    ("ppo", ":Discrete-v0", OBSERVATIONS),
    ("ppo", ":Dict-v0", OBSERVATIONS),
    ("ppo", ":Matrix-v0", OBSERVATIONS),
    ("ppo", ":Middle-v0", OBSERVATIONS),
    ("dqn", ":Square-v0", OBSERVATIONS),
    ("ppo", ":Image-v0 --norm-obs", "--norm-obs True: must be left off for image observations"),
    ("ppo", "CartPole-v1 --network impala", NO_IMAGE),
    ("ppg", "CartPole-v1 --network impala", NO_IMAGE),
    ("dqn", "CartPole-v1 --network impala", NO_IMAGE),
    ("dqn", "CartPole-v1 --no-scale-pixels", WHOLE),
    ("dqn", "MinAtar/Breakout-v1 --no-scale-pixels", WHOLE),
    ("ppo", ":MultiDiscrete-v0", "not MultiDiscrete([2 2])"),
    ("ppo", ":IntBox-v0", "must be Discrete or Box of floats, not Box(0, 5"),
    ("dqn", "Pendulum-v1", "its actions must be Discrete"),
    ("sac", "CartPole-v1", "its actions must be Box"),
    ("sac", ":ImageBox-v0", "must be an environment with vector observations, not images"),
    ("sac", ":OpenBox-v0", BOUNDS),
    ("sac", ":HugeBox-v0", BOUNDS),
]
FAULTY_ENVIRONMENTS = [  # script, id, the error that Python shows
    ("ppo", ":RewardNan-v0", "FloatingPointError: environment 0, its step 37: its reward is not finite"),
    ("ppo", ":ObsNan-v0", "FloatingPointError: environment 0, its step 37: its observation is not finite"),
    ("dqn", ":LastNan-v0", "FloatingPointError: environment 0, its step 40: its observation is not finite"),
    ("ppo", ":EvalNan-v0 --eval-every 64", "FloatingPointError: evaluation episode 0, its step 1: its reward is not"),
    ("ppo", ":Large-v0 --no-norm-reward", "not finite"),
    ("ppo", ":Raises-v0", 'KeyError: "the user\'s own fault"'),
    ("ppo", ":Raises-v0 --vectorization async", 'KeyError: "the user\'s own fault"'),
    ("ppo", ":Exits-v0", "RuntimeError: sys.exit(3) was called"),
    ("ppo", ":Leaves-v0", "no server"),
]
FIRST = "first = layer_init(nn.Linear(space.shape[0], 64))"
EDITS = [  # what, script, what is said ("": it trains), the replacement
    ("none", "ppg", "", []),
    ("dropout", "ppo", "", [("nn.Sequential(first, nn.Tanh()", "nn.Sequential(first, nn.Dropout(0.1)")]),
    ("bad layers", "ppo", "shapes cannot be multiplied", [(FIRST, FIRST.replace("64", "32"))]),
    ("a new column", "ppo", "metrics.csv has no column mine", [('row = {"charts/learning_rate"', 'row = {"mine"')]),
    ("a loss that is nan", "ppo", "losses/entropy is not finite", [("= entropy.mean()", "= (-entropy).log().mean()")]),
]


LONG = "--total-timesteps 100000000"


@dataclass
class Case:
    """A command, what must come of it, and what is done to it; all that is done is said in the shell's words."""

    what: str
    script: str
    flags: str
    code: int  # of the script: torchrun makes 1 of each
    says: str = ""  # with code 2 in the one message
    before: str = ""  # done in the folder before
    first: str = ""  # done by the shell that becomes the process
    during: str = ""  # done once it has written 3 rows, or has made a file `begun` in its HOME
    edits: list[tuple[str, str]] | None = None  # of a copy of the script, beside a copy of common/
    processes: int = 1
    ran: bool = False  # it got so far that it must leave rows


ONLINE = "export WANDB_MODE=online WANDB_API_KEY= NETRC=$HOME/netrc"
OFFLINE = f"{ONLINE}; export WANDB_API_KEY={'0123456789' * 4} WANDB_BASE_URL=http://127.0.0.1:9"
NO_GIT = "export GIT_DIR=/nowhere"  # no difference from a commit to write
FULL, ASYNC, TRACK, PONG = "File too large", "--vectorization async", "--track", "--env-id ALE/Pong-v5"
HUNG, EVALUATE = "Timeout (0:00:10)!", "--eval-every 64"
STEP = "optimizer.step()"
MOVED = f"{STEP}; optimizer.param_groups[0]['params'][0].data += 1e-6 * torch.distributed.get_rank()"
MACHINE = [
    Case("--run-dir that holds a run", "ppo", "--run-dir a", 2, "holds a run already", "mkdir a; touch a/metrics.csv"),
    Case("--run-dir that is a file", "ppo", "--run-dir a", 2, "a: cannot be written (File exists)", "touch a"),
    Case("--run-dir below a file", "ppo", "--run-dir a/b", 2, "--run-dir a/b: cannot be written", "touch a"),
    Case("--run-dir /proc/nowhere", "ppo", "--run-dir /proc/nowhere", 2, "--run-dir /proc/nowhere: cannot be written"),
    Case("--track, no login", "ppo", TRACK, 2, "--track: ", first=ONLINE),
    Case("--track, no network", "ppo", TRACK, 2, "--track: ", first=OFFLINE),
    Case("a ROM that is missing", "ppo", PONG, 2, "pong.bin", first="export ALE_ROMS_DIR=$PWD"),
    Case("no common/", "ppo", "", 1, "No module named 'common'", first="rm -r common; export PYTHONPATH=", edits=[]),
    Case("two ranks: --no-such-flag", "ppo", "--no-such-flag", 2, "--no-such-flag", processes=2),
    Case("two ranks: --num-envs 5", "ppo", "--num-envs 5", 2, "such as 4", processes=2),
    Case("two ranks: --track, no login", "ppo", TRACK, 2, "--track: ", first=ONLINE, processes=2),
    Case("two ranks: a reward is nan", "ppo", "--env-id :RewardNan-v0", 1, "its step 37: its reward is", processes=2),
    Case("two ranks: moved", "ppo", EVALUATE, 1, "differs from rank 0's", edits=[(STEP, MOVED)], processes=2, ran=True),
    Case("two ranks: one killed", "ppo", "", 1, "exitcode : -9", during="kill -9 $LAST", processes=2),
    Case("two ranks: one stands still", "sac", "--timeout 10", 1, HUNG, during="kill -STOP $LAST", processes=2),
    Case("two ranks: torchrun killed", "dqn", "", -9, during="kill -9 $PID", processes=2),
    Case("two ranks: SIGTERM", "ppg", "", 1, during="kill $PID", processes=2),
    Case("disk full", "ppo", LONG, 1, FULL, first=f"{NO_GIT}; ulimit -f 4", ran=True),
    Case("disk full at the start", "ppo", "", 1, FULL, first=f"{NO_GIT}; ulimit -f 1"),
    Case("the run's folder deleted", "ppo", "", 1, "No such file or directory", during="rm -r run"),
    Case("no git", "ppo", "", 0, first="export PATH=/nowhere"),
    Case("too many open files", "ppo", f"{ASYNC} --num-envs 64", 2, "Too many open files", first="ulimit -n 64"),
    Case("an environment's process killed", "ppo", ASYNC, 1, "async_vector_env.py", during="kill -9 $FIRST"),
    Case("an environment stands still", "dqn", f"{ASYNC} --timeout 10", 1, HUNG, during="kill -STOP $FIRST"),
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
        self.fault, self.at, self.steps = fault, at if fault != "EvalNan" or Wrong.made > 4 else 0, 0
        if fault == "Leaves":
            sys.exit("no server")
        if fault == "Slow":
            (Path.home() / "begun").touch()
            time.sleep(1000)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        obs, reward, fault = self.observation_space.sample(), 1.0, self.fault if self.steps == self.at else ""
        if fault == "ObsNan":
            obs[0] = np.nan
        elif fault == "Raises":
            raise KeyError("the user's own fault")
        elif fault == "Exits":
            sys.exit(3)
        elif fault:
            reward = 1e30 if fault == "Large" else np.nan
        return obs, reward, False, self.steps % 10 == 0, {}


vector, box = gym.spaces.Box(-1, 1, (3,), np.float32), gym.spaces.Box(-1, 1, (2,), np.float32)
for name, settings in {
    "Discrete": {"obs": gym.spaces.Discrete(2)},
    "Dict": {"obs": gym.spaces.Dict(x=vector)},
    "Matrix": {"obs": gym.spaces.Box(-1, 1, (3, 3), np.float32)},
    "Middle": {"obs": gym.spaces.Box(0, 255, (84, 4, 84), np.uint8)},
    "Square": {"obs": gym.spaces.Box(0, 255, (8, 8, 8), np.uint8)},
    "Image": {"obs": gym.spaces.Box(0, 255, (12, 12, 3), np.uint8)},
    "ImageBox": {"obs": gym.spaces.Box(0, 255, (12, 12, 3), np.uint8), "actions": box},
    "MultiDiscrete": {"actions": gym.spaces.MultiDiscrete([2, 2])},
    "IntBox": {"actions": gym.spaces.Box(0, 5, (2,), np.int64)},
    "OpenBox": {"actions": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)},
    "HugeBox": {"actions": gym.spaces.Box(-1e30, 1e30, (2,), np.float32)},
    "LastNan": {"fault": "ObsNan", "at": 40},
    "EvalNan": {"fault": "EvalNan", "at": 1},
    **{name: {"fault": name} for name in ("RewardNan", "ObsNan", "Large", "Raises", "Exits", "Slow", "Leaves")},
}.items():
    gym.register(f"{name}-v0", Wrong, kwargs=settings)

ITERATIONS = "--num-steps 16 --total-timesteps 1024 --eval-every 0 --run-dir run"
REPLAY = "--buffer-size 4000 --learning-starts 100 --batch-size 16 --total-timesteps 1000 --log-every 100"
REPLAY += " --eval-every 0 --run-dir run"
SHORT = {"ppo": ITERATIONS, "ppg": f"{ITERATIONS} --n-pi 4", "dqn": REPLAY, "sac": REPLAY}


def all_cases() -> list[Case]:
    cases = [Case(flags, script, flags, 2, says) for script, flags, says in REFUSED_FLAGS]
    cases += [Case(f"--env-id {x}", script, f"--env-id {x}", 2, says) for script, x, says in REFUSED_ENVIRONMENTS]
    for script, id, says in FAULTY_ENVIRONMENTS:
        cases.append(Case(f"--env-id {id}", script, f"{SHORT[script]} --env-id {id}", 1, says))
    for what, script, says, edits in EDITS:
        cases.append(Case(f"edit: {what}", script, SHORT[script], int(says != ""), says, edits=edits))
    for case in MACHINE:
        cases.append(replace(case, flags=f"{SHORT[case.script]} {LONG if case.during else ''} {case.flags}"))
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
    process = subprocess.Popen(
        ["bash", "-c", f"{case.first}\nexec {shlex.join(words)}"],
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
    messages = boxes + re.findall(r"^error: .*", err + out, re.MULTILINE)
    if code != (min(case.code, 1) if case.processes > 1 else case.code):
        wrong.append(f"code {code}, not {case.code}")
    if case.says not in text:
        wrong.append(f"does not say {case.says!r}")
    if len(messages) != (case.code == 2):
        wrong.append(f"{len(messages)} messages")
    ours = r'(?:common/\w+|_ddp)\.py", line \d+, in ' if case.processes > 1 else "Traceback"
    if case.code != 1 and re.search(ours, err):
        wrong.append("a traceback")
    last = [line for line in err.splitlines() if case.says and case.says in line] or err.strip().splitlines()[-1:]
    return Result(code, (messages or last or [""])[0] if code else "", wrong)


def left(case: Case, folder: Path, there: set[str], rows: int | None) -> list[str]:
    """What is wrong with what is left: no file after bad input, else whole rows, at least as many as there were."""
    new, (header, *body) = names(folder) - there, table(folder) or [[]]
    new = {name for name in new if not name.startswith("wandb") and not name.endswith("/lock")}
    wrong = [f"{name} is left" for name in new if name.endswith(".part") and case.says != FULL]
    files = sorted(name for name in new if (folder / name).is_file())
    if files and case.code == 2:
        wrong.append(f"left: {' '.join(files)}")
    if case.says != FULL and any(len(row) != len(header) for row in body):
        wrong.append("a row is not whole")
    least = 0 if case.during.startswith("rm") else rows or 0
    if len(body) < max(least, case.ran or case.code == 0):
        wrong.append(f"{len(body)} rows are left")
    return wrong


def main(only: str = "") -> None:
    """Try the cases whose description holds the word."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored by what is started, as a shell's & would
    cases = [case for case in all_cases() if only in f"{case.script}: {case.what}"]
    faults = 0
    print("| | what | exit code | what the user is told |\n| --- | --- | --- | --- |")
    with ThreadPoolExecutor(2) as pool:
        for number, (case, result) in enumerate(zip(cases, pool.map(tried, cases), strict=True), 1):
            told = result.line[:200] or ("trains" if result.code == 0 else "")
            print(f"| {number} | {case.script}: {case.what} | {result.code} | {told} |", flush=True)
            faults += bool(result.wrong)
            for reason in result.wrong:
                print(f"row {number}, {case.script}: {case.what}: {reason}", file=sys.stderr, flush=True)
    print(f"{len(cases)} cases, {faults} not as they must be", file=sys.stderr)
    sys.exit(faults > 0)


if __name__ == "__main__":
    tyro.cli(main)
