"""The state that is equal on all ranks: saved, restored, and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from common.distributed import World
from common.errors import Fault


def state_of(value: Any) -> Any:
    """The tensors and numbers, on the CPU, of a generator, a tensor, or anything that has `state_dict`."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    elif isinstance(value, torch.Generator):
        value = value.get_state()
    return tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), value)


@torch.no_grad()
def restore(value: Any, saved: Any) -> None:
    """Set `value`, in place, to a state that `state_of` returned."""
    if isinstance(value, torch.Generator):
        value.set_state(saved)
    elif isinstance(value, torch.Tensor):
        value.copy_(saved)
    else:
        value.load_state_dict(saved)


def check_equal(step: int, state: Mapping[str, Any], world: World) -> None:
    """Raise `Fault`, naming tensor, rank and step, if a rank's `state` is not bit-identical to rank 0's.

    `state`: by name, what `state_of` takes, or nests of tensors, arrays and numbers. Every rank must call.
    """
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
                raise Fault(f"step {step}: {name} on rank {rank} differs from rank 0's.")
