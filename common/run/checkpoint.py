"""Checkpoints: a killed run goes on, on any number of processes, and ends in the bytes of one that never stopped.

A simulator cannot be saved in general. So a checkpoint also ends all episodes, as truncations, and every environment
starts anew from a seed of its own for each checkpoint; a run that is never disturbed does the same, so that "go on" and
"never stopped" are one program. `checkpoints/{global_step}` in the run directory holds state.pt (what is equal on all
ranks), for each shard its part of a replay buffer, and a manifest with a digest of each file, which comes last: what
has no whole manifest does not count.
"""

from __future__ import annotations

import io
import json
import pickle
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.distributed import World
from common.errors import BadInput, Fault, flag, require
from common.run.arguments import RunArgs
from common.run.files import CHUNK, digest_of, flush_names, size_and_digest, write_flushed, write_whole
from common.run.logger import Logger
from common.run.record import MACHINE, machine, require_same_run
from common.state import leaves, restore, state_of

VERSION = 1  # of these files


class Checkpoints:
    """Writes checkpoints and keeps the newest two; with --resume, reads the newest whole one at once.

    `state`: modules, optimisers, generators, tensors and what has `state_dict`, equal on all ranks; `replay`: a
    `ReplayBuffer`, of which each rank has its part. Every rank makes one, inside the process group. Attributes:
    `global_step` and `number` (1, 2, ...) of the last checkpoint, 0 before the first. Raises `BadInput`, naming the
    flag, where the run cannot go on, and `SystemExit` with code 0 where it is finished.
    """

    def __init__(
        self,
        args: RunArgs,
        world: World,
        logger: Logger,
        state: Mapping[str, Any],
        replay: Any = None,
    ) -> None:
        self.every, self.world, self.logger, self.replay = args.checkpoint_every, world, logger, replay
        self.state = {**state, "logger": logger, "torch": torch.default_generator}
        if replay is not None:
            self.state["replay"] = replay
        self.global_step, self.number, self.kept, self.failed = 0, 0, [], []
        self.patience, self.met = args.timeout / 4, time.monotonic()  # seconds between meetings, and the last one
        if not self.every:
            return
        # three ranks' numbers are added in an order that moves with DDP's buckets, which each start lays out anew
        needed = f"set with --checkpoint-every on {world.world_size} processes, to 4, 8, ..."
        require(world.sharded or world.world_size <= 2, "--shards", args.shards, needed)
        found = None
        if logger.enabled:
            try:
                found = self._look()
            except BadInput as error:
                found = error
        found = world.gather_objects(found)[0]  # collective
        if isinstance(found, BadInput):
            raise found
        run_dir, finished, manifests = found
        self.dir = run_dir / "checkpoints"
        if not all(world.gather_objects((run_dir / "config.json").exists())):  # collective
            raise BadInput(f"--run-dir {run_dir}: is not there for all ranks; checkpoints need a shared file system.")
        if finished:
            logger.send_recorded()
            logger.note(f"{run_dir} holds the finished run: nothing is left to do")
            raise SystemExit(0)
        for manifest in manifests:
            damages = self._gather_when_done(self._damage(manifest))  # collective
            if not any(damages):
                self._read(manifest)
                return
            logger.note(f"{next(filter(None, damages))}: looking for an older checkpoint")
        if logger.enabled and logger.resumed:
            logger.note(f"{run_dir} holds no whole checkpoint: the run begins again")
            logger.begin()

    def _look(self) -> tuple[Path, bool, list[dict[str, Any]]]:
        """Rank 0's: the run directory, whether the run is finished, and the manifests there, newest first."""
        run_dir, manifests = self.logger.dir.absolute(), []
        if self.logger.finished:
            return run_dir, True, []
        paths = (run_dir / "checkpoints").glob("*") if self.logger.resumed else ()
        folders = [path for path in paths if path.name.isdigit()]
        for path in sorted(folders, key=lambda path: int(path.name), reverse=True):
            try:
                manifest = json.loads((path / "manifest.json").read_bytes())
                if manifest.pop("digest") != digest_of(manifest):
                    raise ValueError
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                self.logger.note(f"{path / 'manifest.json'} is missing or damaged: looking for an older one")
                continue
            if manifest["version"] > VERSION:
                raise BadInput(f"--resume: {path} was written by newer code; go on with that.")
            require_same_run(path, manifest["record"], self.logger.record)
            now, before = list(self.logger.columns), manifest.get("columns", list(self.logger.columns))
            if now != before:
                name = next((x for x in [*now, *before] if (x in now) != (x in before)), "their order")
                fault = f"{path} was written with other columns of metrics.csv ({name})"
                raise BadInput(f"--run-dir: {fault}; name another, or change COLUMNS back.")
            manifests.append(manifest)
        for part in (run_dir / "checkpoints").glob("*.part"):  # of a killed attempt, which may fill the disk
            shutil.rmtree(part, ignore_errors=True)
        return run_dir, False, manifests

    def _names(self) -> list[str]:
        """The files that this rank reads: what is equal on all, and then its shards of a replay buffer."""
        return ["state.pt", *(f"replay-{shard}" for shard in self.world.shards if self.replay is not None)]

    def _chunks(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """The pieces, none larger than `CHUNK`. Every rank must call `_gather_when_done` afterwards.

        If the work takes long, the ranks meet in between: the watchdog of a rank that waits must not end it.
        """
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                if time.monotonic() > self.met + self.patience:
                    self.world.gather_objects((False, None))  # collective
                    self.met = time.monotonic()
                yield piece[start : start + CHUNK]

    def _gather_when_done(self, value: Any) -> list[Any]:
        """Gather a value from every rank, once the slowest is done with what it reads or writes by `_chunks`."""
        while True:
            table = self.world.gather_objects((True, value))  # collective
            self.met = time.monotonic()
            if all(done for done, _ in table):
                return [value for _, value in table]

    def _damage(self, manifest: dict[str, Any]) -> str:
        """What is wrong with a file that this rank needs; empty where nothing is."""
        for name in self._names():
            path = self.dir / str(manifest["global_step"]) / name
            try:
                with open(path, "rb") as file:
                    found = size_and_digest(self._chunks(iter(partial(file.read, CHUNK), b"")))
                if list(found) != manifest["files"][name]:
                    return f"{path} is damaged"
            except OSError as error:
                return f"{path} cannot be read ({error.strerror})"
        return ""

    def _read(self, manifest: dict[str, Any]) -> None:
        self.global_step, self.number = manifest["global_step"], manifest["number"]
        self.kept = [str(self.global_step)]
        saved = torch.load(self.dir / self.kept[0] / "state.pt", map_location="cpu", weights_only=True)
        for name, value in self.state.items():
            restore(value, saved[name])
        for shard, name in enumerate(self._names()[1:]):
            with open(self.dir / self.kept[0] / name, "rb") as file:
                for chunk in self._chunks(map(as_bytes, self.replay.pieces(shard))):
                    file.readinto(chunk)
        self._gather_when_done(None)  # collective
        self.logger.note(f"going on from {self.dir / self.kept[0]}")
        if self.logger.enabled:
            before, now = (machine(record) for record in (manifest["record"], self.logger.record))
            changes = [f"{name} {x}, before {before.get(name)}" for name, x in now.items() if x != before.get(name)]
            if changes:
                self.logger.continued(self.global_step, changes)

    def write(self, global_step: int) -> None:
        """Write a checkpoint, after which all environments are to start anew; where it fails, say so and go on.

        Every rank must call.
        """
        self.global_step, self.number = global_step, self.number + 1
        # under a name that is its own: ranks of a killed attempt that are still there do not write into it
        folder = self.dir / self.world.gather_objects(f"{global_step}.{secrets.token_hex(4)}.part")[0]  # collective
        files, fault, self.met = {}, "", time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for shard, name in enumerate(self._names()[1:]):
                files[name] = write_flushed(folder / name, self._chunks(map(as_bytes, self.replay.pieces(shard))))
            if self.logger.enabled:
                content = io.BytesIO()
                torch.save({name: state_of(value) for name, value in self.state.items()}, content)
                files["state.pt"] = write_flushed(folder / "state.pt", self._chunks([content.getbuffer()]))
        except OSError as error:
            fault = error.strerror
        parts = self._gather_when_done((files, fault))  # collective
        if self.logger.enabled:
            try:
                for _, fault in parts:
                    if fault:
                        raise OSError(0, fault)
                self._publish(folder, {name: x for files, _ in parts for name, x in files.items()})
            except OSError as error:
                shutil.rmtree(folder, ignore_errors=True)
                self.failed.append(global_step)
                fault = f"{self.dir / str(global_step)}: cannot be written ({error.strerror})"
                self.logger.note(f"{fault}; the run goes on with the checkpoints it has")

    def _publish(self, folder: Path, files: dict[str, tuple[int, str]]) -> None:
        """Write the manifest, give the folder its name, remove what is older than the checkpoint before."""
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
        self.kept = [*self.kept, whole.name][-2:]
        for other in self.dir.iterdir():
            if other.name not in self.kept:
                shutil.rmtree(other, ignore_errors=True)

    def finish(self) -> None:
        """After the last row: say what could not be written, and that the run is finished, unless a signal ended it."""
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


def load_model(args: RunArgs, world: World, state: Mapping[str, Any], checkpoints: Checkpoints) -> None:
    """Give what `state` has, but optimisers and generators, the values of --load-model, which rank 0 reads.

    A run that goes on from a checkpoint has them already. Raises `BadInput`, naming flag and tensor, for a file that
    cannot be read or does not fit. Every rank must call.
    """
    if args.load_model is None or checkpoints.number:
        return
    path, model = args.load_model, None
    if world.rank == 0:
        try:
            model = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError) as error:
            model = getattr(error, "strerror", None) or "it is not a model.pt"
    model = world.gather_objects(model)[0]  # collective
    if not isinstance(model, dict) or "args" not in model:
        raise BadInput(f"--load-model {path}: cannot be read ({model if isinstance(model, str) else 'no model.pt'}).")
    kept = {name: x for name, x in state.items() if not isinstance(x, torch.optim.Optimizer | torch.Generator)}
    kept = {name: x for name, x in kept.items() if not isinstance(x, torch.Tensor) or x.requires_grad}  # a flag's value
    nests = model, {name: state_of(x) for name, x in kept.items()}
    there, here = ({name: x for name, x in leaves(nest) if isinstance(x, torch.Tensor)} for nest in nests)
    of_kept = [name for name in there if name.split(".")[0] in kept]
    of_both = [(name, model["args"].get(name, "{}"), getattr(args, name)) for name in ("env_id", "env_kwargs")]
    changed = [f"{flag(name)} is {now}, and {before} there; " for name, before, now in of_both if now != before]
    for name in [*here, *of_kept]:
        shapes = [f"of {tuple(part[name].shape)}" if name in part else "missing" for part in (there, here)]
        if shapes[0] != shapes[1]:
            advice = "it must be of the same script, --env-id and networks"
            fault = f"{''.join(changed)}{name} is {shapes[0]} there, {shapes[1]} here"
            raise BadInput(f"--load-model {path}: {fault}; {advice}.")
    normalized = model["args"].get("norm_obs", False)
    require(getattr(args, "norm_obs", False) == normalized, "--norm-obs", not normalized, f"{normalized} with {path}")
    for change in changed:
        checkpoints.logger.note(f"{path}: {change}its networks fit")
    for name, value in kept.items():
        restore(value, model[name])


def as_bytes(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8))
