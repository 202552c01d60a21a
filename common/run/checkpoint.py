"""Checkpoints: a killed run goes on, on any number of processes, and ends in the bytes of one that never stopped.

A simulator cannot be saved in general. So a checkpoint also ends all running episodes, as truncations, and all
environments start anew from other seeds, in an undisturbed run too: "go on" and "never stopped" are one program.
`checkpoints/{global_step}` in the run directory holds state.pt (what is equal on all ranks) and a file for each shard
of a replay buffer. It gets its name when it is complete.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.distributed import World
from common.errors import BadInput, Fault, flag, one_line, require
from common.run.arguments import RunArgs
from common.run.logger import Logger, for_model
from common.run.record import changes
from common.state import restore, state_of

load = partial(torch.load, map_location="cpu", weights_only=True)


class Checkpoints:
    """Writes checkpoints and keeps the newest two.

    `state`: modules, optimisers, generators, tensors and what has `state_dict`, equal on all ranks;
    `replay`: a `ReplayBuffer`, of which each rank has its part. Every rank makes one.
    Raises `BadInput`, naming the flag, on a number of processes whose sums come in another order after each start.
    """

    def __init__(self, args: RunArgs, world: World, logger: Logger, state: Mapping[str, Any], replay: Any) -> None:
        self.args = args
        self.world = world
        self.logger = logger
        self.replay = replay
        self.state = {**state, "logger": logger, "torch": torch.default_generator}
        if replay is not None:
            self.state["replay"] = replay
        # three ranks' numbers are added in an order that moves with DDP's buckets, which each start lays out anew
        size = world.world_size
        needed = f"0 on {size} processes, which are no power of two"
        require(size.bit_count() == 1, "--checkpoint-every", args.checkpoint_every, needed)
        needed = f"set with --checkpoint-every on {size} processes, to {size}, {2 * size}, ..."
        require(world.sharded or size <= 2, "--shards", args.shards, needed)

    def read_newest(self, ends: dict[str, float]) -> tuple[int, int]:
        """With --resume, go on from the newest checkpoint -> its `global_step` and number; 0, 0 if there is none.

        `ends`: by flag, the step at which a schedule ends. Raises `BadInput`, naming the flag, if the run
        cannot go on, and `SystemExit` with code 0 if it is finished. Every rank must call.
        """
        run_dir, name = self.world.gather_objects(self._find() if self.logger.enabled else None)[0]  # collective
        self.dir = run_dir / "checkpoints"
        if not all(self.world.gather_objects(run_dir.exists())):  # collective
            raise BadInput(f"--run-dir {run_dir}: is not there for all ranks; checkpoints need a shared file system.")
        if name == "finished":
            self.logger.note(f"{run_dir} holds the finished run: nothing is left to do")
            raise SystemExit(0)
        return self._read(self.dir / name, ends) if name else (0, 0)

    def _find(self) -> tuple[Path, str]:
        """Rank 0: the run directory, and the name of the checkpoint to read, "finished", or nothing."""
        logger = self.logger
        run_dir = logger.dir.absolute()
        if logger.finished:
            return run_dir, "finished"
        if not logger.resumed:
            return run_dir, ""
        folders = (run_dir / "checkpoints").glob("*")
        steps = sorted((int(folder.name) for folder in folders if folder.name.isdigit()), reverse=True)
        for step in steps:
            folder = run_dir / "checkpoints" / str(step)
            try:
                load(folder / "state.pt")
                for shard in range(self.world.num_shards if self.replay is not None else 0):
                    load(folder / f"replay-{shard}", mmap=True)
                return run_dir, str(step)
            except Exception as error:  # torch raises many kinds
                logger.note(f"{folder}: cannot be read ({one_line(error)}); looking for an older checkpoint")
        if steps:
            raise BadInput(f"--resume: {run_dir} holds no checkpoint that can be read; name another --run-dir.")
        if logger.longer:
            fault = f"{run_dir} holds no checkpoint from which a longer run could go on"
            raise BadInput(f"--total-timesteps {self.args.total_timesteps}: {fault}; name another --run-dir.")
        return run_dir, ""

    def _read(self, folder: Path, ends: dict[str, float]) -> tuple[int, int]:
        state = load(folder / "state.pt")
        about = state["checkpoint"]
        global_step = about["global_step"]
        total = self.args.total_timesteps
        planned = about["record"]["args"]["total_timesteps"]
        for name, end in ends.items():
            needed = f"{planned} to go on with {folder}, because {flag(name)} changes until transition {math.ceil(end)}"
            require(total == planned or end <= global_step, "--total-timesteps", total, needed)
        for name, value in self.state.items():
            try:
                restore(value, state[name])
            except Fault:  # the logger's
                raise
            except (RuntimeError, LookupError, ValueError) as error:  # of a network that was edited, say
                fault = f"does not fit what this script registers as {name} ({one_line(error)})"
                raise BadInput(f"--run-dir {folder}: {fault}; name another.") from error
        if self.replay is not None:
            for index, shard in enumerate(self.world.shards):
                self.replay.load_shard(index, load(folder / f"replay-{shard}", mmap=True))
                self.world.watchdog.feed()
        self.logger.note(f"going on from {folder}")
        if self.logger.enabled:
            if changed := changes(about["record"], self.logger.record):
                self.logger.continued(global_step, "no longer the same bytes as without a stop", changed)
            if total != planned:
                budgets = f"total_timesteps {total}, before {planned}"
                self.logger.continued(global_step, "longer than it was to be", [budgets])
        return global_step, about["number"]

    def write(self, global_step: int, number: int) -> None:
        """Write a checkpoint, after which all environments are to start anew; if it fails, say so and go on.

        `number`: how many there were, with this one. Every rank must call.
        """
        folder = self.dir / f"{global_step}.part"
        fault = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.replay is not None:
                for index, shard in enumerate(self.world.shards):
                    save(folder / f"replay-{shard}", self.replay.shard_state(index))
                    self.world.watchdog.feed()
            if self.logger.enabled:
                state = {name: state_of(value) for name, value in self.state.items()}
                about = {"global_step": global_step, "number": number, "record": self.logger.record}
                save(folder / "state.pt", state | {"checkpoint": about})
        except (OSError, RuntimeError) as error:  # torch raises its own for a full disk's
            fault = one_line(error if isinstance(error, OSError) else error.__context__ or error)
        faults = [x for x in self.world.gather_objects(fault) if x]  # collective
        if not self.logger.enabled:
            return
        complete = self.dir / str(global_step)
        if faults:
            shutil.rmtree(folder, ignore_errors=True)
            self.logger.note(f"{complete}: cannot be written ({faults[0]}); the run goes on with those it has")
            return
        shutil.rmtree(complete, ignore_errors=True)  # one that could not be read
        folder.rename(complete)
        steps = [int(x.name) for x in self.dir.iterdir() if x.name.isdigit()]
        newest = sorted(step for step in steps if step <= global_step)[-2:]
        for other in self.dir.iterdir():
            written_here = other.name.removesuffix(".part").isdigit()
            if written_here and other.name not in map(str, newest):
                shutil.rmtree(other, ignore_errors=True)


def save(path: Path, value: Any) -> None:
    """Write a nest of tensors and flush it to the disk."""
    with open(path, "wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def read_model(path: str) -> dict[str, Any]:
    """The content of a model.pt. Raises `BadInput` (--load-model) if it is none."""
    try:
        model = load(path)
        return {"args": model["args"]} | model
    except Exception as error:
        reason = getattr(error, "strerror", None) or "no model.pt"
        raise BadInput(f"--load-model {path}: cannot be read ({reason}).") from error


def load_model(args: RunArgs, world: World, state: Mapping[str, Any], logger: Logger) -> None:
    """Give networks and normalisers in `state` the values of --load-model, which rank 0 reads.

    Raises `BadInput`, naming the flag and the value to repeat, for a file that cannot be read or does not fit.
    Every rank must call.
    """
    path = args.load_model
    model = world.gather_objects(read_model(path) if logger.enabled else None)[0]  # collective
    trained = model["args"]
    for name in ("network", "dueling", "scale_pixels", "norm_obs", "norm_reward"):
        if name in trained and hasattr(args, name):
            value = getattr(args, name)
            require(value == trained[name], flag(name), value, f"{trained[name]} with --load-model {path}")
    try:
        for name, value in for_model(state).items():
            if not isinstance(value, torch.Tensor) or value.requires_grad:
                restore(value, model.get(name, {}))
    except (RuntimeError, LookupError, TypeError) as error:
        fault = f"{one_line(error)} It must be of the same script, --env-id and networks"
        raise BadInput(f"--load-model {path}: {fault}; it is of {trained['env_id']}.") from error
    if args.env_id != trained["env_id"]:
        logger.note(f"{path} was trained on {trained['env_id']}; its networks fit")
