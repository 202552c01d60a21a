"""The run directory and what is written there; rank 0 writes, on other ranks the same calls do nothing."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from common.distributed import World
from common.environments import Environments
from common.errors import BadInput, Fault, flag, one_line
from common.run.arguments import RunArgs
from common.run.console import Console
from common.run.files import locked, write_whole
from common.run.record import environment_record, require_same_run, source_record
from common.run.tracking import TensorBoard, Wandb
from common.run.video import film, require_encoder
from common.state import state_of

FILES = ("config.json", "metrics.csv", "changes.diff", "videos", "tensorboard", "wandb_id")  # of a run that begins


class Logger:
    """Writes `config.json`, `changes.diff` and `metrics.csv`, prints progress, sends rows to trackers.

    `args` has `env_id` and `total_timesteps` too; `file`: the script; `columns`: the header of metrics.csv after
    `global_step`; `eval_envs`: --capture-video films the first. Raises `BadInput` for a directory that holds a run or
    cannot be written (--run-dir), where a package is missing, and where nobody is logged in (--track); later `Fault`,
    with the path, where something cannot be written. A run that fails before its first row (that of the evaluation
    before learning does not count) leaves nothing. Attributes on rank 0: `dir`; `record`, as in config.json; `resumed`,
    whether the directory holds a run that is to go on; `finished`, whether that run is complete.
    """

    def __init__(
        self, args: RunArgs, file: str, columns: tuple[str, ...], world: World, eval_envs: Environments | None = None
    ) -> None:
        if args.capture_video:
            require_encoder()
        self.args, self.enabled, self.columns = args, world.rank == 0, ("global_step", *columns)
        self.rng_state: torch.Tensor | None = torch.get_rng_state()  # None once a draw from it was noted
        self.started, self.wall = time.perf_counter(), 0.0  # and seconds of the run before this start
        self.evaluated, self.last_step = 0.0, 0  # seconds of evaluations; the newest row's step
        self.console, self.trackers = Console(args.total_timesteps), []
        self.eval_envs, self.films, self.feed_watchdog = eval_envs, args.capture_video, world.watchdog.feed
        if not self.enabled:
            return
        with ExitStack() as opened:
            try:
                self._open(file, world, opened)
            except (OSError, Fault) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise BadInput(f"--run-dir {self.dir}: cannot be written ({reason}); name another.") from error
            self.opened = opened.pop_all()
        self.note(f"writing to {self.dir}")

    def _open(self, file: str, world: World, opened: ExitStack) -> None:
        """Lock the run directory, begin a run there or go on with it, and open the trackers.

        `opened`: receives what is to be called at the end, or if this fails.
        """
        args, script = self.args, Path(file).stem
        self._make_dir(script)
        opened.callback(os.close, locked(self.dir))
        self.present = {path.name for path in self.dir.iterdir()}
        if not args.resume and self.present & {"metrics.csv", "config.json"}:
            fault = "holds a run already; name a new directory, or go on with it by --resume"
            raise BadInput(f"--run-dir {self.dir}: {fault}.")
        self.resumed = args.resume and "config.json" in self.present
        self.finished = self.longer = False
        opened.push(self._end)
        sources, self.changes = source_record(Path(file))
        environment = environment_record(world) | sources
        self.record = {"script": script, "args": dataclasses.asdict(args)} | environment
        if self.resumed:
            try:
                self.config = json.loads((self.dir / "config.json").read_bytes())
            except ValueError as error:
                raise BadInput(f"--run-dir {self.dir}: its config.json is damaged; name another.") from error
            require_same_run(self.dir, self.config, self.record)
            self.longer = self.config["args"]["total_timesteps"] < args.total_timesteps
            self.finished = "finished" in self.present and not self.longer
        else:
            self.begin()
        if args.tensorboard and not self.finished:
            self.trackers.append(TensorBoard(self.dir, self.resumed, self.note))
        if args.track:  # a finished run's too, which may not have sent all
            same_run = self.resumed and not self.longer  # wandb keeps the rows at the old end
            try:
                self.trackers.append(Wandb(args, file, self.dir, environment, same_run, self.note))
            except BadInput as error:
                if not self.resumed:
                    raise
                self.note(f"{error} The run goes on without; a later start sends what is lacking.")
        if self.finished:
            self._send_recorded()

    def _make_dir(self, script: str) -> None:
        """Make the run directory: --run-dir, or a new one, with a number where a run of the same second has it."""
        env_id = self.args.env_id.replace("/", "-").replace(":", "-")
        default = f"runs/{env_id}__{script}__{self.args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        for number in range(1, 100):
            self.dir = Path(self.args.run_dir or (default if number == 1 else f"{default}-{number}"))
            self.made = [folder for folder in (self.dir, *self.dir.parents) if not folder.exists()]
            try:
                self.dir.mkdir(parents=True, exist_ok=bool(self.args.run_dir))
                return
            except FileExistsError:
                if self.args.run_dir:
                    raise BadInput(f"--run-dir {self.dir}: is a file; name another.") from None

    def begin(self) -> None:
        """Start config.json and metrics.csv, over those of a run that had no checkpoint yet."""
        self._write_config(self.record, "changes.diff")
        self.load_state_dict({"metrics": ",".join(self.columns) + "\n", "wall": 0.0, "evaluated": 0.0})

    def continued(self, global_step: int, meaning: str, changes: list[str]) -> None:
        """Say what is not as it was before a checkpoint, and add it to config.json; changed sources have a file."""
        self.note(f"{meaning}: {'; '.join(changes)}")
        change = {"global_step": global_step, "commit": self.record["commit"], "changes": changes}
        self.config["continued"] = [*self.config.get("continued", []), change]
        self.config["args"]["total_timesteps"] = self.args.total_timesteps
        self._write_config(self.config, f"changes-{global_step}.diff")

    def _write_config(self, config: Mapping[str, Any], name_of_changes: str) -> None:
        write_whole(self.dir / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        if self.changes:
            write_whole(self.dir / name_of_changes, self.changes.encode())

    def state_dict(self) -> dict[str, str | float]:
        """The rows so far, and the time that they took."""
        wall = time.perf_counter() - self.started
        return {"metrics": (self.dir / "metrics.csv").read_text(), "wall": wall, "evaluated": self.evaluated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make metrics.csv what it was, and send trackers what they lack of it; the clock goes on from there."""
        if self.enabled:
            (self.dir / "finished").unlink(missing_ok=True)  # first: a run that was to be shorter goes on
            path = self.dir / "metrics.csv"
            write_whole(path, state["metrics"].encode())
            self.metrics_stat = path.stat()
            self.wall, self.evaluated = state["wall"], state["evaluated"]
            self._send_recorded()

    def _send_recorded(self) -> None:
        """Send the rows of metrics.csv to trackers that lack them."""
        self.num_rows = 0
        for cells in csv.DictReader((self.dir / "metrics.csv").read_text().splitlines()):
            self._send(cells)

    def start(self, plan: str) -> None:
        """Print what is about to be run, and start the clock of `time/wall` and `time/SPS`."""
        self.note(plan)
        self.rng_state = torch.get_rng_state()
        self.started = time.perf_counter() - self.wall

    def log(self, global_step: int, row: dict[str, float | int]) -> None:
        """Write one row, whole, with the time; `row` maps columns to numbers, the rest stays blank.

        Every rank must call with the same losses. All raise `Fault` for a name that `columns` lack, before the row, and
        for a loss that is not finite, after it.
        """
        for name in row:
            if name not in self.columns:
                raise Fault(f"step {global_step}: metrics.csv has no column {name}; add it to COLUMNS.")
        if self.enabled:
            self._write_row({"global_step": global_step} | row)
        for name, value in row.items():
            if name.startswith("losses/") and not math.isfinite(value):
                rates = [n for n, x in vars(self.args).items() if n.endswith(("_lr", "_rate")) and type(x) is float]
                raise Fault(f"step {global_step}: {name} is not finite; try a lower {' or '.join(map(flag, rates))}.")

    def _write_row(self, row: dict[str, float | int]) -> None:
        """Write a row to metrics.csv, send it to trackers and show it."""
        step, evaluation = row["global_step"], "eval/episodic_return" in row
        if self.rng_state is not None and not torch.get_rng_state().equal(self.rng_state):
            self.rng_state = None
            fault = "something drew from torch's default generator, so the numbers depend on the number of processes"
            self.note(f"step {step}: {fault}; draw as rule 2 of docs/modify.md says")
        row["time/wall"] = time.perf_counter() - self.started
        if evaluation:
            self.evaluated += row["time/eval"]
        else:
            row["time/SPS"] = step / (row["time/wall"] - self.evaluated)
        cells = {name: repr(plain(row[name])) if name in row else "" for name in self.columns}
        self._append(",".join(cells.values()) + "\n")
        if evaluation and self.films:
            self._film(step)
        self._send(cells)
        self.last_step = step
        self.console.show(row)

    def _append(self, line: str) -> None:
        """Append a line to metrics.csv: all of it, or none and a `Fault`."""
        path, before = self.dir / "metrics.csv", self.metrics_stat
        try:
            found = path.stat()
            if found.st_size != before.st_size or not os.path.samestat(found, before):
                raise OSError(0, "another program has changed it")
            try:
                with open(path, "ab") as file:
                    file.write(line.encode())
            except OSError:
                os.truncate(path, before.st_size)
                raise
            self.metrics_stat = path.stat()
        except OSError as error:
            raise Fault(f"{path}: cannot be written ({error.strerror}); the run ends at its last row.") from error

    def _send(self, cells: Mapping[str, str]) -> None:
        """Send the next row of metrics.csv, and its film, to trackers that lack it."""
        video = self.dir / "videos" / f"{cells['global_step']}.mp4"
        filmed = self.args.capture_video and cells.get("eval/episodic_return") and video.exists()
        row = {name: float(cell) for name, cell in cells.items() if cell}
        if "time/SPS" in row:
            row["charts/SPS"] = row.pop("time/SPS")  # its usual name
        for tracker in self.trackers:
            if self.num_rows >= tracker.starting_step:
                tracker.send(self.num_rows, row, video if filmed else None)
        self.num_rows += 1

    def _film(self, global_step: int) -> None:
        """Film the evaluation that was just played; where that fails, say why, and film no more."""
        path, started = self.dir / "videos" / f"{global_step}.mp4", time.perf_counter()

        def alive() -> None:
            if time.perf_counter() - started > self.args.timeout / 2:  # the other ranks wait
                raise TimeoutError("it took half of --timeout")
            self.feed_watchdog()

        try:
            film(path, self.args.env_id, self.args.env_kwargs, self.eval_envs.first_episode, alive)
        except Exception as error:  # a simulator's own, a missing display's, a full disk's
            self.note(f"--capture-video: no films ({type(error).__name__}: {one_line(error)})")
            self.films = False
        self.evaluated += time.perf_counter() - started

    def note(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self.enabled:
            self.console.note(text)

    def save(self, global_step: int, state: Mapping[str, Any]) -> None:
        """Write model.pt, for `weights_only=True`: the arguments, the step, `state` without what only trains."""
        if self.enabled:
            model = {"args": self.args.experiment(), "global_step": global_step}
            model |= {name: state_of(x) for name, x in for_model(state).items()}
            content = io.BytesIO()
            torch.save(model, content)
            write_whole(self.dir / "model.pt", content.getbuffer())

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self.enabled:
            self.console.end(complete=error is None)
            self.opened.__exit__(kind, error, traceback)

    def _end(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """End the trackers; remove what a new run has made that failed before its first update's row."""
        failed = bool(error.code) if isinstance(error, SystemExit) else error is not None  # code 0: it was finished
        for tracker in self.trackers:
            tracker.finish(failed)
        if error is not None and not self.resumed and self.last_step == 0:
            for path in (self.dir / name for name in FILES if name not in self.present):
                with suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            for folder in self.made:
                with suppress(OSError):  # it holds something else
                    folder.rmdir()


def for_model(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a run's state goes into model.pt: all except optimisers and generators."""
    return {name: x for name, x in state.items() if not isinstance(x, torch.optim.Optimizer | torch.Generator)}


def plain(value: Any) -> int | float:
    """A numpy or torch scalar as Python's own, so that `repr` gives the shortest digits that read back equal."""
    return value.item() if hasattr(value, "item") else value
