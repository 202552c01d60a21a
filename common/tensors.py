"""From arrays to tensors, and from this process's memory to its GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

ALIGNMENT = 512  # bytes, to which CUDA aligns its own memory; kernels may round otherwise at other addresses


def default_float() -> np.dtype:
    """Torch's default type of floating numbers, as numpy's."""
    return torch.empty(0).numpy().dtype


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """The array as a contiguous tensor that is aligned to 64 bytes, a copy only if needed.

    MKL rounds some products differently at another address, and a slice of an array may begin anywhere.
    Images (n, channels, height, width) keep their order in memory.
    """
    channels_last = array.ndim == 4 and array.strides[1] < array.strides[3]
    if channels_last:
        array = np.moveaxis(array, 1, -1)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.data_ptr() % 64:
        tensor = tensor.clone()
    return tensor.movedim(-1, 1) if channels_last else tensor


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the numbers lie side by side in memory, in whatever order of the axes."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def upload(nest: Any, device: torch.device) -> Any:
    """Nested lists, tuples and dicts with tensors -> the same with tensors on `device`.

    A GPU gets all of them in one copy, for which this process need not wait.
    """
    if device.type == "cpu":
        return nest
    tensors = [x for x in tree_leaves(nest) if isinstance(x, torch.Tensor)]
    tensors = [x if is_dense(x) else x.contiguous() for x in tensors]
    sizes = [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in tensors]

    def unpacked(memory: torch.Tensor) -> list[torch.Tensor]:
        views = []
        for x, part in zip(tensors, memory.split(sizes), strict=True):
            views.append(part[: x.nbytes].view(x.dtype).as_strided(x.shape, x.stride()))
        return views

    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, x in zip(unpacked(packed), tensors, strict=True):
        part.copy_(x)
    uploaded = iter(unpacked(packed.to(device, non_blocking=True)))
    return tree_map_only(torch.Tensor, lambda _: next(uploaded), nest)
