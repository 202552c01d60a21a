"""Shards: the parts of an experiment whose arithmetic is the same on any number of processes.

Shard s of N is the environments `[s * num_envs // N, (s + 1) * num_envs // N)` and all that follows from them; a
process holds neighbouring shards. What rounds differently in another shape is computed for each shard alone, and what
is summed over shards is summed in one order: gradients along a binary tree (here), all else as a table of N rows
(`World.gather_shards`). Without `--shards` each process is one shard, and gradients are DDP's own means.
"""
# no `from __future__ import annotations` here: DDP refuses a hook whose annotations are strings

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from common.distributed import World
from common.errors import BadInput


def to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a dense tensor that begins at a multiple of 64 bytes; on the CPU a copy only where it must be.

    MKL rounds some products otherwise at another address, and a view of a shard's rows may begin anywhere. Images
    (n, channels, height, width) keep their order in memory.
    """
    channels_last = array.ndim == 4 and array.strides[1] < array.strides[3]
    tensor = torch.from_numpy(np.ascontiguousarray(np.moveaxis(array, 1, -1) if channels_last else array))
    if device.type != "cpu":
        tensor = tensor.to(device)
    elif tensor.data_ptr() % 64:
        tensor = tensor.clone()
    return tensor.movedim(-1, 1) if channels_last else tensor


def per_shard(function: Callable[..., np.ndarray], shards: list[slice], world: World) -> Callable[..., np.ndarray]:
    """`function` of arrays (n, ...), called with the rows of each shard alone -> what it gave, one after another."""
    if not world.sharded:
        return function
    cpu = torch.device("cpu")
    return lambda *inputs: np.concatenate(
        [function(*(to_tensor(x[rows], cpu).numpy() for x in inputs)) for rows in shards]
    )


def average_over_shards(loss: nn.Module, world: World) -> None:
    """With `--shards`, let DDP make the gradients of a wrapped `loss` means over all shards; otherwise over processes.

    Each shard of this process has a backward of its own, with gradients zeroed before it; after the last, gradients are
    the means, before, nothing. They are added along a binary tree over the shards' numbers, whose upper levels are
    exchanges between two processes: a + b and b + a are the same bits.
    Raises `BadInput` for a module that would make the result depend on the number of processes.
    """
    if world.wraps:
        require_same_on_any_process(loss)
    if not world.sharded:
        return
    kept: dict[nn.Parameter, list[torch.Tensor]] = {}  # by parameter, because DDP lays its buckets out anew

    def hook(_, bucket):
        buffer, future = bucket.buffer(), torch.futures.Future()
        gradients = dict(zip(bucket.parameters(), bucket.gradients(), strict=True))  # views of the buffer
        before = {parameter: kept.setdefault(parameter, []) for parameter in gradients}
        if any(len(parts) < len(world.shards) - 1 for parts in before.values()):
            for parameter, gradient in gradients.items():
                before[parameter].append(gradient.clone())
        else:
            for parameter, gradient in gradients.items():
                gradient.copy_(tree_sum([*before[parameter], gradient]))
                before[parameter].clear()
            distance = 1
            while distance < world.world_size:
                buffer += exchange(buffer, world.rank ^ distance, world)
                distance *= 2
            buffer /= world.num_shards
        future.set_result(buffer)
        return future

    loss.register_comm_hook(None, hook)


def require_same_on_any_process(loss: nn.Module) -> None:
    """Raise `BadInput` for a module of which each process would have other random numbers, or other statistics."""
    for name, module in loss.named_modules():
        kind, fault = type(module).__name__, ""
        rate = getattr(module, "dropout", 0.0)  # a number of nn.LSTM's, or a user's own submodule
        if isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU) or (isinstance(rate, float) and rate > 0):
            fault = "draws for each process alone; leave it out, or draw as README's 'Changing a network' says"
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) or getattr(module, "track_running_stats", False):
            fault = "keeps statistics of each process alone; take nn.LayerNorm"
        elif kind == "_SpectralNorm":
            fault = "changes at each forward pass, and processes make other numbers of these; leave it out"
        if fault and module.training:
            raise BadInput(
                f"{name.removeprefix('module.')}: {kind} {fault} (one process without --shards may have it)."
            )


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of 2^n tensors: of neighbours, then of neighbouring sums."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def exchange(own: torch.Tensor, rank: int, world: World) -> torch.Tensor:
    """Give `rank` this tensor for its own, of the same shape. Gloo takes only the CPU's."""
    sent = own if world.nccl else own.cpu()
    received = torch.empty_like(sent)
    pair = dist.P2POp(dist.isend, sent, rank), dist.P2POp(dist.irecv, received, rank)
    for work in dist.batch_isend_irecv(list(pair)):  # collective
        work.wait()
    return received.to(own.device)
