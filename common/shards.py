"""Shards: the parts of an experiment whose arithmetic is the same on any number of processes.

Shard s of N is the environments `[s * num_envs // N, (s + 1) * num_envs // N)` and all that follows from them; a
process holds neighbouring shards. Arithmetic that rounds differently in another shape is done for each shard alone.
Sums over shards have one order: gradients are added along a binary tree (here), all else along a table of all shards
(`World.gather_shards`). Without `--shards` each process is one shard, and DDP averages the gradients alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from common.distributed import World
from common.errors import BadInput
from common.memory import SLOT
from common.tensors import to_tensor


def per_shard(function: Callable[..., np.ndarray], shards: list[slice], world: World) -> Callable[..., np.ndarray]:
    """`function` of arrays (n, ...), called with each shard's slice alone -> its results, one after another."""
    if not world.sharded:
        return function
    return lambda *inputs: np.concatenate(
        [function(*(to_tensor(x[shard]).numpy() for x in inputs)) for shard in shards]
    )


def average_over_shards(loss: nn.Module, world: World) -> None:
    """Average the gradients of `loss` over all shards with `--shards`; otherwise DDP does so over processes.

    Each shard of this process has its own backward, with gradients zeroed before it. Gradients are valid only after
    the last shard's backward. They are added along a binary tree over the shards' numbers, the upper levels of which
    are between processes: DDP's part. Raises `BadInput` for a module that would make the result depend on the number
    of processes.
    """
    if world.uses_ddp or world.sharded:
        require_same_on_any_process(loss)

    def add_shards(parameter):
        parts = world.gradients[parameter]
        if len(parts) < len(world.shards) - 1:
            parts.append(parameter.grad.clone())
            return
        parameter.grad = tree_sum([*parts, parameter.grad])
        parts.clear()
        if not world.uses_ddp:
            parameter.grad /= world.num_shards

    def add_processes(_, bucket):
        buffer, future = bucket.buffer(), torch.futures.Future()
        if len(world.shards) == 1 or not any(map(world.gradients.get, bucket.parameters())):  # the last shard's
            sum_over_ranks(buffer, world)  # collective
            buffer /= world.num_shards
        future.set_result(buffer)
        return future

    for parameter in loss.parameters() if len(world.shards) > 1 else ():
        if parameter.requires_grad and parameter not in world.gradients:  # losses may share it
            parameter.register_post_accumulate_grad_hook(add_shards)  # before DDP sees the gradient
            world.gradients[parameter] = []
    if isinstance(loss, DDP):
        loss._set_ddp_runtime_logging_sample_rate(2**31 - 1)  # it waits for the GPU now and then, which a graph may not
        if world.sharded or world.memory:
            loss.register_comm_hook(None, add_processes)


def require_same_on_any_process(loss: nn.Module) -> None:
    """Raise `BadInput` for a module whose random numbers or statistics would differ between processes."""
    for name, module in loss.named_modules():
        kind, fault = type(module).__name__, ""
        rate = getattr(module, "dropout", 0.0)  # a number of nn.LSTM's, or a user's own submodule
        if isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU) or (isinstance(rate, float) and rate > 0):
            fault = "draws for each process alone; leave it out, or draw as rule 2 of docs/modify.md says"
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) or getattr(module, "track_running_stats", False):
            fault = "keeps statistics of each process alone; take nn.LayerNorm"
        elif kind == "_SpectralNorm":
            fault = "changes at each forward pass, and processes make other numbers of these; leave it out"
        if fault and module.training:
            name = name.removeprefix("module.")
            raise BadInput(f"{name}: {kind} {fault} (one process without --shards may have it).")


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of neighbours, then of neighbouring sums, up to one."""
    while len(parts) > 1:
        sums = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = sums + parts[2 * len(sums) :]
    return parts[0]


def sum_over_ranks(buffer: torch.Tensor, world: World) -> None:
    """Add (n,) of all ranks in place, along a binary tree over their numbers."""
    if world.memory:
        for part in buffer.split(SLOT // 8):  # numbers of at most 8 bytes
            table = torch.from_numpy(world.memory.gather(part.view(torch.uint8).numpy()))  # collective
            part.copy_(tree_sum([*table.view(buffer.dtype)]))
        return
    distance = 1
    while distance < world.world_size:  # a + b on one rank, b + a on the other: the same bits
        buffer += exchange(buffer, world.rank ^ distance, world)  # collective
        distance *= 2


def exchange(own: torch.Tensor, rank: int, world: World) -> torch.Tensor:
    """Send `rank` this tensor -> the tensor of the same shape that it sent."""
    sent = own if world.nccl else own.cpu()  # gloo takes only a CPU's
    received = torch.empty_like(sent)
    operations = [dist.P2POp(dist.isend, sent, rank), dist.P2POp(dist.irecv, received, rank)]
    for work in dist.batch_isend_irecv(operations):  # collective
        work.wait()
    return received.to(own.device)
