"""Checkpoints: a killed run goes on, on any number of processes, and ends in the bytes of one that never stopped.

A simulator cannot be saved in general. So a checkpoint also ends all running episodes, as truncations, and every
environment starts anew from a seed of its own for each checkpoint; an undisturbed run does the same, so that "go on"
and "never stopped" are one program. `checkpoints/{global_step}` in the run directory holds state.pt (what is equal on
all ranks) and a file for each shard of a replay buffer. It gets its name when it is complete.
"""

from __future__ import annotations

import io
import math
import pickle
import secrets
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.distributed import World
from common.errors import BadInput, Fault, flag, one_line, require
from common.run.arguments import RunArgs
from common.run.logger import Logger, for_model, write_flushed, write_whole
from common.run.record import changes
from common.state import restore, state_of

ERRORS = (OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError)  # of `read`
read = partial(torch.load, map_location="cpu", weights_only=True)


class Checkpoints:
    """Writes checkpoints and keeps the newest two; with --resume, reads the newest at once.

    `state`: modules, optimisers, generators, tensors and what has `state_dict`, equal on all ranks; `replay`: a
    `ReplayBuffer`, of which each rank has its part; `ends`: by flag, the step at which a schedule ends. Every rank
    makes one, inside the process group. Attributes: `global_step` and `number` (1, 2, ...) of the last checkpoint, 0
    before the first. Raises `BadInput`, naming the flag, if the run cannot go on, and `SystemExit` with code 0 if it is
    finished.
    """

    def __init__(
        self, args: RunArgs, world: World, logger: Logger, state: Mapping[str, Any], replay: Any, ends: dict[str, float]
    ) -> None:
        self.args = args
        self.world = world
        self.logger = logger
        self.replay = replay
        self.state = {**state, "logger": logger, "torch": torch.default_generator}
        if replay is not None:
            self.state["replay"] = replay
        self.global_step = 0
        self.number = 0
        self.newest: list[str] = []  # the names of the two that stay
        self.failed: list[int] = []  # the steps of those that could not be written
        if not args.checkpoint_every:
            return
        # three ranks' numbers are added in an order that moves with DDP's buckets, which each start lays out anew
        needed = f"set with --checkpoint-every on {world.world_size} processes, to 4, 8, ..."
        require(world.sharded or world.world_size <= 2, "--shards", args.shards, needed)
        run_dir, name = from_rank_0(world, self._find)  # collective
        self.dir = run_dir / "checkpoints"
        if not all(world.gather_objects(run_dir.exists())):  # collective
            raise BadInput(f"--run-dir {run_dir}: is not there for all ranks; checkpoints need a shared file system.")
        if name == "finished":
            logger.note(f"{run_dir} holds the finished run: nothing is left to do")
            raise SystemExit(0)
        if name:
            self._read(self.dir / name, ends)

    def _find(self) -> tuple[Path, str]:
        """Rank 0: the run directory, and the name of the checkpoint that is to be read, "finished", or nothing."""
        logger = self.logger
        run_dir = logger.dir.absolute()
        if logger.finished:
            return run_dir, "finished"
        folders = [*(run_dir / "checkpoints").glob("*")] if logger.resumed else []
        for part in (folder for folder in folders if folder.suffix == ".part"):  # which may fill the disk
            shutil.rmtree(part, ignore_errors=True)
        for step in sorted((int(folder.name) for folder in folders if folder.name.isdigit()), reverse=True):
            path = run_dir / "checkpoints" / str(step) / "state.pt"
            try:
                damaged = zipfile.ZipFile(path).testzip()  # against its CRCs, which torch does not look at
            except (*ERRORS, zipfile.BadZipFile) as error:
                damaged = error
            if not damaged:
                return run_dir, str(step)
            logger.note(f"{path} is missing or damaged ({damaged}): looking for an older checkpoint")
        if logger.resumed and logger.longer:
            fault = f"{run_dir} holds no checkpoint from which a longer run could go on"
            raise BadInput(f"--total-timesteps {self.args.total_timesteps}: {fault}; name another --run-dir.")
        return run_dir, ""

    def _read(self, folder: Path, ends: dict[str, float]) -> None:
        """Go on from a checkpoint. Every rank must call."""
        state = read(folder / "state.pt")
        about = state["checkpoint"]
        self.global_step = about["global_step"]
        self.number = about["number"]
        self.newest = [folder.name]
        total = self.args.total_timesteps
        planned = about["record"]["args"]["total_timesteps"]
        for name, end in ends.items():
            needed = f"{planned} to go on with {folder}, because {flag(name)} changes until transition {math.ceil(end)}"
            require(total == planned or end <= self.global_step, "--total-timesteps", total, needed)
        for name, value in self.state.items():
            restore(value, state[name])
        if self.replay is not None:
            self._read_replay(folder)
        self.logger.note(f"going on from {folder}")
        if self.logger.enabled:
            if changed := changes(about["record"], self.logger.record):
                self.logger.continued(self.global_step, "no longer the same bytes as without a stop", changed)
            if total != planned:
                budgets = f"total_timesteps {total}, before {planned}"
                self.logger.continued(self.global_step, "longer than it was to be", [budgets])

    def _memory(self, index: int) -> Iterator[memoryview]:
        """The memory of one of this rank's shards of the replay buffer."""
        for array in self.replay.pieces(index):
            yield memoryview(array.reshape(-1).view(np.uint8))
            self.world.watchdog.feed()

    def _read_replay(self, folder: Path) -> None:
        for index, shard in enumerate(self.world.shards):
            path = folder / f"replay-{shard}"
            with open(path, "rb") as file:
                if not all(file.readinto(piece) == len(piece) for piece in self._memory(index)) or file.read(1):
                    raise Fault(f"{path}: is not of the size that was written; remove {folder}, and start again.")

    def _write_replay(self, folder: Path) -> None:
        for index, shard in enumerate(self.world.shards):
            write_flushed(folder / f"replay-{shard}", self._memory(index))

    def _write_state(self, folder: Path) -> None:
        state = {name: state_of(value) for name, value in self.state.items()}
        about = {"global_step": self.global_step, "number": self.number, "record": self.logger.record}
        content = io.BytesIO()
        torch.save(state | {"checkpoint": about}, content)
        write_flushed(folder / "state.pt", [content.getbuffer()])

    def write(self, global_step: int) -> None:
        """Write a checkpoint, after which all environments are to start anew; if it fails, say so and go on.

        Every rank must call.
        """
        self.global_step = global_step
        self.number += 1
        # under a name of its own: ranks of a killed attempt that are still there do not write into it
        folder = self.dir / self.world.gather_objects(f"{global_step}.{secrets.token_hex(4)}.part")[0]  # collective
        fault = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.replay is not None:
                self._write_replay(folder)
            if self.logger.enabled:
                self._write_state(folder)
        except OSError as error:
            fault = error.strerror
        faults = [x for x in self.world.gather_objects(fault) if x]  # collective
        if self.logger.enabled:
            complete = self.dir / str(global_step)
            if faults:
                shutil.rmtree(folder, ignore_errors=True)
                self.failed.append(global_step)
                self.logger.note(f"{complete}: cannot be written ({faults[0]}); the run goes on with those it has")
                return
            shutil.rmtree(complete, ignore_errors=True)  # one that could not be read
            folder.rename(complete)
            self.newest = [*self.newest, complete.name][-2:]
            for other in self.dir.iterdir():
                if other.name not in self.newest:
                    shutil.rmtree(other, ignore_errors=True)

    def finish(self) -> None:
        """After the last row: say what could not be written; mark the run as finished, unless a signal ended it."""
        if self.args.checkpoint_every and self.logger.enabled:
            if self.failed:
                fault = f"{len(self.failed)} checkpoints could not be written, the last at step {self.failed[-1]}"
                self.logger.note(f"{self.dir}: {fault}")
            if not self.world.stop:
                write_whole(self.logger.dir / "finished", b"")


def load_model(args: RunArgs, world: World, state: Mapping[str, Any], logger: Logger) -> None:
    """Give networks and normalisers in `state` the values of --load-model, which rank 0 reads.

    A run that goes on from a checkpoint has them already. Raises `BadInput`, naming the flag and the value to repeat,
    for a file that cannot be read or does not fit. Every rank must call.
    """
    path = args.load_model
    model = from_rank_0(world, partial(read_model, path))  # collective
    trained = model["args"]
    for name in ("network", "dueling", "norm_obs", "norm_reward"):
        if name in trained and hasattr(args, name):
            value = getattr(args, name)
            require(value == trained[name], flag(name), value, f"{trained[name]} with --load-model {path}")
    hint = ""
    for name in ("env_id", "env_kwargs"):
        if getattr(args, name) != trained[name]:
            hint += f"{flag(name)} is {getattr(args, name)}, and was {trained[name]} there; "
    try:
        for name, value in for_model(state).items():
            if not isinstance(value, torch.Tensor) or value.requires_grad:
                restore(value, model.get(name, {}))
    except (RuntimeError, LookupError, TypeError) as error:
        fault = f"{hint}{one_line(error)}"
        raise BadInput(f"--load-model {path}: {fault} It must be of the same script, --env-id and networks.") from error
    if hint:
        logger.note(f"{path}: {hint}its networks fit")


def read_model(path: str) -> dict[str, Any]:
    """The content of a model.pt. Raises `BadInput` (--load-model) if it is none."""
    reason = "no model.pt"
    try:
        model = read(path)
        if isinstance(model, dict) and "args" in model:
            return model
    except ERRORS as error:
        reason = getattr(error, "strerror", None) or reason
    raise BadInput(f"--load-model {path}: cannot be read ({reason}).")


def from_rank_0(world: World, function: Callable[[], Any]) -> Any:
    """What `function` returns on rank 0, on every rank; or the `BadInput` that it raises there."""
    value = None
    if world.rank == 0:
        try:
            value = function()
        except BadInput as error:
            value = error
    value = world.gather_objects(value)[0]  # collective
    if isinstance(value, BadInput):
        raise value
    return value
