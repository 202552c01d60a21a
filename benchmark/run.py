"""Runs what is missing of a suite, several runs at once, and records each curve as it finishes.

    python -m benchmark.run classic
    python -m benchmark.run classic --filter dqn_ddp CartPole --dry-run
    python -m benchmark.run classic --filter ppo_ddp__w1__s3 CartPole --results runs/again
    python -m benchmark.run my_suite.py

A run is recorded as `benchmark/results/SUITE/NAME.csv` and, last, `NAME.json`: what has both is done and not repeated.
A suite of your own is recorded in `runs/results`. What another command recorded is replaced with --replace only.
Ctrl-C, or the end of this program in any way, ends the runs; next time the unfinished ones start afresh, or, where a
suite's flags have `--checkpoint-every`, go on from their last checkpoints, and are recorded as one curve.
"""

from __future__ import annotations

import csv
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import tyro

from benchmark.suites import Suite, suite_of
from common.logger import git
from common.processes import BadInput, World, end_with_parent

ROOT = Path(__file__).parent.parent
KEPT = ("commit", "changed", "world_size", "threads", "blas", "device", "instructions", "versions")
RECORDED = ("global_step", "charts/episodic_return", "charts/episodes", "eval/episodic_return", "time/wall", "time/SPS")


@dataclass
class Args:
    suite: tyro.conf.Positional[str]
    """which suite: a name, or a file of your own, such as my_suite.py"""
    filter: tuple[str, ...] = ()
    """only runs whose names contain all of these, such as ppo_ddp CartPole w1 s3"""
    dry_run: bool = False
    """print the runs' commands, and run nothing"""
    cores: int = field(default_factory=lambda: World(cuda=False).cores)
    """ranks at once, over all runs, on the first cores that it may use; start another one under `taskset`"""
    results: Path | None = None
    """where curves are recorded (default: benchmark/results; of a suite of your own, runs/results)"""
    replace: bool = False
    """replace curves that other commands recorded, as of a suite that was changed since"""
    work: Path = Path("runs/benchmark")
    """where the runs' own directories and logs go"""


@dataclass(frozen=True)
class Run:
    suite: str
    script: str
    env_id: str
    flags: str
    world_size: int
    seed: int
    variant: str
    training: bool = False

    @property
    def name(self) -> str:
        """Such as CartPole-v1__dqn_ddp-prioritized__w1__s3."""
        return f"{self.work}__s{self.seed}"

    @property
    def label(self) -> str:
        """The script and its variant."""
        return self.script.removesuffix(".py") + (f"-{self.variant}" if self.variant else "")

    @property
    def work(self) -> str:
        """What the seeds of one curve share."""
        return f"{self.env_id}__{self.label}__w{self.world_size}".replace("/", "-").replace(":", "-")

    def command(self, run_dir: Path) -> list[str]:
        words = [self.script, "--env-id", self.env_id, "--seed", str(self.seed), *shlex.split(self.flags)]
        launch = ["python"]
        if self.world_size > 1:
            launch = ["python", "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.world_size}"]
        return [*launch, *words, *["--resume"][: self.goes_on], "--run-dir", str(run_dir)]

    @property
    def goes_on(self) -> bool:
        """Whether the run writes checkpoints, from which it goes on if it was interrupted."""
        return re.search(r"--checkpoint[-_]every[ =]+0*[1-9]", self.flags) is not None

    def shown(self, run_dir: Path) -> str:
        """The command as a user types it."""
        return shlex.join(self.command(run_dir))

    def folder(self, work: Path) -> Path:
        """Its run directory; the log is beside it."""
        return work / self.suite / self.name


def runs_of(suite: Suite, wanted: tuple[str, ...] = ()) -> list[Run]:
    """All runs of a suite whose names contain each of `wanted`."""
    runs = [
        Run(suite.name, x["script"], x["env_id"], x["flags"], world_size, seed, x["variant"], x["training"])
        for x in suite.works
        for world_size, seeds in x["seeds"].items()
        for seed in dict.fromkeys(seeds)
    ]
    return [run for run in runs if all(part in run.name for part in wanted)]


def recorded(run: Run, results: Path) -> dict | None:
    """The record of a run, if there is one and it is of just this command, in whatever directory it ran."""
    path = results / run.suite / f"{run.name}.json"
    done = path.exists() and path.with_suffix(".csv").exists()
    about = json.loads(path.read_text()) if done else {"command": ""}
    return about if shlex.split(about["command"])[:-1] == run.command(Path())[:-1] else None


def record(run: Run, run_dir: Path, results: Path, seconds: float) -> None:
    """Copy the curve and write the record beside it, last and in one step: it is what marks the run as done."""
    target = results / run.suite
    config = json.loads((run_dir / "config.json").read_text())
    with open(run_dir / "metrics.csv", newline="") as source:
        rows = [{name: row[name] for name in RECORDED} for row in csv.DictReader(source)]
    with open(target / f"{run.name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, RECORDED, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    wall = max((float(row["time/wall"]) for row in rows), default=0.0)  # over all parts of a run that went on
    difference = target / f"{run.name}.diff"
    difference.unlink(missing_ok=True)
    if (run_dir / "changes.diff").exists():  # git shows none for a script that it does not track
        shutil.copy(run_dir / "changes.diff", difference)
    command = run.shown(run.folder(Args.work))  # a record names no path of this machine
    about = {"command": command, "seed": run.seed, "seconds": round(max(seconds, wall), 1)}
    about |= {name: config[name] for name in KEPT}
    part = target / f"{run.name}.json.part"
    part.write_text(json.dumps(about, indent=2) + "\n")
    os.replace(part, target / f"{run.name}.json")
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)  # a recorded run is not gone on with


def started_by(words: list[str], run_dir: Path, script: Path) -> bool:
    """Whether what is in a run's directory is not yet recorded, and of this very command and code, at any commit.

    False where git cannot tell the code, as of a script that it does not track.
    """
    try:
        config = json.loads((run_dir / "config.json").read_text())
    except (OSError, ValueError):
        return False
    changes = run_dir / "changes.diff"
    difference = changes.read_text() if changes.exists() else ""
    commit = config["commit"]
    if not commit or git(script, "cat-file", "-t", commit).strip() != "commit":
        return False
    since = git(script, "diff", commit, "--", script.name, "common")
    if since.strip() != difference.strip() or config["changed"] != bool(difference):
        return False
    before = shlex.split(config["command"])
    same = before[1:-1] == words[-len(before) :][1:-1]  # but the directory, which may have been moved
    return same and (run_dir / "checkpoints").exists()


def end_with_this_on(cores: list[int]) -> None:
    """In a run's process: end when this program does; take only these cores, so that runs do not share any."""
    end_with_parent()
    if cores:
        os.sched_setaffinity(0, cores)


def progress(run_dir: Path) -> float:
    """Part of the budget that a run has done."""
    try:
        total = json.loads((run_dir / "config.json").read_text())["args"]["total_timesteps"]
        return int((run_dir / "metrics.csv").read_text().splitlines()[-1].split(",")[0]) / max(total, 1)
    except (OSError, ValueError, IndexError):
        return 0.0


def seconds_left(waiting: list[Run], active: dict[Run, tuple], durations: dict[str, float], args: Args) -> float | None:
    """Estimate for all, as if the cores stayed full; None until something is known."""
    rates, parts = dict(durations), {run: 1.0 for run in waiting}
    for run, (_, start, _, before, _) in active.items():
        done = progress(run.folder(args.work))
        parts[run] = 1.0 - done
        if done - before > 0.02:
            rates.setdefault(run.work, (time.monotonic() - start) / (done - before))
    if not rates:
        return None
    mean = sum(rates.values()) / len(rates)
    left = {run: part * rates.get(run.work, mean) for run, part in parts.items()}
    return max(max(left.values()), sum(seconds * run.world_size for run, seconds in left.items()) / args.cores)


def clock(seconds: float | None) -> str:
    return "?" if seconds is None else f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def main(args: Args) -> int:
    suite = suite_of(args.suite)
    args = replace(args, results=args.results or suite.home / "results")
    runs = runs_of(suite, args.filter)
    missing = [run for run in runs if not recorded(run, args.results)]
    other = [run for run in missing if (args.results / suite.name / f"{run.name}.json").exists()]
    if not runs:
        example = runs_of(suite)[0].name
        raise BadInput(f"--filter {' '.join(args.filter)}: no run's name contains that, such as {example}.")
    scripts = {run.script: next((x for x in (suite.folder, ROOT) if (x / run.script).is_file()), None) for run in runs}
    for script, folder in scripts.items():
        if folder is None:
            raise BadInput(f"SUITE {args.suite}: {script} is not in {suite.folder}, nor in {ROOT}.")
    wide = [run for run in missing if run.world_size > args.cores]
    if wide and not args.dry_run:
        raise BadInput(f"--cores {args.cores}: {wide[0].name} needs {wide[0].world_size}; name more, or filter w1.")
    if args.dry_run:
        for run in runs:
            mark = "  # recorded by another command" if run in other else "" if run in missing else "  # recorded"
            print(run.shown(run.folder(args.work)) + mark)
        return 0
    if other and not args.replace:
        fault = f"{other[0].name} is recorded there by another command"
        raise BadInput(f"--results {args.results}: {fault}; name another folder, or lose that curve by --replace.")
    for name, folder in (("work", args.work), ("results", args.results)):
        try:
            (folder / suite.name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"--{name} {folder}: cannot be written ({error.strerror}).") from error
    lock = open(args.work / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        fault = "another benchmark.run is using it; wait, or name another folder"
        raise BadInput(f"--work {args.work}: {fault}.") from error
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    durations, failed = {}, []
    for run in runs:
        if run not in missing:
            durations.setdefault(run.work, recorded(run, args.results)["seconds"])
    done, waiting, active, told, ending = len(runs) - len(missing), list(missing), {}, 0.0, False
    print(f"{len(runs)} runs, {done} of them recorded; {args.cores} ranks at once", flush=True)
    paths = [str(path) for path in (suite.folder, Path.cwd(), ROOT)]  # a user's environments, then ours
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = cores if len(cores) >= args.cores else []  # more ranks than cores share them
    while active or (waiting and not stopped):
        free = 0 if stopped else args.cores - sum(run.world_size for run in active)
        while run := next((run for run in waiting if run.world_size <= free), None):
            waiting.remove(run)
            free -= run.world_size
            run_dir, script = run.folder(args.work), scripts[run.script] / run.script
            words = run.command(run_dir)
            words[words.index(run.script)] = str(script)
            if not (run.goes_on and started_by(words, run_dir, script)):
                shutil.rmtree(run_dir, ignore_errors=True)  # of an unfinished one, or of other flags
            log = open(f"{run_dir}.log", "w")
            own, cores = cores[: run.world_size], cores[run.world_size :]
            process = subprocess.Popen(
                [sys.executable, *words[1:]],
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(end_with_this_on, own),
            )
            active[run] = (process, time.monotonic(), log, progress(run_dir), own)  # of an earlier start, if it goes on
        time.sleep(0.2)
        if stopped and not ending:
            ending = True
            print(f"ending {len(active)} runs", flush=True)
            for process, *_ in active.values():
                process.terminate()
        for run, (process, start, log, _, own) in list(active.items()):
            if process.poll() is None:
                continue
            cores += own
            seconds, state = time.monotonic() - start, f"FAILED with code {process.returncode}"
            log.close()
            del active[run]
            if process.returncode == 0:
                record(run, run.folder(args.work), args.results, seconds)
                durations[run.work], state = recorded(run, args.results)["seconds"], "done"
                done += 1
            elif ending:
                state = "ended"
            else:
                failed.append(run)
            print(f"{run.name} {state} in {clock(seconds)}", flush=True)
            told = 0.0
        if active and time.monotonic() - told > 60:
            told = time.monotonic()
            left = clock(seconds_left(waiting, active, durations, args))
            going = ", ".join(f"{run.name} {progress(run.folder(args.work)):.0%}" for run in active)
            print(f"{done} of {len(runs)} recorded, {left} left; running {going}", flush=True)
    for run in failed:
        log = Path(f"{run.folder(args.work)}.log")
        lines = takewhile(lambda line: "failed (exitcode:" not in line, log.read_text().splitlines())  # torchrun's own
        print(f"\n{run.name} failed; the end of {log}:", *list(lines)[-10:], sep="\n    ")
    if stopped:
        print(f"{done} of {len(runs)} are recorded; the same command goes on")
    return 128 + stopped[0] if stopped else 1 if failed else 0


def or_say_why(main: Callable[[], int | None]) -> None:
    """End with what `main` returns, or, for bad input, with one line and code 2."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it as it ends other programs
    try:
        sys.exit(main())
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    or_say_why(lambda: main(tyro.cli(Args)))
