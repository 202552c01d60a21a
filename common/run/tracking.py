"""What is sent elsewhere beside metrics.csv: `--track` (wandb) and `--tensorboard`; rank 0's, through the `Logger`."""

from __future__ import annotations

import atexit
import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import BadInput
from common.run.arguments import RunArgs
from common.run.record import source_files
from common.watchdog import end_now

LOGIN_WAIT = 15.0  # seconds that wandb takes to give up an unreachable server, before those of `init_timeout`
LAST_WAIT = 60.0, 2.0  # seconds that wandb has at the end of a run, and of one that was stopped or failed


class Wandb:
    """A wandb run; a thread of its own sends to it, so that a slow or dead connection holds nothing up.

    `folder`: the run directory, which keeps the wandb run's id; a run that goes on is the same there. `starting_step`:
    how many rows it has from before. Raises `BadInput` (--track) where wandb is missing, or nobody logged in.
    """

    def __init__(
        self,
        args: RunArgs,
        file: str,
        folder: Path,
        environment: Mapping[str, Any],
        resumed: bool,
        note: Callable[[str], None],
    ) -> None:
        script, kept = Path(file).stem, folder / "wandb_id"
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise BadInput("--track: needs wandb: pip install wandb") from error
        try:
            going_on = resumed and kept.exists()
            offline = wandb.setup().settings.mode in ("offline", "dryrun")  # where each start's folder is a whole run
            self.run = wandb.init(
                id=kept.read_text() if going_on else None,
                resume="allow" if going_on and not offline else None,
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                name=folder.name,
                group=f"{args.env_id}__{script}",  # the seeds of one experiment
                tags=[script, f"processes-{environment['world_size']}"],
                config=dataclasses.asdict(args) | environment,
                # before the other ranks, which wait to meet this one, have waited for --timeout; otherwise 90
                settings=wandb.Settings(init_timeout=min(90.0, max(1.0, args.timeout / 2 - LOGIN_WAIT))),
            )
            self.run.define_metric("*", step_metric="global_step")
            self.run.define_metric("eval/episodic_return", step_metric="global_step", summary="max,last")
            source = wandb.Artifact(f"source-{script}", type="source")
            for name, path in source_files(Path(file)).items():
                source.add_file(str(path), name=name)
            self.run.log_artifact(source)
        except Exception as error:  # wandb's own, and those of its settings
            reason = " ".join(str(error).split())[:200]
            if "log in" in reason or "login" in reason:
                reason = "not logged in to wandb"
            if "project name" in reason:
                raise BadInput(f"--wandb-project-name {args.wandb_project_name}: {reason}.") from error
            raise BadInput(f"--track: {reason}; run `wandb login`, or set WANDB_MODE=offline.") from error
        kept.write_text(self.run.id)
        self.note, self.kept = note, kept
        self.starting_step, self.video = self.run.starting_step, wandb.Video
        self.asked, self.sent, self.fault, self.code = 0, 0, "", 0
        self.rows: queue.SimpleQueue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._send_all, daemon=True)
        self.thread.start()

    def send(self, number: int, row: dict[str, float], video: Path | None) -> None:
        """Hand over a row under its number in metrics.csv, with a film."""
        if "time/SPS" in row:
            row["charts/SPS"] = row.pop("time/SPS")
        self.asked += 1
        self.rows.put((number, row, video))

    def remove(self) -> None:
        self.kept.unlink(missing_ok=True)

    def _send_all(self) -> None:
        try:
            while (item := self.rows.get()) is not None:
                number, row, video = item
                film = {} if video is None else {"videos/evaluation": self.video(str(video), format="mp4")}
                self.run.log(row | film, step=number)
                self.sent += 1
            self.run.finish(exit_code=self.code)
        except Exception as error:
            self.fault = " ".join(str(error).split())[:200] or type(error).__name__

    def finish(self, failed: bool) -> None:
        """Wait for what is still to be sent, for a while, and say what was not."""
        self.code = int(failed)
        self.rows.put(None)
        self.thread.join(LAST_WAIT[failed])
        if self.thread.is_alive():
            self.fault = f"it did not answer for {LAST_WAIT[failed]:g} seconds"
            atexit.register(end_now, 0)  # before wandb's own, which would wait on; other ends than this do so anyway
        if self.fault:
            told = f"wandb was handed {self.sent} of {self.asked} rows ({self.fault}); metrics.csv has all"
            self.note(f"--track: {told}, and `wandb sync {Path(self.run.dir).parent}` sends what it was handed.")


class TensorBoard:
    """Files in `tensorboard`, in the run directory, for `tensorboard --logdir`; a run that goes on writes them anew.

    What fails later is told by `note`, once, and then no more is written. Raises `BadInput` (--tensorboard) where the
    package is missing.
    """

    starting_step, suffix = 0, ".lockstep"

    def __init__(self, folder: Path, resumed: bool, note: Callable[[str], None]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise BadInput("--tensorboard: needs tensorboard: pip install tensorboard") from error
        self.folder, self.note = folder / "tensorboard", note
        if resumed:
            self.remove()
        self.writer: Any = SummaryWriter(self.folder, filename_suffix=self.suffix)

    def remove(self) -> None:
        """Remove what a start has written; what else is there stays."""
        for path in self.folder.glob(f"*{self.suffix}"):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def send(self, number: int, row: dict[str, float], video: Path | None) -> None:
        """Write a row at its step, SPS under its usual name."""
        try:
            for name, value in row.items() if self.writer is not None else ():
                self.writer.add_scalar("charts/SPS" if name == "time/SPS" else name, value, int(row["global_step"]))
        except Exception as error:  # of a full disk, in a thread of its own
            self._fail(error)

    def finish(self, failed: bool) -> None:
        try:
            if self.writer is not None:
                self.writer.close()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.writer = None
        self.note(f"--tensorboard: cannot be written ({error}); metrics.csv goes on")
