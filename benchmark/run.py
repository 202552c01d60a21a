"""Runs what is missing of a suite, several runs at once, and records each curve as it finishes.

    python -m benchmark.run classic
    python -m benchmark.run classic --filter dqn_ddp CartPole --dry-run

A run is recorded as `benchmark/results/SUITE/NAME.csv` and, last, `NAME.json`: what has both is done and not repeated.
Ctrl-C, or the end of this program in any way, ends the runs; the unfinished ones start afresh next time.
"""

from __future__ import annotations

import csv
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import tyro

from benchmark.suites import SUITES
from common.distributed import World

ROOT = Path(__file__).parent.parent
RECORDED = ("global_step", "charts/episodic_return", "charts/episodes", "eval/episodic_return", "time/wall", "time/SPS")


@dataclass
class Args:
    suite: tyro.conf.Positional[Literal["classic", "minatar", "mujoco", "atari"]]
    """which suite"""
    filter: tuple[str, ...] = ()
    """only runs whose names contain all of these, such as ppo_ddp CartPole w1 s3"""
    dry_run: bool = False
    """print the commands of what is missing, and run nothing"""
    cores: int = field(default_factory=lambda: World(cuda=False).cores)
    """ranks at once, over all runs"""
    results: Path = Path("benchmark/results")
    """where curves are recorded"""
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

    @property
    def name(self) -> str:
        """Such as CartPole-v1__dqn_ddp-prioritized__w1__s3."""
        script = self.script.removesuffix(".py") + (f"-{self.variant}" if self.variant else "")
        return f"{self.env_id.replace('/', '-')}__{script}__w{self.world_size}__s{self.seed}"

    def command(self, run_dir: Path) -> list[str]:
        words = [self.script, "--env-id", self.env_id, "--seed", str(self.seed), *self.flags.split()]
        launch = ["python"]
        if self.world_size > 1:
            launch = ["python", "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.world_size}"]
        return [*launch, *words, "--run-dir", str(run_dir)]

    @property
    def shown(self) -> str:
        """The command as a user types it."""
        return shlex.join(self.command(Path("runs") / self.name))


def runs_of(suite: str, wanted: tuple[str, ...] = ()) -> list[Run]:
    """All runs of a suite whose names contain each of `wanted`."""
    runs = [
        Run(suite, work["script"], work["env_id"], work["flags"], world_size, seed, work["variant"])
        for work in SUITES[suite]
        for world_size, seeds in work["seeds"].items()
        for seed in seeds
    ]
    return [run for run in runs if all(part in run.name for part in wanted)]


def recorded(run: Run, results: Path) -> dict | None:
    """The record of a run, if there is one and it is of just this command."""
    path = results / run.suite / f"{run.name}.json"
    about = json.loads(path.read_text()) if path.exists() else {}
    return about if about.get("command") == run.shown else None


def changed() -> bool:
    """True where some source differs from the commit."""
    git = ["git", "status", "--porcelain", "*.py"]
    return bool(subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout)


def record(run: Run, run_dir: Path, results: Path, seconds: float, dirty: bool) -> None:
    """Copy the curve and write the record beside it, last and in one step: it is what marks the run as done."""
    target = results / run.suite
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((run_dir / "config.json").read_text())
    with open(run_dir / "metrics.csv", newline="") as source:
        rows = [{name: row[name] for name in RECORDED} for row in csv.DictReader(source)]
    with open(target / f"{run.name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, RECORDED, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    about = {
        "command": run.shown,
        "commit": f"{config['commit']}{' and changes' if dirty else ''}",
        "versions": config["versions"],
        "device": config["device"],
        "world_size": run.world_size,
        "seed": run.seed,
        "seconds": round(seconds, 1),
    }
    part = target / f"{run.name}.json.part"
    part.write_text(json.dumps(about, indent=2) + "\n")
    os.replace(part, target / f"{run.name}.json")


def progress(run_dir: Path) -> float:
    """Part of the budget that a run has done."""
    try:
        total = json.loads((run_dir / "config.json").read_text())["args"]["total_timesteps"]
        return int((run_dir / "metrics.csv").read_text().splitlines()[-1].split(",")[0]) / total
    except (OSError, ValueError, IndexError):
        return 0.0


def seconds_left(
    waiting: list[Run], active: dict[Run, tuple], durations: dict[tuple, float], work: Path
) -> float | None:
    """Estimate for all, as if the cores stayed full; None until something is known."""
    rates = dict(durations)
    for run, (_, start, *_) in active.items():
        done = progress(work / run.name)
        if done > 0.02:
            rates.setdefault((run.script, run.env_id, run.world_size), (time.monotonic() - start) / done)
    if not rates:
        return None
    mean = sum(rates.values()) / len(rates)
    expected = {run: rates.get((run.script, run.env_id, run.world_size), mean) for run in [*waiting, *active]}
    parts = {run: 1 - progress(work / run.name) if run in active else 1.0 for run in expected}
    return sum(seconds * run.world_size * parts[run] for run, seconds in expected.items())


def end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def clock(seconds: float | None) -> str:
    return "?" if seconds is None else f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


def main(args: Args) -> int:
    args = replace(args, results=args.results.resolve(), work=args.work.resolve())
    runs = runs_of(args.suite, args.filter)
    missing = [run for run in runs if not recorded(run, args.results)]
    if not runs:
        print(f"--filter {' '.join(args.filter)}: no run's name contains that, such as {runs_of(args.suite)[0].name}")
        return 2
    wide = [run for run in missing if run.world_size > args.cores]
    if wide and not args.dry_run:
        print(f"--cores {args.cores}: {wide[0].name} needs {wide[0].world_size}; name more, or filter w1.")
        return 2
    if args.dry_run:
        for run in missing:
            print(run.shown)
        return 0
    done, durations, failed = len(runs) - len(missing), {}, []
    for run in runs:
        if run not in missing:
            seconds = recorded(run, args.results)["seconds"]
            durations.setdefault((run.script, run.env_id, run.world_size), seconds)
    waiting, active, told = list(missing), {}, 0.0
    print(f"{len(runs)} runs, {done} of them recorded; {args.cores} ranks at once", flush=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        while waiting or active:
            free = args.cores - sum(run.world_size for run in active)
            while waiting and waiting[0].world_size <= free:
                run = waiting.pop(0)
                free -= run.world_size
                run_dir = args.work / run.name
                args.work.mkdir(parents=True, exist_ok=True)
                for name in ("metrics.csv", "config.json"):  # of an unfinished one
                    (run_dir / name).unlink(missing_ok=True)
                log = open(args.work / f"{run.name}.log", "w")
                words = [sys.executable, *run.command(run_dir)[1:]]
                process = subprocess.Popen(
                    words, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent
                )
                active[run] = (process, time.monotonic(), log, changed())
            time.sleep(0.2)
            for run, (process, start, log, dirty) in list(active.items()):
                if process.poll() is None:
                    continue
                seconds = time.monotonic() - start
                log.close()
                del active[run]
                if process.returncode == 0:
                    record(run, args.work / run.name, args.results, seconds, dirty)
                    durations[(run.script, run.env_id, run.world_size)] = seconds
                    done += 1
                else:
                    failed.append(run)
                state = "done" if process.returncode == 0 else f"FAILED with code {process.returncode}"
                print(f"{run.name} {state} in {clock(seconds)}", flush=True)
                told = 0.0
            if active and time.monotonic() - told > 60:
                told, left = time.monotonic(), seconds_left(waiting, active, durations, args.work)
                going = ", ".join(f"{run.name} {progress(args.work / run.name):.0%}" for run in active)
                total = clock(None if left is None else left / args.cores)
                print(f"{done} of {len(runs)} recorded, {total} left; running {going}", flush=True)
    except KeyboardInterrupt:
        print(f"ending {len(active)} runs; {done} of {len(runs)} are recorded", flush=True)
        return 130
    finally:
        for process, *_ in active.values():
            process.terminate()
        for process, *_ in active.values():
            process.wait()
    for run in failed:
        log = args.work / f"{run.name}.log"
        print(f"\n{run.name} failed; the end of {log}:", *log.read_text().splitlines()[-10:], sep="\n    ")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(tyro.cli(Args)))
