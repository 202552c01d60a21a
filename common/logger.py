"""The run directory and what is written there; rank 0 writes, on other ranks the same calls do nothing."""

import datetime
import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import filelock
import torch
from threadpoolctl import threadpool_info
from tqdm import tqdm

from common.arguments import MAY_CHANGE_ON_RESUME, RunArgs, flag
from common.environments import PROGRESS_PERIOD, Episode
from common.processes import BadInput, World, one_line

COLUMNS_OF_ALL = (
    *("global_step", "charts/episodic_return", "charts/episodic_length", "charts/episodes", "charts/learning_rate"),
    *("eval/episodic_return", "eval/episodic_length", "eval/episodes"),
    *("time/wall", "time/SPS", "time/rollout", "time/update", "time/eval"),
)
LOCK_TIMEOUT = 15.0  # seconds to wait for the end of a process that holds the run directory
SHOWN = {"SPS": "time/SPS", "return": "charts/episodic_return", "evaluation": "eval/episodic_return"}
PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "box2d", "envpool", "minatar", "mujoco")
DECIDES_BYTES = ("device", "instructions", "threads", "blas", "sources", "versions")  # of config.json


class Logger(ExitStack):
    """Writes config.json, changes.diff, metrics.csv; prints progress; sends rows to wandb and TensorBoard."""

    def __init__(self, args: RunArgs, script: Path, columns: tuple[str, ...], world: World) -> None:
        super().__init__()
        self.args = args
        self.script = script
        self.columns = (*COLUMNS_OF_ALL, *columns)
        self.world = world
        self.enabled = world.rank == 0
        self.dir: Path | None = None  # the run directory, on rank 0
        self.latest: dict[str, float] = {}  # the newest number of each column
        self.shown = 0.0  # when progress was shown
        self.evaluated = 0.0  # seconds of evaluations and films
        self.record = run_record(args, script, self.columns, world)
        self.wandb: Any = None
        self.tensorboard: Any = None
        if self.enabled:
            self._open()

    def _open(self) -> None:
        args = self.args
        env_id = args.env_id.replace("/", "-").replace(":", "-")
        now = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"  # sweeps start runs at once
        default = f"runs/{env_id}__{self.script.stem}__{args.seed}__{now}"
        try:
            self.dir = Path(args.run_dir or default).absolute()
            self.dir.mkdir(parents=True, exist_ok=bool(args.run_dir))
            self.enter_context(filelock.FileLock(self.dir / "lock", timeout=LOCK_TIMEOUT))
        except filelock.Timeout as error:
            raise BadInput(f"--run-dir {self.dir}: another process is writing there; name another.") from error
        except OSError as error:
            raise BadInput(f"--run-dir {args.run_dir or default}: cannot be written ({error.strerror}).") from error
        config = self.dir / "config.json"
        resumed = args.resume and config.exists()
        if resumed:
            before = json.loads(config.read_text())
            if before["script"] != self.record["script"] or before["columns"] != self.record["columns"]:
                raise BadInput(f"--run-dir: holds a run of {before['script']}.py, or with other COLUMNS; name another.")
            if args.shards is None and before["world_size"] != self.world.world_size:
                needed = f"set from the start to go on on another number of processes than {before['world_size']}"
                raise BadInput(f"--shards: must be {needed}.")
            self._compare(before, "to go on with --run-dir", "no longer the same bytes as without a stop", "before")
        elif any((self.dir / name).exists() for name in ("config.json", "metrics.csv", "checkpoints")):
            advice = "" if args.resume else ", or go on with it by --resume"
            raise BadInput(f"--run-dir {self.dir}: holds a run already; name a new directory{advice}.")
        if args.track:
            self._open_wandb(resumed)
        self.note(f"writing to {self.dir}")

    def _compare(self, other: dict[str, Any], why: str, fault: str, where: str) -> None:
        """Raise `BadInput` if another record has other flags; note what else changes bytes."""
        for name, value in self.record["args"].items():
            needed = other["args"].get(name, value)  # older code may lack a flag
            if name not in MAY_CHANGE_ON_RESUME and value != needed:
                raise BadInput(f"{flag(name)} {value}: must be {needed} {why}.")
        for name in DECIDES_BYTES:
            if self.record[name] != other.get(name):
                self.note(f"{fault}: {name} {self.record[name]}, {where} {other.get(name)}")

    def compare_ranks(self) -> None:
        """Raise `BadInput` if ranks have other flags or code; note what else differs. Collective."""
        fault = "no longer the same bytes as on one process" if self.world.sharded else "ranks differ"
        for rank, other in enumerate(self.world.gather_objects(self.record)):  # collective
            if other["sources"] != self.record["sources"]:
                raise BadInput(f"the code on rank {rank}: must be the same as on rank {self.world.rank}.")
            if other["args"]["resume"] != self.args.resume:
                raise BadInput("--resume: must be on all ranks or on none.")
            self._compare(other, f"as on rank {rank}", fault, f"on rank {rank}")

    def _open_wandb(self, resumed: bool) -> None:
        import wandb

        id_file = self.dir / "wandb_id"
        try:
            self.wandb = wandb.init(
                id=id_file.read_text() if resumed and id_file.exists() else None,
                resume="allow",
                project=self.args.wandb_project_name,
                entity=self.args.wandb_entity,
                name=self.dir.name,
                group=f"{self.args.env_id}__{self.script.stem}",  # the seeds of one experiment
                config=self.record | self.record["args"],
                save_code=True,
                settings=wandb.Settings(finish_timeout=10.0),  # seconds; `wandb sync` sends the rest
            )
        except Exception as error:  # wandb's own, and those of its settings
            advice = "run `wandb login`, or set WANDB_MODE=offline"
            raise BadInput(f"--track: {one_line(error)}; {advice}.") from error
        id_file.write_text(self.wandb.id)
        self.push(lambda kind, error, traceback: self.wandb.finish(exit_code=int(error is not None)))

    def start(self, state: dict[str, float] | None, total: int = 0) -> None:
        """Start the clock of `total` transitions; write the first files, or go on from a checkpoint's `state`."""
        self.total = total
        self.begun = time.perf_counter()
        self.rng_state = torch.get_rng_state()  # None once a draw from it was noted
        if not self.enabled:
            return
        self.csv = self.dir / "metrics.csv"
        if state:
            if self.csv.stat().st_size < state["length"]:
                raise RuntimeError(f"{self.csv}: is shorter than at the checkpoint ({state['length']} bytes)")
            os.truncate(self.csv, state["length"])
            self.evaluated = state["evaluated"]
            self.begun -= state["wall"]
        else:
            write_whole(self.dir / "config.json", text=json.dumps(self.record, indent=2) + "\n")
            if self.record["changed"]:
                difference = git(self.script, "diff", "HEAD", "--", self.script.name, "common")
                write_whole(self.dir / "changes.diff", text=difference)
            self.csv.write_text(",".join(self.columns) + "\n")
        if self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge_step = state["step"] + 1 if state else 0
            self.tensorboard = SummaryWriter(self.dir / "tensorboard", purge_step=purge_step)
            self.callback(self.tensorboard.close)
        self.bar = tqdm(total=total, file=sys.stdout, disable=not sys.stdout.isatty())
        self.callback(self.bar.close)

    def state(self) -> dict[str, float]:
        """The bytes of metrics.csv, all on the disk, and the seconds of the run so far."""
        with open(self.csv, "rb") as file:
            os.fsync(file.fileno())
        wall = time.perf_counter() - self.begun
        step = self.latest["global_step"]
        return {"step": step, "length": self.csv.stat().st_size, "wall": wall, "evaluated": self.evaluated}

    def log(self, global_step: int, row: dict[str, float | int]) -> None:
        """Write a row: these columns, others stay blank. Every rank must call, with equal losses."""
        for name in row:
            if name not in self.columns:
                raise KeyError(f"metrics.csv has no column {name}; add it to COLUMNS")
        if self.enabled:
            self._write({"global_step": global_step} | row)
        for name, value in row.items():
            if name.startswith("losses/") and not math.isfinite(value):
                fault = "is not finite; try a lower learning rate"
                raise FloatingPointError(f"step {global_step}: {name} {fault}")

    def _write(self, row: dict[str, float | int]) -> None:
        step = row["global_step"]
        if self.rng_state is not None and not torch.get_rng_state().equal(self.rng_state):
            self.rng_state = None
            fault = "something drew from torch's default generator, which each process has for itself"
            self.note(f"step {step}: {fault}; draw as rule 2 of docs/modify.md says")
        row["time/wall"] = time.perf_counter() - self.begun
        if "time/eval" in row:
            self.evaluated += row["time/eval"]
        else:
            row["time/SPS"] = step / (row["time/wall"] - self.evaluated)
        cells = [f"{row[name]}" if name in row else "" for name in self.columns]
        with open(self.csv, "r+") as file:  # it must be there still
            file.seek(0, os.SEEK_END)
            file.write(",".join(cells) + "\n")
        if self.wandb:  # which leaves out the rows that it has of before a kill
            self.wandb.log(row | {"charts/SPS": row["time/SPS"]} if "time/SPS" in row else row, step=step)
        for name, value in row.items() if self.tensorboard else ():
            self.tensorboard.add_scalar(name, value, step)
        self.latest |= row
        numbers = [f"{word} {self.latest[name]:,.1f}" for word, name in SHOWN.items() if name in self.latest]
        due = "time/eval" in row or (step == self.total and not self.args.eval_every)
        if not self.bar.disable:  # on a terminal, with the time left
            self.bar.set_postfix_str("  ".join(numbers), refresh=False)
            self.bar.update(step - self.bar.n)
        elif due or time.perf_counter() > self.shown + PROGRESS_PERIOD:
            self.shown = time.perf_counter()
            self.note("  ".join([f"{step:,} of {self.total:,}", *numbers]))

    def note(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self.enabled:
            try:
                tqdm.write(text)
                sys.stdout.flush()
            except UnicodeEncodeError:  # a console may know fewer letters
                print(ascii(text), flush=True)
            except OSError:  # nobody reads it, or a disk is full: no reason to stop learning
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def film(self, global_step: int, episode: Episode) -> None:
        """Film an evaluation's episode; if that fails, say why."""
        if self.args.capture_video and self.enabled:
            from common.video import film

            started = time.perf_counter()
            try:
                film(self.dir / "videos" / f"{global_step}.mp4", self.args, self.world, episode)
            except Exception as error:  # a simulator's own, a missing display's, a full disk's
                self.note(f"--capture-video: no film ({type(error).__name__}: {one_line(error)})")
            self.evaluated += time.perf_counter() - started


def write_whole(path: Path, write: Callable[[BinaryIO], Any] | None = None, text: str = "") -> None:
    """Fill a file with `text` or by `write`: it is whole or not there."""
    part = path.with_name(f"{path.name}.part")
    with open(part, "wb") as file:
        write(file) if write else file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def git(script: Path, *words: str) -> str:
    """What `git` prints in the script's folder; nothing without git or a repository."""
    with suppress(OSError):
        command = ["git", "-C", str(script.absolute().parent), *words]
        return subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
    return ""


def run_record(args: RunArgs, script: Path, columns: tuple[str, ...], world: World) -> dict[str, Any]:
    """What a rerun must know: flags, code, processes, versions, processor."""
    device = processor()
    if world.device.type == "cuda":
        device = f"{torch.cuda.get_device_name(world.device)}; {device}"
    code = [script, *sorted(Path(__file__).parent.glob("*.py"))] if __package__ else [script]  # it may be one file
    digest = hashlib.blake2b(b"".join(path.read_bytes() for path in code), digest_size=8)
    blas = [x for x in threadpool_info() if x["user_api"] == "blas" and "numpy" in x["filepath"]]
    commit = git(script, "rev-parse", "--verify", "--quiet", "HEAD").strip() or None
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "script": script.stem,
        "args": json.loads(json.dumps(vars(args))),  # as they are read back
        "columns": list(columns),
        "world_size": world.world_size,
        "command": shlex.join(sys.argv),
        "device": device,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": args.num_threads or (1 if world.sharded else world.cores),  # at most
        "blas": [f"{x['internal_api']} {x['version']} {x.get('architecture')}" for x in blas],
        "sources": digest.hexdigest(),
        "commit": commit,
        "changed": commit and bool(git(script, "status", "--porcelain", "--", script.name, "common")),
        "versions": versions,
    }


def processor() -> str:
    """The processor's model."""
    with suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    return platform.processor() or platform.machine()
