"""Where rows of metrics.csv go too: `--track` (wandb) and `--tensorboard`. Used by the `Logger`, on rank 0."""

from __future__ import annotations

import atexit
import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.errors import BadInput, one_line
from common.run.arguments import RunArgs
from common.run.record import source_files
from common.watchdog import end_now

LOGIN_WAIT = 15.0  # seconds that wandb takes to give up an unreachable server, before those of `init_timeout`
LAST_WAIT = 60.0, 2.0  # seconds that wandb has at the end of a run, and of one that was stopped or failed
Note = Callable[[str], None]  # prints a line


class Wandb:
    """A wandb run; a thread sends to it, so that a slow or dead connection holds nothing up.

    `folder`: the run directory, which stores the wandb run's id: a resumed run has the same. `starting_step`: how many
    rows wandb has already. Raises `BadInput` (--track) where wandb is missing, or nobody is logged in.
    """

    def __init__(
        self, args: RunArgs, file: str, folder: Path, environment: Mapping[str, Any], resumed: bool, note: Note
    ) -> None:
        script, id_file = Path(file).stem, folder / "wandb_id"
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise BadInput("--track: needs wandb: pip install wandb") from error
        try:
            same_run = resumed and id_file.exists()
            offline = wandb.setup().settings.mode in ("offline", "dryrun")  # where each start's folder is a whole run
            self.run = wandb.init(
                id=id_file.read_text() if same_run else None,
                resume="allow" if same_run and not offline else None,
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
            reason = one_line(error)
            if "log in" in reason or "login" in reason:
                reason = "not logged in to wandb"
            if "project name" in reason:
                raise BadInput(f"--wandb-project-name {args.wandb_project_name}: {reason}.") from error
            raise BadInput(f"--track: {reason}; run `wandb login`, or set WANDB_MODE=offline.") from error
        id_file.write_text(self.run.id)
        self.note, self.starting_step, self.video = note, self.run.starting_step, wandb.Video
        self.rows: queue.SimpleQueue = queue.SimpleQueue()  # and None at the end
        self.num_rows, self.num_sent, self.exit_code, self.fault = 0, 0, 0, ""
        self.thread = threading.Thread(target=self._send_all, daemon=True)
        self.thread.start()

    def send(self, number: int, row: dict[str, float], video: Path | None) -> None:
        """Put a row in the queue, with its number in metrics.csv and, if there is one, its film."""
        self.num_rows += 1
        self.rows.put((number, row, video))

    def _send_all(self) -> None:
        try:
            for number, row, video in iter(self.rows.get, None):
                film = {} if video is None else {"videos/evaluation": self.video(str(video), format="mp4")}
                self.run.log(row | film, step=number)
                self.num_sent += 1
            self.run.finish(exit_code=self.exit_code)
        except Exception as error:
            self.fault = one_line(error)

    def finish(self, failed: bool) -> None:
        """Wait a while for what is not sent yet, and say how much was sent where that was not all."""
        self.exit_code = int(failed)
        self.rows.put(None)
        self.thread.join(LAST_WAIT[failed])
        if self.thread.is_alive():
            self.fault = f"it did not answer for {LAST_WAIT[failed]:g} seconds"
            atexit.register(end_now, 0)  # before wandb's own, which would wait on; other ends than this do so anyway
        if self.fault:
            sent = f"wandb was handed {self.num_sent} of {self.num_rows} rows ({self.fault}); metrics.csv has all"
            self.note(f"--track: {sent}, and `wandb sync {Path(self.run.dir).parent}` sends what it was handed.")


class TensorBoard:
    """Files in `tensorboard` in the run directory, for `tensorboard --logdir`; a resumed run writes them anew.

    Where they cannot be written, `note` says so once, and no more is written. Raises `BadInput` (--tensorboard) where
    the package is missing.
    """

    starting_step = 0  # rows that are there already

    def __init__(self, folder: Path, resumed: bool, note: Note) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise BadInput("--tensorboard: needs tensorboard: pip install tensorboard") from error
        for path in (folder / "tensorboard").glob("*.lockstep") if resumed else ():
            path.unlink()
        self.note, self.failed = note, False
        self.writer = SummaryWriter(folder / "tensorboard", filename_suffix=".lockstep")

    def send(self, number: int, row: dict[str, float], video: Path | None) -> None:
        """Write a row at its step."""
        for name, value in row.items():
            self._call(self.writer.add_scalar, name, value, int(row["global_step"]))

    def finish(self, failed: bool) -> None:
        self._call(self.writer.close)

    def _call(self, function: Callable[..., None], *values: Any) -> None:
        try:
            if not self.failed:
                function(*values)
        except Exception as error:  # of a full disk, in a thread of its own
            self.failed = True
            self.note(f"--tensorboard: cannot be written ({error}); metrics.csv goes on")
