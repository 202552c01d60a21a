"""Where rows of metrics.csv go too: `--track` (wandb) and `--tensorboard`. For rank 0's `Logger`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import BadInput, one_line
from common.run.arguments import RunArgs
from common.run.record import source_files


class Wandb:
    """A wandb run, whose own service sends the rows. Its id is stored in the run directory.

    `resumed`: whether the rows of metrics.csv continue those of the run with that id.
    Raises `BadInput` (--track) if wandb does not begin.
    """

    def __init__(
        self,
        args: RunArgs,
        file: Path,
        run_dir: Path,
        environment: Mapping[str, Any],
        resumed: bool,
    ) -> None:
        script = file.stem
        id_file = run_dir / "wandb_id"
        run_id = id_file.read_text() if resumed and id_file.exists() else None
        try:
            import wandb

            self.run = wandb.init(
                id=run_id,
                resume="allow" if run_id else None,
                project=args.wandb_project_name,
                entity=args.wandb_entity,
                name=run_dir.name,
                group=f"{args.env_id}__{script}",  # the seeds of one experiment
                tags=[script, f"processes-{environment['world_size']}"],
                config=args.as_json() | environment,
                settings=wandb.Settings(finish_timeout=10.0),  # seconds; `wandb sync` sends the rest
            )
        except Exception as error:  # wandb's own, and those of its settings
            advice = "run `wandb login`, or set WANDB_MODE=offline"
            raise BadInput(f"--track: {one_line(error)}; {advice}.") from error
        id_file.write_text(self.run.id)
        self.run.define_metric("*", step_metric="global_step")
        self.run.define_metric("eval/episodic_return", step_metric="global_step", summary="max,last")
        source = wandb.Artifact(f"source-{script}", type="source")
        for name, path in source_files(file).items():
            source.add_file(str(path), name=name)
        self.run.log_artifact(source)
        self.video = wandb.Video

    def send(self, number: int, row: dict[str, float], film: Path | None) -> None:
        """Send a row, with its number in metrics.csv and, if there is one, its film."""
        if number >= self.run.starting_step:  # wandb has the rows before
            films = {} if film is None else {"videos/evaluation": self.video(str(film), format="mp4")}
            self.run.log(row | films, step=number)

    def finish(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class TensorBoard:
    """Files in `tensorboard` in the run directory. A resumed run writes all its rows anew."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(run_dir / "tensorboard", purge_step=0)

    def send(self, number: int, row: dict[str, float], film: Path | None) -> None:
        """Write a row at its step."""
        for name, value in row.items():
            self.writer.add_scalar(name, value, int(row["global_step"]))

    def finish(self, failed: bool) -> None:
        self.writer.close()
