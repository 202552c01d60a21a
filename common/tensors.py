"""From arrays to tensors, and from this process's memory to its GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

ALIGNMENT = 512  # bytes, at whose multiples CUDA's own memory begins; kernels may round otherwise at other addresses


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """The array as a dense tensor that begins at a multiple of 64 bytes, a copy only if needed.

    MKL rounds some products differently at another address, and a slice of an array may begin anywhere. Images
    (n, channels, height, width) keep their order in memory.
    """
    channels_last = array.ndim == 4 and array.strides[1] < array.strides[3]
    tensor = torch.from_numpy(np.ascontiguousarray(np.moveaxis(array, 1, -1) if channels_last else array))
    if tensor.data_ptr() % 64:
        tensor = tensor.clone()
    return tensor.movedim(-1, 1) if channels_last else tensor


def tensors_of(nest: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, tuples and dicts."""
    return [x for x in tree_leaves(nest) if isinstance(x, torch.Tensor)]


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in any order of its axes, if its numbers lie side by side; otherwise a copy of which this is true."""
    return tensor if torch.empty_like(tensor, device="meta").stride() == tensor.stride() else tensor.contiguous()


def upload(nest: Any, device: torch.device) -> Any:
    """The same nest of tensors on `device`: for a GPU one copy, of all, for which this process need not wait."""
    if device.type == "cpu":
        return nest
    tensors, places, end = [dense(x) for x in tensors_of(nest)], [], 0
    for x in tensors:
        places.append(slice(end, end + x.nbytes))
        end += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
    packed = torch.empty(end, dtype=torch.uint8, pin_memory=True)

    def parts(memory: torch.Tensor) -> list[torch.Tensor]:
        return [memory[at].view(x.dtype).as_strided(x.shape, x.stride()) for at, x in zip(places, tensors, strict=True)]

    for part, x in zip(parts(packed), tensors, strict=True):
        part.copy_(x)
    there = iter(parts(packed.to(device, non_blocking=True)))
    return tree_map_only(torch.Tensor, lambda _: next(there), nest)
