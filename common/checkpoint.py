"""Checkpoints: a killed run goes on, on any number of processes, and ends in the bytes of one that never stopped.

A simulator cannot be saved in general. So a checkpoint also ends all running episodes, as
truncations, and all environments start anew from other seeds, in an undisturbed run too: "go on"
and "never stopped" are one program. `checkpoints/{global_step}` in the run directory holds
state.pt (what is equal on all ranks) and a file for each shard of a replay buffer. It gets its
name when it is complete.
"""

from __future__ import annotations

import hashlib
import shutil
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from common.arguments import RunArgs, flag
from common.logger import Logger, write_whole
from common.processes import BadInput, World

load = partial(torch.load, map_location="cpu", weights_only=True)


def state_of(value: Any) -> Any:
    """The tensors and numbers, on the CPU, of a generator, a tensor, or anything that has `state_dict`."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    elif isinstance(value, torch.Generator):
        value = value.get_state()
    return tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), value)


@torch.no_grad()
def restore(state: dict[str, Any], saved: dict[str, Any], source: str) -> None:
    """Set what is in `state`, in place. Raises `BadInput` for what does not fit, as of an edited script."""
    for name, value in state.items():
        try:
            if isinstance(value, torch.Generator):
                value.set_state(saved[name])
            elif isinstance(value, torch.Tensor):
                value.copy_(saved[name])
            else:
                value.load_state_dict(saved[name])
        except (RuntimeError, LookupError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise BadInput(f"{source}: does not fit what this script registers as {name} ({reason}).") from error


def check_equal(step: int, state: dict[str, Any], world: World) -> None:
    """Raise `RuntimeError`, naming tensor, rank and step, unless `state` is bit-identical on all ranks. Collective."""
    if world.world_size == 1:
        return
    digests = {}
    leaves, _ = tree_flatten_with_path({name: state_of(x) for name, x in state.items()})
    for path, value in leaves:
        array = isinstance(value, torch.Tensor | np.ndarray)
        content = np.ascontiguousarray(value).tobytes() if array else repr(value).encode()
        digests[keystr(path)] = hashlib.blake2b(content, digest_size=8).digest()
    table = world.gather_objects(digests)  # collective
    for rank, others in enumerate(table):
        for name in table[0] | others:
            if others.get(name) != table[0].get(name):
                raise RuntimeError(f"step {step}: {name} on rank {rank} differs from rank 0's")


class Checkpoints:
    """Writes checkpoints and keeps the newest two.

    `state`: equal on all ranks; `replay`: a buffer, of which each rank has a part, or None.
    Raises `BadInput`, naming the flag, where a checkpoint could not keep the promise. Every rank makes one.
    """

    def __init__(self, args: RunArgs, world: World, logger: Logger, state: dict[str, Any], replay: Any) -> None:
        self.world = world
        self.logger = logger
        self.replay = replay
        self.state = {**state, "torch": torch.default_generator}
        if world.world_size > 2 and not world.sharded:
            # three ranks' numbers are added in an order that moves with DDP's buckets, which each start lays out anew
            raise BadInput(f"--shards: must be set with --checkpoint-every on {world.world_size} processes.")
        self.dir = world.gather_objects(logger.dir)[0] / "checkpoints"  # collective: rank 0's
        if not all(world.gather_objects(self.dir.parent.exists())):  # collective
            raise BadInput(f"--run-dir {self.dir.parent}: is not there for all ranks, which must share a file system.")

    def read_newest(self) -> dict[str, Any]:
        """Go on from the newest checkpoint that can be read -> what `write` was told; nothing if there is none."""
        names = sorted((int(path.name) for path in self.dir.glob("*") if path.name.isdecimal()), reverse=True)
        names = self.world.gather_objects(names)[0]  # collective
        for name in names:
            folder = self.dir / str(name)
            fault = ""
            try:
                saved = load(folder / "state.pt")
                if self.replay is not None:
                    self.replay.load_state_dict(saved["replay"])
                    for index, shard in enumerate(self.world.shards):
                        with np.load(folder / f"replay-{shard}") as arrays:
                            self.replay.load_shard(index, arrays)
                        self.world.feed()
            except Exception as error:  # torch and numpy raise many kinds
                fault = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            faults = [x for x in self.world.gather_objects(fault) if x]  # collective
            if not faults:
                restore(self.state, saved, f"--run-dir {folder}")
                self.logger.note(f"going on from {folder}")
                return saved["run"]
            self.logger.note(f"{folder}: cannot be read ({faults[0]}); looking for an older checkpoint")
        if names:
            raise BadInput(f"--resume: {self.dir} holds no checkpoint that can be read; name another --run-dir.")
        return {}

    def write(self, about: dict[str, Any]) -> None:
        """Write a checkpoint, named by its `global_step` in `about`; if that fails, say so and go on. Collective."""
        folder = self.dir / str(about["global_step"])
        part = folder.with_name(f"{folder.name}.part")
        fault = ""
        try:
            part.mkdir(parents=True, exist_ok=True)
            if self.replay is not None:
                for index, shard in enumerate(self.world.shards):
                    arrays = self.replay.shard_state(index)
                    write_whole(part / f"replay-{shard}", lambda file, arrays=arrays: np.savez(file, **arrays))
                    self.world.feed()
            if self.world.rank == 0:
                saved = {name: state_of(value) for name, value in self.state.items()}
                saved["run"] = about | {"logger": self.logger.state()}
                if self.replay is not None:
                    saved["replay"] = self.replay.state_dict()
                write_whole(part / "state.pt", partial(torch.save, saved))
        except (OSError, RuntimeError) as error:  # torch raises its own for a full disk's
            fault = " ".join(str(error).split())[:300]
        faults = [x for x in self.world.gather_objects(fault) if x]  # collective
        if self.world.rank > 0:
            return
        if faults:
            shutil.rmtree(part, ignore_errors=True)
            self.logger.note(f"{folder}: cannot be written ({faults[0]}); the run goes on with those it has")
            return
        shutil.rmtree(folder, ignore_errors=True)  # one that could not be read
        part.rename(folder)
        steps = sorted(int(path.name) for path in self.dir.iterdir() if path.name.isdecimal())
        newest = [step for step in steps if step <= about["global_step"]][-2:]
        for path in self.dir.iterdir():
            if path.name.removesuffix(".part").isdecimal() and path.name not in map(str, newest):
                shutil.rmtree(path, ignore_errors=True)


def for_model(state: dict[str, Any]) -> dict[str, Any]:
    """What of a run's state goes into model.pt: all except optimisers and generators."""
    return {name: x for name, x in state.items() if not isinstance(x, torch.optim.Optimizer | torch.Generator)}


def load_model(args: RunArgs, state: dict[str, Any]) -> None:
    """Give networks and normalisers the values of --load-model, which every rank reads.

    Raises `BadInput`, naming the flag, for a file that cannot be read or does not fit.
    """
    path = args.load_model
    try:
        model = load(path)
        trained = model["args"]
    except Exception as error:  # torch raises many kinds
        raise BadInput(f"--load-model {path}: cannot be read ({type(error).__name__}).") from error
    for name in ("network", "dueling", "scale_pixels", "norm_obs", "norm_reward"):
        if name in trained and hasattr(args, name):
            needed = f"{trained[name]} with --load-model {path}"
            args.require(getattr(args, name) == trained[name], name, needed)
    tensors = {name: x for name, x in state.items() if isinstance(x, torch.Tensor) and not x.requires_grad}
    wanted = {name: x for name, x in for_model(state).items() if name not in tensors}
    restore(wanted, model, f"{flag('load_model')} {path}, of {trained['env_id']}")
