"""Tensors: of arrays, on a GPU, and of a run's state, which is saved, restored and compared."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from common.processes import BadInput, World, one_line

ALIGNMENT = 512  # bytes, as of CUDA's own memory; kernels may round otherwise at other addresses


def default_float() -> np.dtype:
    """Torch's default type of floating numbers, as numpy's."""
    return np.dtype(np.float64 if torch.get_default_dtype() == torch.float64 else np.float32)


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """The array as a contiguous tensor, floats in torch's default type; a copy only if needed."""
    if array.dtype.kind == "f":
        array = array.astype(default_float(), copy=False)
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.clone() if tensor.data_ptr() % 64 else tensor  # MKL rounds by address


def upload(device: torch.device, *arrays: np.ndarray) -> Any:
    """An array as a tensor on `device`, several as a list: a GPU gets all in one asynchronous copy."""
    tensors = [to_tensor(x) for x in arrays]
    if device.type == "cuda":
        sizes = [-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in tensors]
        packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        for part, x in zip(packed.split(sizes), tensors, strict=True):
            part[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        parts = packed.to(device, non_blocking=True).split(sizes)
        tensors = [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in zip(parts, tensors, strict=True)]
    return tensors if len(tensors) > 1 else tensors[0]


def state_of(value: Any) -> Any:
    """What a generator, a tensor or anything that has `state_dict` holds, on the CPU."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    elif isinstance(value, torch.Generator):
        value = value.get_state()
    return tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), value)


@torch.no_grad()
def restore(state: dict[str, Any], saved: dict[str, Any], source: str) -> None:
    """Set what is in `state`, in place. Raises `BadInput` for what does not fit."""
    for name, value in state.items():
        try:
            if isinstance(value, torch.Generator):
                value.set_state(saved[name])
            elif isinstance(value, torch.Tensor):
                value.copy_(saved[name])
            else:
                value.load_state_dict(saved[name])
        except (RuntimeError, LookupError, TypeError, ValueError) as error:
            raise BadInput(f"{source}: does not fit this script's {name} ({one_line(error)}).") from error


def check_equal(step: int, state: dict[str, Any], world: World) -> None:
    """Raise `RuntimeError` unless `state` is equal on all ranks. Collective."""
    if world.world_size == 1:
        return
    digests = {}
    leaves, _ = tree_flatten_with_path({name: state_of(x) for name, x in state.items()})
    for path, value in leaves:
        array = isinstance(value, torch.Tensor | np.ndarray)
        content = np.asarray(value).tobytes() if array else repr(value).encode()
        digests[keystr(path)] = hashlib.blake2b(content, digest_size=8).digest()
    table = world.gather_objects(digests)  # collective
    for rank, others in enumerate(table):
        for name in table[0] | others:
            if others.get(name) != table[0].get(name):
                raise RuntimeError(f"step {step}: {name} on rank {rank} differs from rank 0's")


def for_model(state: dict[str, Any]) -> dict[str, Any]:
    """What of a run's state goes into model.pt: all except optimisers, schedules and generators."""
    anew = torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler | torch.Generator
    return {name: x for name, x in state.items() if not isinstance(x, anew)}
