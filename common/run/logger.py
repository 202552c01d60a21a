"""The run directory and what is written there; rank 0 writes, on other ranks the same calls do nothing."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import filelock
import torch

from common.distributed import World
from common.environments import Environments
from common.errors import BadInput, Fault, one_line
from common.run.arguments import RunArgs
from common.run.record import environment_record, require_same_run, source_record
from common.state import state_of

LOCK_TIMEOUT = 15.0  # seconds to wait for the end of a process that holds the run directory
PROGRESS_PERIOD = 10.0  # seconds between two lines of progress where there is no terminal


class Logger:
    """Writes `config.json`, `changes.diff` and `metrics.csv`, prints progress, sends rows to trackers.

    `file`: the script; `columns`: the header of metrics.csv; `eval_envs`: --capture-video films the first.
    Raises `BadInput`, naming the flag, for a directory that holds another run or cannot be made and for
    a tracker that does not begin; later `Fault`, with the path, if a file cannot be written.
    Attributes on rank 0: `dir`; `record`, as in config.json; `resumed`: whether the directory holds a run to
    continue; `finished`: whether that is complete; `longer`: whether it was to be shorter.
    """

    def __init__(
        self,
        args: RunArgs,
        file: str,
        columns: tuple[str, ...],
        world: World,
        eval_envs: Environments | None = None,
    ) -> None:
        self.args = args
        self.columns = columns
        self.world = world
        self.enabled = world.rank == 0
        self.eval_envs = eval_envs
        self.film = None
        if args.capture_video:
            from common.run.video import film

            self.film = film
        self.latest: dict[str, float] = {"global_step": 0}  # the newest number of each column
        self.num_rows = 0
        self.wall = 0.0  # seconds of the run before this start
        self.evaluated = 0.0  # seconds of evaluations and films
        self.continues = False  # whether a checkpoint was read
        self.bar = None
        self.shown = 0.0  # when progress was shown
        self.rows_shown = 0
        self.trackers: list[Any] = []
        if self.enabled:
            with ExitStack() as opened:
                self._open(Path(file), opened)
                self.opened = opened.pop_all()

    def _open(self, file: Path, opened: ExitStack) -> None:
        """Lock the run directory, look at what it holds, and open the trackers."""
        args = self.args
        env_id = args.env_id.replace("/", "-").replace(":", "-")
        default = f"runs/{env_id}__{file.stem}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        self.dir = Path(args.run_dir or default)
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            opened.enter_context(filelock.FileLock(self.dir / "lock", timeout=LOCK_TIMEOUT))
        except filelock.Timeout as error:
            fault = "another process is writing there; end it, or name another"
            raise BadInput(f"--run-dir {self.dir}: {fault}.") from error
        except OSError as error:
            raise BadInput(f"--run-dir {self.dir}: cannot be written ({error.strerror}); name another.") from error
        config = self.dir / "config.json"
        self.resumed = args.resume and config.exists()
        if not self.resumed and (config.exists() or (self.dir / "metrics.csv").exists()):
            advice = "" if args.resume else ", or go on with it by --resume"
            raise BadInput(f"--run-dir {self.dir}: holds a run already; name a new directory{advice}.")
        sources, self.difference = source_record(file)
        environment = environment_record(self.world) | sources
        self.record = {"script": file.stem, "args": args.as_json(), "columns": list(self.columns)}
        self.record |= environment
        self.longer = False
        if self.resumed:
            self.config = json.loads(config.read_bytes())
            require_same_run(self.dir, self.config, self.record)
            self.longer = self.config["args"]["total_timesteps"] < args.total_timesteps
        self.finished = self.resumed and (self.dir / "finished").exists() and not self.longer
        if args.tensorboard and not self.finished:
            from common.run.tracking import TensorBoard

            self.trackers.append(TensorBoard(self.dir))
        if args.track and not self.finished:
            from common.run.tracking import Wandb

            same_run = self.resumed and not self.longer  # wandb keeps the rows at the old end
            self.trackers.append(Wandb(args, file, self.dir, environment, same_run))
        self.note(f"writing to {self.dir}")

    def continued(self, global_step: int, meaning: str, changes: list[str]) -> None:
        """Say what is not as it was before a checkpoint, and add it to config.json."""
        self.note(f"{meaning}: {'; '.join(changes)}")
        change = {"global_step": global_step, "commit": self.record["commit"], "changes": changes}
        self.config["continued"] = [*self.config.get("continued", []), change]
        self.config["args"]["total_timesteps"] = self.args.total_timesteps
        self._write_config(self.config)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        self.write("config.json", (json.dumps(config, indent=2) + "\n").encode())

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a file under another name, then rename it: it is whole or, with a `Fault`, not there."""
        if not self.enabled:
            return
        path = self.dir / name
        part = self.dir / f"{name}.part"
        try:
            with open(part, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise Fault(f"{path}: cannot be written ({error.strerror}).") from error

    def save(self, global_step: int, state: Mapping[str, Any]) -> None:
        """Write model.pt, for `weights_only=True`: arguments, step, `state` without what only trains."""
        if not self.enabled:
            return
        model = {"args": self.args.experiment(), "global_step": global_step}
        model |= {name: state_of(x) for name, x in for_model(state).items()}
        content = io.BytesIO()
        torch.save(model, content)
        self.write("model.pt", content.getbuffer())

    def state_dict(self) -> dict[str, float]:
        """The bytes of metrics.csv, all on the disk, and the seconds of the run so far."""
        with open(self.dir / "metrics.csv", "rb") as file:
            os.fsync(file.fileno())
            length = file.seek(0, os.SEEK_END)
        return {"length": length, "wall": time.perf_counter() - self.begun, "evaluated": self.evaluated}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Cut metrics.csv back to what it was, and send trackers what they lack of it."""
        if not self.enabled:
            return
        path = self.dir / "metrics.csv"
        if not path.exists() or path.stat().st_size < state["length"]:
            raise Fault(f"{path}: is shorter than at the checkpoint ({state['length']} bytes).")
        (self.dir / "finished").unlink(missing_ok=True)  # first: a run that was to be shorter goes on
        os.truncate(path, state["length"])
        self.wall = state["wall"]
        self.evaluated = state["evaluated"]
        self.continues = True
        for cells in csv.DictReader(path.read_text().splitlines()):
            self._send(cells)

    def start(self, plan: str) -> None:
        """Print the plan and start the clock. Without a checkpoint, write the first files."""
        self.note(plan)
        self.rng_state = torch.get_rng_state()  # None once a draw from it was noted
        self.begun = time.perf_counter() - self.wall
        if self.enabled and not self.continues:
            if self.resumed:
                self.note(f"{self.dir} holds no checkpoint: the run begins again")
            for name in ("finished", "changes.diff"):  # of a run that was removed, of a start that was killed early
                (self.dir / name).unlink(missing_ok=True)
            self._write_config(self.record)
            if self.difference:
                self.write("changes.diff", self.difference.encode())
            self.write("metrics.csv", (",".join(self.columns) + "\n").encode())
        if self.enabled and sys.stdout.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=self.args.total_timesteps, initial=int(self.latest["global_step"]), file=sys.stdout)

    def log(self, global_step: int, row: dict[str, float | int]) -> None:
        """Write one row with the time; `row` maps columns to numbers, the rest stays blank.

        Every rank must call with the same losses. All raise `Fault` for a name that `columns` lack, before the
        row, and for a loss that is not finite, after it.
        """
        for name in row:
            if name not in self.columns:
                raise Fault(f"step {global_step}: metrics.csv has no column {name}; add it to COLUMNS.")
        if self.enabled:
            self._write_row({"global_step": global_step} | row)
        for name, value in row.items():
            if name.startswith("losses/") and not math.isfinite(value):
                raise Fault(f"step {global_step}: {name} is not finite; try a lower learning rate.")

    def _write_row(self, row: dict[str, float | int]) -> None:
        """Write a row to metrics.csv, film its evaluation, send it to trackers and show it."""
        step = row["global_step"]
        if self.rng_state is not None and not torch.get_rng_state().equal(self.rng_state):
            self.rng_state = None
            fault = "something drew from torch's default generator, so the numbers depend on the number of processes"
            self.note(f"step {step}: {fault}; draw as rule 2 of docs/modify.md says")
        row["time/wall"] = time.perf_counter() - self.begun
        evaluation = "eval/episodic_return" in row
        if evaluation:
            self.evaluated += row["time/eval"]
        else:
            row["time/SPS"] = step / (row["time/wall"] - self.evaluated)
        cells = {name: f"{row[name]}" if name in row else "" for name in self.columns}
        path = self.dir / "metrics.csv"
        try:
            with open(path, "a") as file:
                file.write(",".join(cells.values()) + "\n")
        except OSError as error:
            raise Fault(f"{path}: cannot be written ({error.strerror}).") from error
        if evaluation and self.film:
            self._film(step)
        self._send(cells)
        if evaluation or self.bar is not None or time.perf_counter() > self.shown + PROGRESS_PERIOD:
            self._show()

    def _film(self, global_step: int) -> None:
        """Film the evaluation that was just played; if that fails, say why, and film no more."""
        started = time.perf_counter()
        path = self.dir / "videos" / f"{global_step}.mp4"
        try:
            self.film(path, self.args, self.eval_envs.first_episode, self.world.watchdog.feed)
        except Exception as error:  # a simulator's own, a missing display's, a full disk's
            self.note(f"--capture-video: no films ({type(error).__name__}: {one_line(error)})")
            self.film = None
        self.evaluated += time.perf_counter() - started

    def _send(self, cells: Mapping[str, str]) -> None:
        """Send the next row of metrics.csv, and its film, to trackers."""
        row = {name: float(cell) for name, cell in cells.items() if cell}
        self.latest |= row
        film = self.dir / "videos" / f"{cells['global_step']}.mp4"
        filmed = "eval/episodic_return" in row and self.args.capture_video and film.exists()
        if "time/SPS" in row:
            row["charts/SPS"] = row.pop("time/SPS")  # its usual name
        for tracker in self.trackers:
            tracker.send(self.num_rows, row, film if filmed else None)
        self.num_rows += 1

    def _show(self) -> None:
        """Show progress: on a terminal in a bar with the time left, otherwise in a line."""
        self.shown = time.perf_counter()
        self.rows_shown = self.num_rows
        step = int(self.latest["global_step"])
        total = self.args.total_timesteps
        names = {"return": "charts/episodic_return", "evaluation": "eval/episodic_return"}
        numbers = [f"{word} {self.latest[name]:.1f}" for word, name in names.items() if name in self.latest]
        if self.bar is not None:
            self.bar.set_postfix_str("  ".join(numbers), refresh=False)
            self.bar.update(step - self.bar.n)
            return
        if "time/SPS" in self.latest:
            numbers.insert(0, f"{self.latest['time/SPS']:,.0f} SPS")
        self.note("  ".join([f"{step:,} of {total:,} ({step / max(total, 1):.0%})", *numbers]))

    def note(self, text: str) -> None:
        """Print a line, on rank 0."""
        if self.enabled:
            try:
                print(text, flush=True) if self.bar is None else self.bar.write(text)
            except OSError:  # nobody reads it, or a disk is full: no reason to stop learning
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self.enabled:
            with self.opened:
                if self.bar is not None:
                    self.bar.close()
                elif error is None and self.rows_shown < self.num_rows:
                    self._show()
                for tracker in self.trackers:
                    with suppress(Exception):  # a full disk's, or wandb's own: no other end of the run
                        tracker.finish(failed=error is not None)


def for_model(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a run's state goes into model.pt: all except optimisers and generators."""
    return {name: x for name, x in state.items() if not isinstance(x, torch.optim.Optimizer | torch.Generator)}
