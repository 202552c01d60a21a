"""Checkpoints: a killed run goes on, on any number of processes, to the bytes of one that never stopped.

Simulators cannot be saved in general. So at a checkpoint all running episodes are truncated, and all
environments start anew from other seeds. `checkpoints/{global_step}` holds state.pt (what is equal on all
ranks) and a file for each shard of a replay buffer, and gets its name when it is complete.
"""

import shutil
from functools import partial
from typing import Any

import numpy as np
import torch

from common.arguments import RunArgs
from common.logger import Logger, write_whole
from common.processes import BadInput, World, one_line
from common.tensors import for_model, restore, state_of


class Checkpoints:
    """Writes checkpoints and keeps the newest two. `state`: equal on all ranks; `replay`: a buffer, or None."""

    def __init__(self, world: World, logger: Logger, state: dict[str, Any], replay: Any) -> None:
        self.world = world
        self.logger = logger
        self.replay = replay
        self.shards = range(0) if replay is None else world.shards
        self.state = {**state, "torch": torch.default_generator}
        if world.world_size > 2 and not world.sharded:
            # three ranks' sums depend on DDP's buckets, which each start lays out anew
            raise BadInput(f"--shards: must be set with --checkpoint-every on {world.world_size} processes.")
        self.dir = world.gather_objects(logger.dir)[0] / "checkpoints"  # collective: rank 0's
        if not all(world.gather_objects(self.dir.parent.exists())):  # collective
            raise BadInput(f"--run-dir {self.dir.parent}: must be on a file system that all ranks share.")

    def read_newest(self) -> dict[str, Any]:
        """Go on from the newest checkpoint that can be read, if there is one -> what it says of the run."""
        steps = sorted((int(path.name) for path in self.dir.glob("*") if path.name.isdecimal()), reverse=True)
        steps = self.world.gather_objects(steps)[0]  # collective
        for step in steps:
            folder = self.dir / str(step)
            fault = ""
            try:
                saved = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
                for index, shard in enumerate(self.shards):
                    with np.load(folder / f"replay-{shard}") as arrays:
                        self.replay.load_shard(index, arrays, saved["replay"])
                    self.world.feed()
            except Exception as error:  # torch and numpy raise many kinds
                fault = one_line(f"{type(error).__name__}: {error}")
            faults = [x for x in self.world.gather_objects(fault) if x]  # collective
            if not faults:
                restore(self.state, saved, f"--run-dir {folder}")
                self.logger.note(f"going on from {folder}")
                return saved["run"]
            self.logger.note(f"{folder}: cannot be read ({faults[0]}); looking for an older checkpoint")
        if steps:
            raise BadInput(f"--resume: no checkpoint in {self.dir} can be read; name another --run-dir.")
        return {}

    def write(self, global_step: int, number: int) -> None:
        """Write the checkpoint of this number; if that fails, say so and go on."""
        if self.replay is not None:
            self.replay.cut()  # collective
        folder = self.dir / str(global_step)
        part = self.dir / f"{global_step}.part"
        fault = ""
        try:
            part.mkdir(parents=True, exist_ok=True)
            for index, shard in enumerate(self.shards):
                arrays = self.replay.shard_state(index)
                write_whole(part / f"replay-{shard}", lambda file, arrays=arrays: np.savez(file, **arrays))
                self.world.feed()
            if self.world.rank == 0:
                saved = {name: state_of(value) for name, value in self.state.items()}
                run = {"global_step": global_step, "num_checkpoints": number, "logger": self.logger.state()}
                saved |= {"run": run, "replay": state_of(self.replay)}
                write_whole(part / "state.pt", partial(torch.save, saved))
        except (OSError, RuntimeError) as error:  # torch raises its own for a full disk's
            fault = one_line(error)
        faults = [x for x in self.world.gather_objects(fault) if x]  # collective
        if faults:
            shutil.rmtree(part, ignore_errors=True)
            self.logger.note(f"{folder}: cannot be written ({faults[0]}); the run goes on with those it has")
        elif self.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # one that could not be read
            part.rename(folder)
            steps = sorted(int(path.name) for path in self.dir.iterdir() if path.name.isdecimal())
            for step in steps[:-2]:
                shutil.rmtree(self.dir / str(step), ignore_errors=True)


def load_model(args: RunArgs, state: dict[str, Any]) -> None:
    """Give networks and normalisers the values of --load-model. Raises `BadInput` for what does not fit."""
    path = args.load_model
    try:
        model = torch.load(path, map_location="cpu", weights_only=True)
        trained = model["args"]
    except Exception as error:  # torch raises many kinds
        raise BadInput(f"--load-model {path}: is no model.pt of --save-model ({type(error).__name__}).") from error
    for name in ("network", "dueling", "scale_pixels", "norm_obs", "norm_reward"):
        if name in trained and hasattr(args, name):
            args.require(getattr(args, name) == trained[name], name, f"{trained[name]} with --load-model {path}")
    # a tensor that is not learned has a flag's value
    wanted = {name: x for name, x in for_model(state).items() if getattr(x, "requires_grad", True)}
    restore(wanted, model, f"--load-model {path} (of {trained['env_id']})")
