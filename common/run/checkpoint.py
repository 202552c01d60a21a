"""Checkpoints: a killed run goes on, on any number of processes, and ends in the bytes of one that never stopped.

A simulator cannot be saved in general. So a checkpoint also ends all episodes, as truncations, and every environment
starts anew from a seed of its own for each checkpoint; a run that is never disturbed does the same, so that "go on" and
"never stopped" are one program. `checkpoints/{global_step}` in the run directory holds state.pt (what is equal on all
ranks), a file for each shard of a replay buffer, and a manifest with a digest of each file, which comes last: what has
no whole manifest does not count.
"""

from __future__ import annotations

import io
import json
import math
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.distributed import World
from common.errors import BadInput, Fault, flag, require
from common.run.arguments import OF_MODEL, RunArgs
from common.run.files import CHUNK, digest_of, flush_names, read_model, size_and_digest, write_flushed, write_whole
from common.run.logger import Logger, for_model
from common.run.record import MACHINE, machine, require_same_run
from common.state import leaves, restore, state_of

VERSION = 1  # of these files


class Checkpoints:
    """Writes checkpoints and keeps the newest two; with --resume, reads the newest whole one at once.

    `state`: modules, optimisers, generators, tensors and what has `state_dict`, equal on all ranks; `replay`: a
    `ReplayBuffer`, of which each rank has its part; `ends`: by flag, the step at which a schedule ends. Every rank
    makes one, inside the process group. Attributes: `global_step` and `number` (1, 2, ...) of the last checkpoint, 0
    before the first. Raises `BadInput`, naming the flag, where the run cannot go on, and `SystemExit` with code 0 where
    it is finished.
    """

    def __init__(
        self, args: RunArgs, world: World, logger: Logger, state: Mapping[str, Any], replay: Any, ends: dict[str, float]
    ) -> None:
        self.every, self.world, self.logger, self.replay = args.checkpoint_every, world, logger, replay
        self.total_timesteps, self.ends = args.total_timesteps, ends
        self.state = {**state, "logger": logger, "torch": torch.default_generator}
        if replay is not None:
            self.state["replay"] = replay
        self.global_step, self.number = 0, 0
        self.newest: list[str] = []  # the names of the two that are to stay
        self.failed: list[int] = []  # the steps of those that could not be written
        self.seconds_alone = args.timeout / 4  # after which a rank that reads or writes meets the others
        if not self.every:
            return
        # three ranks' numbers are added in an order that moves with DDP's buckets, which each start lays out anew
        needed = f"set with --checkpoint-every on {world.world_size} processes, to 4, 8, ..."
        require(world.sharded or world.world_size <= 2, "--shards", args.shards, needed)
        run_dir, manifests, longer = from_rank_0(world, self._find)  # collective
        self.dir = run_dir / "checkpoints"
        if not all(world.gather_objects((run_dir / "config.json").exists())):  # collective
            raise BadInput(f"--run-dir {run_dir}: is not there for all ranks; checkpoints need a shared file system.")
        if manifests is None:
            logger.note(f"{run_dir} holds the finished run: nothing is left to do")
            raise SystemExit(0)
        for manifest in manifests:
            faults = self._gather_when_done(self._fault(manifest))  # collective
            if not any(faults):
                self._read(manifest)  # collective
                return
            logger.note(f"{next(filter(None, faults))}: looking for an older checkpoint")
        if longer:
            fault = f"{run_dir} holds no whole checkpoint from which a longer run could go on"
            raise BadInput(f"--total-timesteps {args.total_timesteps}: {fault}; name another --run-dir.")
        if logger.enabled and logger.resumed:
            logger.note(f"{run_dir} holds no whole checkpoint: the run begins again")
            logger.begin()

    def _find(self) -> tuple[Path, list[dict[str, Any]] | None, bool]:
        """Rank 0: the run directory; its manifests, the newest first, None of a finished run; if it gets longer."""
        run_dir, logger, manifests = self.logger.dir.absolute(), self.logger, []
        if logger.finished:
            return run_dir, None, False
        found = (run_dir / "checkpoints").glob("*") if logger.resumed else ()
        for folder in sorted((x for x in found if x.name.isdigit()), key=lambda x: int(x.name), reverse=True):
            try:
                manifest = json.loads((folder / "manifest.json").read_bytes())
                if manifest.pop("digest") != digest_of(manifest):
                    raise ValueError
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                logger.note(f"{folder / 'manifest.json'} is missing or damaged: looking for an older one")
                continue
            if manifest["version"] > VERSION:
                raise BadInput(f"--resume: {folder} was written by newer code; go on with that.")
            require_same_run(folder, manifest["record"], logger.record)
            now, before = list(logger.columns), manifest.get("columns", list(logger.columns))
            if now != before:
                name = min({*now} ^ {*before}, default="their order")
                fault = f"{folder} was written with other columns of metrics.csv ({name})"
                raise BadInput(f"--run-dir: {fault}; name another, or change COLUMNS back.")
            manifests.append(manifest)
        for part in (run_dir / "checkpoints").glob("*.part"):  # of a killed attempt, which may fill the disk
            shutil.rmtree(part, ignore_errors=True)
        return run_dir, manifests, logger.resumed and logger.longer

    def _replay_files(self, folder: Path) -> Iterator[tuple[Path, Iterator[memoryview]]]:
        """This rank's files of the replay buffer, one for each shard, and the memory that each holds."""
        for index, shard in enumerate(self.world.shards if self.replay is not None else ()):
            pieces = (memoryview(array.reshape(-1).view(np.uint8)) for array in self.replay.pieces(index))
            yield folder / f"replay-{shard}", self._chunks(pieces)

    def _chunks(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """The pieces of a file, none larger than `CHUNK`. Every rank must call `_gather_when_done` afterwards.

        The ranks meet at its beginning and while it takes long: the watchdog of a rank that waits must not end it.
        """
        deadline = 0.0
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                if time.monotonic() > deadline:
                    self.world.gather_objects((False, None))  # collective
                    deadline = time.monotonic() + self.seconds_alone
                yield piece[start : start + CHUNK]

    def _gather_when_done(self, value: Any) -> list[Any]:
        """Gather a value from every rank, once the slowest has read or written its chunks."""
        while True:
            table = self.world.gather_objects((True, value))  # collective
            if all(done for done, _ in table):
                return [value for _, value in table]

    def _fault(self, manifest: dict[str, Any]) -> str:
        """What is wrong with a file that this rank reads; empty where nothing is."""
        folder = self.dir / str(manifest["global_step"])
        for path in [folder / "state.pt", *(path for path, _ in self._replay_files(folder))]:
            try:
                with open(path, "rb") as file:
                    found = size_and_digest(self._chunks(iter(partial(file.read, CHUNK), b"")))
            except OSError as error:
                return f"{path} cannot be read ({error.strerror})"
            if list(found) != manifest["files"][path.name]:
                return f"{path} is damaged"
        return ""

    def _read(self, manifest: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.global_step, self.number = manifest["global_step"], manifest["number"]
        folder, budget = self.dir / str(self.global_step), manifest["record"]["args"]["total_timesteps"]
        for name, end in self.ends.items():
            needed = f"{budget} to go on with {folder}, because {flag(name)} changes until transition {math.ceil(end)}"
            passed = self.total_timesteps == budget or end <= self.global_step
            require(passed, "--total-timesteps", self.total_timesteps, needed)
        self.newest = [folder.name]
        saved = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        for name, value in self.state.items():
            restore(value, saved[name])
        for path, memory in self._replay_files(folder):
            with open(path, "rb") as file:
                for chunk in memory:
                    file.readinto(chunk)
        self._gather_when_done(None)  # collective
        self.logger.note(f"going on from {folder}")
        if self.logger.enabled:
            before, now = machine(manifest["record"]), machine(self.logger.record)
            changes = [f"{name} {x}, before {before.get(name)}" for name, x in now.items() if x != before.get(name)]
            if changes:
                self.logger.continued(self.global_step, "no longer the same bytes as without a stop", changes)
            if self.total_timesteps != budget:
                budgets = f"total_timesteps {self.total_timesteps}, before {budget}"
                self.logger.continued(self.global_step, "longer than it was to be", [budgets])

    def write(self, global_step: int) -> None:
        """Write a checkpoint, after which all environments are to start anew; where it fails, say so and go on.

        Every rank must call.
        """
        self.global_step, self.number = global_step, self.number + 1
        # under a name that is its own: ranks of a killed attempt that are still there do not write into it
        folder = self.dir / self.world.gather_objects(f"{global_step}.{secrets.token_hex(4)}.part")[0]  # collective
        files, fault = {}, ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path, memory in self._replay_files(folder):
                files[path.name] = write_flushed(path, memory)
            if self.logger.enabled:
                content = io.BytesIO()
                torch.save({name: state_of(value) for name, value in self.state.items()}, content)
                files["state.pt"] = write_flushed(folder / "state.pt", self._chunks([content.getbuffer()]))
        except OSError as error:
            fault = error.strerror
        parts = self._gather_when_done((files, fault))  # collective
        if self.logger.enabled:
            try:
                if faults := [fault for _, fault in parts if fault]:
                    raise OSError(0, faults[0])
                self._publish(folder, {name: x for files, _ in parts for name, x in files.items()})
            except OSError as error:
                shutil.rmtree(folder, ignore_errors=True)
                self.failed.append(global_step)
                fault = f"{self.dir / str(global_step)}: cannot be written ({error.strerror})"
                self.logger.note(f"{fault}; the run goes on with the checkpoints it has")

    def _publish(self, folder: Path, files: dict[str, tuple[int, str]]) -> None:
        """Write the manifest, give the folder its name, remove all but the newest two checkpoints."""
        record = {name: self.logger.record[name] for name in ("script", "args", "world_size", *MACHINE)}
        manifest = {"version": VERSION, "global_step": self.global_step, "number": self.number}
        manifest |= {"files": files, "record": record, "columns": self.logger.columns}
        manifest["digest"] = digest_of(manifest)
        write_flushed(folder / "manifest.json", [json.dumps(manifest).encode()])
        flush_names(folder)
        whole = self.dir / str(self.global_step)
        shutil.rmtree(whole, ignore_errors=True)  # a damaged one
        folder.rename(whole)
        flush_names(self.dir)
        self.newest = [*self.newest, whole.name][-2:]
        for other in self.dir.iterdir():
            if other.name not in self.newest:
                shutil.rmtree(other, ignore_errors=True)

    def finish(self) -> None:
        """After the last row: say what could not be written; mark the run as finished, unless a signal ended it."""
        if not self.every or not self.logger.enabled:
            return
        if self.failed:
            steps = ", ".join(map(str, self.failed[:3])) + (", ..." if len(self.failed) > 3 else "")
            self.logger.note(f"{self.dir}: {len(self.failed)} checkpoints could not be written ({steps})")
        if not self.world.stop:
            try:
                write_whole(self.logger.dir / "finished", b"")
            except Fault as fault:
                self.logger.note(f"{fault} --resume would repeat the last part.")


def load_model(args: RunArgs, world: World, state: Mapping[str, Any], logger: Logger) -> None:
    """Give networks and normalisers in `state` the values of --load-model, which rank 0 reads.

    A run that goes on from a checkpoint has them already. Raises `BadInput`, naming flag and tensor, for a file that
    cannot be read or does not fit. Every rank must call.
    """
    if args.load_model is None:
        return
    path = args.load_model
    model = from_rank_0(world, partial(read_model, path))  # collective
    state = {name: x for name, x in for_model(state).items() if not isinstance(x, torch.Tensor) or x.requires_grad}
    nests = {name: state_of(x) for name, x in state.items()}, {name: model.get(name) for name in state}
    needed, found = ({name: x for name, x in leaves(nest) if isinstance(x, torch.Tensor)} for nest in nests)
    of_both = [(x, model["args"][x], getattr(args, x)) for x in OF_MODEL if x in model["args"] and hasattr(args, x)]
    changed = [f"{flag(name)} is {now}, and {before} there; " for name, before, now in of_both if now != before]
    for name in needed | found:
        there, here = (f"of {tuple(x[name].shape)}" if name in x else "missing" for x in (found, needed))
        if there != here:
            fault = f"{''.join(changed)}{name} is {there} there, {here} here"
            raise BadInput(f"--load-model {path}: {fault}; it must be of the same script, --env-id and networks.")
    normalized = model["args"].get("norm_obs", False)
    require(getattr(args, "norm_obs", False) == normalized, "--norm-obs", not normalized, f"{normalized} with {path}")
    for change in changed:
        logger.note(f"{path}: {change}its networks fit")
    for name, value in state.items():
        restore(value, model[name])


def from_rank_0(world: World, read: Callable[[], Any]) -> Any:
    """What `read` returns on rank 0, on every rank; or the `BadInput` that it raises there."""
    found = None
    if world.rank == 0:
        try:
            found = read()
        except BadInput as error:
            found = error
    found = world.gather_objects(found)[0]  # collective
    if isinstance(found, BadInput):
        raise found
    return found
