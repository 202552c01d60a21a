"""The run directory, the console line and wandb: rank 0 writes, elsewhere the same calls do nothing."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from common.distributed import World
from common.environments import Environments
from common.errors import BadInput, Fault, flag
from common.run.arguments import RunArgs
from common.run.files import locked, write_whole
from common.run.record import environment_record, require_same_run, source_record
from common.run.tracking import TensorBoard, Wandb
from common.run.video import film, require_encoder
from common.state import state_of


class Logger:
    """Writes `config.json`, `changes.diff` and `metrics.csv`, prints progress, sends rows elsewhere by flag.

    `args` has `env_id` and `total_timesteps` too; `file`: the script; `columns`: the header of metrics.csv after
    `global_step`; `eval_envs`: those of which --capture-video films one. Raises `BadInput` for a directory that holds a
    run or cannot be written (--run-dir), and where wandb or an encoder is missing, or nobody logged in (--track,
    --capture-video); later `Fault`, with the path, where something cannot be written. A run that fails before its first
    row leaves nothing. Attributes on rank 0: `dir`; `record`, as in config.json; `resumed`, whether a run is there that
    is to go on; `finished`, whether there is nothing left of it to do.
    """

    def __init__(
        self, args: RunArgs, file: str, columns: tuple[str, ...], world: World, eval_envs: Environments | None = None
    ) -> None:
        self.args, self.enabled, self.wall = args, world.rank == 0, 0.0
        self.rng_state, self.told_of_draws = torch.get_rng_state(), False
        self.columns = ("global_step", *columns)
        if args.capture_video:
            require_encoder()
        if not self.enabled:
            return
        self.eval_envs, self.feed = eval_envs, world.watchdog.feed
        self.films = args.capture_video
        self.rows, self.last_line, self.shown = 0, 0.0, 0
        self.started, self.evaluated = time.perf_counter(), 0.0  # when, and seconds of evaluations since
        self.latest: dict[str, float] = {}
        self.learning: tuple[float, float] | None = None  # step and time of the first row that has a loss
        script = Path(file).stem
        self.dir, self.made = self._make_dir(args, script)
        self.path, self.config, self.file, self.trackers = self.dir / "metrics.csv", self.dir / "config.json", None, []
        self.resumed = args.resume and self.config.exists()
        self.finished = self.resumed and (self.dir / "finished").exists()
        try:
            sources, self.changes = source_record(Path(file))
            environment = environment_record(world) | sources
            self.record = {"script": script, "args": dataclasses.asdict(args)} | environment
            if self.resumed:
                require_same_run(self.dir, self._recorded(), self.record)
                self.file = open(self.path, "ab", buffering=0)
            else:
                self.begin()
            if args.tensorboard and not self.finished:
                self.trackers.append(TensorBoard(self.dir, self.resumed, self.note))
            if args.track:  # a finished run's too, which may not have been handed all
                try:
                    self.trackers.append(Wandb(args, file, self.dir, environment, self.resumed, self.note))
                except BadInput as error:
                    if not self.resumed:
                        raise
                    self.note(f"{error} The run goes on without; a later start sends what is lacking.")
        except (OSError, Fault) as error:
            self._remove()
            os.close(self.lock)
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadInput(f"--run-dir {self.dir}: cannot be written ({reason}); name another.") from error
        except BaseException:
            self._remove()
            os.close(self.lock)
            raise
        self.note(f"writing to {self.dir}")

    def begin(self) -> None:
        """Start config.json and metrics.csv, over those of a run that had come to no checkpoint."""
        write_whole(self.config, (json.dumps(self.record, indent=2) + "\n").encode())
        if self.changes:
            write_whole(self.dir / "changes.diff", self.changes.encode())
        self.load_state_dict({"metrics": ",".join(self.columns) + "\n", "wall": 0.0, "evaluated": 0.0})

    def continued(self, global_step: int, changes: list[str]) -> None:
        """Say what is not as it was before a checkpoint, and add it to config.json, a change of sources beside it."""
        self.note(f"no longer the same bytes as without a stop: {'; '.join(changes)}")
        record = self._recorded()
        parts = {"global_step": global_step, "commit": self.record["commit"], "changes": changes}
        record["continued"] = [*record.get("continued", []), parts]
        write_whole(self.config, (json.dumps(record, indent=2) + "\n").encode())
        if self.changes:
            write_whole(self.dir / f"changes-{global_step}.diff", self.changes.encode())

    def _recorded(self) -> dict[str, Any]:
        try:
            return json.loads(self.config.read_bytes())
        except ValueError as error:
            raise BadInput(f"--run-dir {self.dir}: its config.json is damaged; name another.") from error

    def state_dict(self) -> dict[str, str | float]:
        """What was logged until now, and the time it took."""
        wall = time.perf_counter() - self.started
        return {"metrics": self.path.read_text(), "wall": wall, "evaluated": self.evaluated}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let metrics.csv hold what it held then, and others what they lack of that; the clock goes on from there."""
        if self.enabled:
            write_whole(self.path, state["metrics"].encode())
            if self.file is not None:
                self.file.close()
            self.file = open(self.path, "ab", buffering=0)
            self.wall, self.evaluated = state["wall"], state["evaluated"]
            self.send_recorded()

    def send_recorded(self) -> None:
        """Send the rows of metrics.csv to those who lack them."""
        if self.enabled:
            self.number = 0
            for cells in csv.DictReader(self.path.read_text().splitlines()):
                video = self.dir / "videos" / f"{cells['global_step']}.mp4"
                filmed = cells.get("eval/episodic_return") and self.args.capture_video and video.exists()
                self._send(cells, video if filmed else None)

    def _make_dir(self, args: RunArgs, script: str) -> tuple[Path, list[Path]]:
        """The run directory, and which directories were made for it."""
        env_id = args.env_id.replace("/", "-").replace(":", "-")
        default = f"runs/{env_id}__{script}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        names = [args.run_dir] if args.run_dir else [default, *(f"{default}-{n}" for n in range(2, 100))]
        for path in map(Path, names):
            try:
                made = [folder for folder in (path, *path.parents) if not folder.exists()]
                if not args.run_dir:  # a default directory is nobody else's
                    path.mkdir(parents=True)
                self.lock = locked(path)
                if args.resume or not any((path / name).exists() for name in ("metrics.csv", "config.json")):
                    return path, made
                os.close(self.lock)
            except FileExistsError:
                if args.run_dir:
                    raise BadInput(f"--run-dir {path}: is a file; name another.") from None
            except OSError as error:
                raise BadInput(f"--run-dir {path}: cannot be written ({error.strerror}); name another.") from error
        raise BadInput(f"--run-dir {path}: holds a run already; name a new directory, or go on with it by --resume.")

    def _remove(self) -> None:
        """Leave nothing of a run that did not start; what else is in the directory stays."""
        if self.resumed:
            return
        for tracker in self.trackers:
            tracker.remove()
        if self.file is not None:
            self.file.close()
        files, folders = [self.config, self.path, self.dir / "changes.diff"], self.made
        if self.args.capture_video:
            files, folders = [*files, self.dir / "videos" / "0.mp4"], [self.dir / "videos", *folders]
        with contextlib.suppress(OSError):
            for path in files:
                path.unlink(missing_ok=True)
        for folder in folders:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def start(self, plan: str) -> None:
        """Print what is about to be run, and start the clock of `time/wall` and `time/SPS`."""
        self.note(plan)
        self.rng_state = torch.get_rng_state()
        self.started = time.perf_counter() - self.wall

    def log(self, global_step: int, row: dict[str, float | int]) -> None:
        """Write one row, whole, with the time; `row` maps columns to numbers, the rest stays blank.

        Every rank calls with the same losses: where one is not finite, all raise `Fault` after the row. So they do for
        a name that `columns` lack, before it.
        """
        for name in row:
            if name not in self.columns:
                raise Fault(f"step {global_step}: metrics.csv has no column {name}; add it to COLUMNS.")
        if not self.told_of_draws and not torch.get_rng_state().equal(self.rng_state):
            self.told_of_draws = True
            fault = "something drew from torch's default generator, so the numbers depend on the number of processes"
            self.note(f"step {global_step}: {fault}; draw as README's 'Changing a network' says")
        if self.enabled:
            self._log({"global_step": global_step} | row)
        for name, value in row.items():
            if name.startswith("losses/") and not math.isfinite(value):
                rates = [n for n, x in vars(self.args).items() if n.endswith(("_lr", "_rate")) and type(x) is float]
                raise Fault(f"step {global_step}: {name} is not finite; try a lower {' or '.join(map(flag, rates))}.")

    def _log(self, row: dict[str, float | int]) -> None:
        row["time/wall"] = time.perf_counter() - self.started
        self.evaluated += row.get("time/eval", 0.0)
        if "time/eval" not in row:
            row["time/SPS"] = row["global_step"] / (row["time/wall"] - self.evaluated)
        cells = [repr(plain(row[column])) if column in row else "" for column in self.columns]
        self._write(cells)
        film = self._film(row["global_step"]) if "eval/episodic_return" in row else None
        self._send(dict(zip(self.columns, cells, strict=True)), film)
        self.rows += row["global_step"] > 0
        self.latest |= row
        if self.learning is None and any(name.startswith("losses/") and name != "losses/alpha" for name in row):
            self.learning = row["global_step"], time.perf_counter()
        self._print("eval/episodic_return" in row)

    def _film(self, global_step: int) -> Path | None:
        """The film of the evaluation that was logged; of what cannot be drawn, one line says why, and no more is."""
        if not self.films:
            return None
        path, started = self.dir / "videos" / f"{global_step}.mp4", time.perf_counter()

        def alive() -> None:
            if time.perf_counter() - started > self.args.timeout / 2:  # the other ranks wait
                raise TimeoutError("it took half of --timeout")
            self.feed()

        try:
            film(path, self.args.env_id, self.args.env_kwargs, self.eval_envs.first, alive)
            return path
        except Exception as error:  # a simulator's own, a missing display's, a full disk's
            self.note(f"--capture-video: no films ({type(error).__name__}: {' '.join(str(error).split())[:200]})")
            self.films = False
            return None
        finally:
            self.evaluated += time.perf_counter() - started

    def _send(self, cells: Mapping[str, str], video: Path | None) -> None:
        """Send a row of metrics.csv to those who lack it, under its number there."""
        for tracker in self.trackers:
            if self.number >= tracker.starting_step:
                row = {name: float(cell) for name, cell in cells.items() if cell}
                tracker.send(self.number, row, video)
        self.number += 1

    def _write(self, cells: Iterable[str]) -> None:
        """Append one line to metrics.csv: all of it, or none and a `Fault`."""
        line, length = (",".join(cells) + "\n").encode(), self.file.tell()
        try:
            there = os.stat(self.path)
            if not os.path.samestat(there, os.fstat(self.file.fileno())) or there.st_size != length:
                raise OSError(0, "another program has changed it")
            if self.file.write(line) != len(line):  # there was room for a part
                self.file.write(line)  # raises the reason
                raise OSError(0, "the disk is full")
        except OSError as error:
            self.file.truncate(min(length, os.fstat(self.file.fileno()).st_size))
            raise Fault(f"{self.path}: cannot be written ({error.strerror}); the run ends at its last row.") from error

    def _print(self, now_too: bool) -> None:
        terminal, now = sys.stdout.isatty(), time.perf_counter()
        if not now_too and now - self.last_line < (0.2 if terminal else 10.0):
            return
        step, total = self.latest["global_step"], self.args.total_timesteps
        parts = [f"{step:,} of {total:,} ({step / max(total, 1):.0%})"]
        if "time/SPS" in self.latest:
            parts.append(f"{self.latest['time/SPS']:,.0f} SPS")
        if "charts/episodic_return" in self.latest:
            parts.append(f"return {self.latest['charts/episodic_return']:.1f}")
        if "eval/episodic_return" in self.latest:
            parts.append(f"evaluation {self.latest['eval/episodic_return']:.1f}")
        if self.learning is not None and step > self.learning[0]:  # before it learns it is much faster
            left = int((total - step) * (now - self.learning[1]) / (step - self.learning[0]))
            parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        line = "  ".join(parts)
        self.note(f"\r{line:<100}" if terminal else line, end="" if terminal else "\n")
        self.last_line, self.shown = now, step

    def note(self, text: str, end: str = "\n") -> None:
        """Print one plain line, if the console takes it: a full disk behind it is no reason to stop learning."""
        if self.enabled:
            try:
                print(text, end=end, flush=True)
            except UnicodeError:
                print(ascii(text), end=end, flush=True)
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def save(self, global_step: int, state: Mapping[str, Any]) -> None:
        """Write model.pt, for `weights_only=True`: `state` but optimisers and generators, the arguments, the step."""
        if self.enabled:
            model = {"args": self.args.experiment(), "global_step": global_step}
            for name, x in state.items():
                if not isinstance(x, torch.optim.Optimizer | torch.Generator):
                    model[name] = state_of(x)
            content = io.BytesIO()
            torch.save(model, content)
            write_whole(self.dir / "model.pt", content.getbuffer())

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self.enabled:
            return
        if kind is None and self.latest.get("global_step", 0) != self.shown:
            self._print(True)
        if sys.stdout.isatty():
            self.note("")
        done = kind is None or (isinstance(error, SystemExit) and not error.code)  # of a run that was finished before
        for tracker in self.trackers:
            tracker.finish(not done)
        if kind is not None and not self.rows:
            self._remove()
        self.file.close()
        os.close(self.lock)


def plain(value: Any) -> int | float:
    """A numpy or torch scalar as Python's own, so that `repr` gives the shortest digits that read back equal."""
    return value.item() if hasattr(value, "item") else value
