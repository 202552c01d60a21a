"""The check that all ranks hold the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from common.distributed import World
from common.launch import Fault


def check_equal(step: int, state: Mapping[str, object], world: World) -> None:
    """Raise `Fault` naming the first tensor, rank and step where `state` is not bit-identical to rank 0's.

    `state`: modules, optimisers, generators, nests of tensors, arrays and numbers. Every rank must call.
    """
    digests = {n: hashlib.blake2b(b, digest_size=8).digest() for name, x in state.items() for n, b in leaves(name, x)}
    table = world.gather_objects(digests)  # collective
    for rank, others in enumerate(table):
        for name in table[0] | others:
            if others.get(name) != table[0].get(name):
                raise Fault(f"step {step}: {name} on rank {rank} differs from rank 0's.")


def leaves(name: str, value: object) -> Iterator[tuple[str, bytes]]:
    """The (dotted name, bytes) pairs of a nest of modules, optimisers, generators, tensors, arrays and numbers."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    elif isinstance(value, torch.Generator):
        value = value.get_state()
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(f"{name}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(f"{name}.{index}", item)
    elif isinstance(value, torch.Tensor):
        yield name, value.detach().cpu().contiguous().numpy().tobytes()
    else:
        yield name, value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
