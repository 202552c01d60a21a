"""Shards: the parts of an experiment whose arithmetic is the same on any number of processes.

Shard s of N is the environments `[s * num_envs // N, (s + 1) * num_envs // N)` and all that follows from them;
a process holds neighbouring shards. Arithmetic that rounds differently in another shape is done for each shard
alone. Sums over shards have one order: gradients are added along a binary tree (here), all else along a table
of all shards (`World.gather_shards`). Without `--shards` each process is one shard.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from common.distributed import World
from common.errors import BadInput
from common.memory import SLOT
from common.tensors import is_dense, to_tensor


def per_shard(function: Callable[..., np.ndarray], shards: list[slice], world: World) -> Callable[..., np.ndarray]:
    """`function` of arrays (n, ...), called with each shard's slice alone -> its results, one after another."""
    if not world.sharded:
        return function

    def apply(*inputs: np.ndarray) -> np.ndarray:
        parts = [[to_tensor(x[shard]).numpy() for x in inputs] for shard in shards]
        return np.concatenate([function(*part) for part in parts])

    return apply


class Gradients:
    """The backward passes of losses, after which gradients are means over all shards of all processes."""

    def __init__(self, world: World) -> None:
        self.world = world
        # of each loss; weak, since gloo may abort the process if a DDP module outlives its process group
        self.parameters: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
        self.earlier: list[dict[nn.Parameter, torch.Tensor]] = []  # gradients of this process's shards but the last

    def add_loss(self, loss: nn.Module) -> None:
        """Prepare a loss, which DDP wraps if there are several processes. Once for each, before its first `backward`.

        Raises `BadInput` for a module that would make the result depend on the number of processes.
        """
        if self.world.uses_ddp or self.world.sharded:
            require_same_on_any_process(loss)
        if isinstance(loss, DDP) and (self.world.sharded or self.world.memory):
            loss.register_comm_hook(None, self._average_bucket)
        self.parameters[loss] = [p for p in loss.parameters() if p.requires_grad]

    def backward(self, loss: nn.Module, *inputs: list[Any]) -> list[dict[str, torch.Tensor]]:
        """Call `loss` with each shard's inputs, and leave in `.grad` the mean over all shards of all processes.

        `inputs`: lists with an entry for each shard of this process. Returns what the loss reports for each shard.
        Gradients must be None before. Every process must call.
        """
        stats = []
        parameters = self.parameters[loss]
        *earlier, last = zip(*inputs, strict=True)
        for shard_inputs in earlier:
            with loss.no_sync() if isinstance(loss, DDP) else nullcontext():
                value, shard_stats = loss(*shard_inputs)
                value.backward()
            stats.append(shard_stats)
            self.earlier.append({p: p.grad for p in parameters if p.grad is not None})
            for p in parameters:
                p.grad = None
        value, shard_stats = loss(*last)
        value.backward()  # collective: DDP averages over processes
        stats.append(shard_stats)
        if earlier and not isinstance(loss, DDP):
            used = [p for p in parameters if p.grad is not None]
            gradients = [p.grad for p in used]
            self._add_earlier(used, gradients)
            torch._foreach_div_(gradients, self.world.num_shards)
        self.earlier.clear()
        return stats

    def _add_earlier(self, parameters: list[nn.Parameter], gradients: list[torch.Tensor]) -> None:
        """Add the gradients of this process's earlier shards to the last one's, in place."""
        shards = [[shard[p] for p in parameters] for shard in self.earlier]
        torch._foreach_copy_(gradients, tree_sum([*shards, gradients]))

    def _average_bucket(self, _, bucket):
        """DDP's communication hook: in the last shard's backward, the mean of a bucket over all shards."""
        buffer = bucket.buffer()
        if self.earlier:
            parameters = bucket.parameters()
            gradients = bucket.gradients()  # of contiguous shape; but the bucket has them in their parameters' order
            for i, p in enumerate(parameters):
                if not p.is_contiguous() and is_dense(p):
                    gradients[i] = gradients[i].as_strided(p.shape, p.stride())
            self._add_earlier(parameters, gradients)
        sum_over_ranks(buffer, self.world)  # collective
        buffer /= self.world.num_shards
        future = torch.futures.Future()
        future.set_result(buffer)
        return future


def require_same_on_any_process(loss: nn.Module) -> None:
    """Raise `BadInput` for a module whose random numbers or statistics would differ between processes."""
    for name, module in loss.named_modules():
        fault = ""
        if isinstance(module, nn.modules.dropout._DropoutNd):
            fault = "draws for each process alone; leave it out, or draw as rule 2 of docs/modify.md says"
        elif isinstance(module, nn.modules.batchnorm._NormBase):
            fault = "keeps statistics of each process alone; take nn.LayerNorm"
        if fault and module.training:
            name = name.removeprefix("module.")
            raise BadInput(f"{name}: {type(module).__name__} {fault} (one process without --shards may have it).")


def tree_sum(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Lists of as many tensors -> their sum: of neighbours, then of neighbouring sums, up to one."""
    while len(parts) > 1:
        sums = [torch._foreach_add(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = sums + parts[2 * len(sums) :]
    return parts[0]


def sum_over_ranks(buffer: torch.Tensor, world: World) -> None:
    """Add (n,) of all ranks in place, along a binary tree over their numbers."""
    if world.memory:
        for part in buffer.split(SLOT // 8):  # numbers of at most 8 bytes
            table = torch.from_numpy(world.memory.gather(part.view(torch.uint8).numpy()))  # collective
            [total] = tree_sum([[row] for row in table.view(buffer.dtype)])
            part.copy_(total)
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
