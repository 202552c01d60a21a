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
    """The array as a contiguous tensor, floats in torch's default type; a copy only if needed.

    It is aligned to 64 bytes: MKL rounds some products differently at another address.
    """
    if array.dtype.kind == "f":
        array = array.astype(default_float(), copy=False)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.clone() if tensor.data_ptr() % 64 else tensor


def upload(nest: Any, device: torch.device) -> Any:
    """Nested tuples, lists and dicts with arrays -> the same with tensors on `device`, floats in torch's default type.

    A GPU gets all of them in one copy, for which this process need not wait.
    """
    nest = tree_map_only(np.ndarray, to_tensor, nest)
    if device.type == "cpu":
        return nest
    tensors = [x for x in tree_leaves(nest) if isinstance(x, torch.Tensor)]
    sizes = [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in tensors]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, x in zip(packed.split(sizes), tensors, strict=True):
        part[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
    parts = iter(packed.to(device, non_blocking=True).split(sizes))
    return tree_map_only(torch.Tensor, lambda x: next(parts)[: x.nbytes].view(x.dtype).view(x.shape), nest)
