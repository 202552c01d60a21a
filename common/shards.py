"""Shards: groups of environments, whose arithmetic is the same on any number of processes.

Sums and products round differently in arrays of another shape. So networks run on each shard's numbers
alone, and sums over shards have one order: gradients are added along a binary tree, all else along a table
of all shards (`World.gather_shards`). Without `--shards` each process is one shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from common.memory import SLOT
from common.processes import BadInput, World, one_line


class Gradient:
    """Runs a loss and its backward on a batch; leaves in `.grad` the mean over all shards of all ranks.

    `loss`: a module, or DDP around it, which returns the loss and a dict of tensors. DDP averages over ranks
    itself or, if there are shards or shared memory, by the communication hook `_average`. `compiles`: loss and
    gradient, into one graph; where that fails, `note` says why.
    Raises `BadInput` for a module that would make the result depend on the number of processes.
    """

    def __init__(self, loss: nn.Module, world: World, compiles: bool, note: Callable[[str], None]) -> None:
        self.world = world
        self.loss = loss
        self.ddp = isinstance(loss, DDP)
        self.bare = loss.module if self.ddp else loss
        self.compiles = compiles
        self.compiled = False
        self.note = note
        if world.num_shards > 1:
            require_same_on_any_process(self.bare)
        self.parameters = [p for p in loss.parameters() if p.requires_grad]
        self.earlier: list[dict[nn.Parameter, torch.Tensor]] = []  # this rank's shards but the last
        if self.ddp and (world.sharded or world.memory):
            average = weakref.WeakMethod(self._average)  # DDP keeps its hook, which must not keep DDP
            loss.register_comm_hook(None, lambda _, bucket: average()(None, bucket))

        def gradient(*inputs: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
            value, stats = self.bare(*inputs)
            return torch.autograd.grad(value, self.parameters), stats

        self.gradient = gradient

    def __call__(self, inputs: Any, sizes: list[int]) -> list[dict[str, torch.Tensor]]:
        """Nested tensors (b, ...), `sizes` rows of each shard -> what the loss reports for each. Collective."""
        parts = split(inputs, sizes) if self.world.sharded else [inputs]
        if self.compiles:
            self._compile(parts[0])  # collective
        by_backward = not self.compiled and (self.ddp or self.world.num_shards == 1)
        results = []
        for part in parts[:-1] if by_backward else parts:
            result = self.gradient(*part)
            if self.compiled and self.parameters[0].is_cuda:  # CUDA graphs write there again
                result = tree_map(torch.clone, result)
            results.append(result)
        all_stats = [stats for _, stats in results]
        if by_backward:
            self.earlier = [dict(zip(self.parameters, gradient, strict=True)) for gradient, _ in results]
            for p in self.parameters:
                p.grad = None
            value, stats = self.loss(*parts[-1])
            value.backward()  # collective: DDP averages over processes
            return [*all_stats, stats]

        gradients = tree_sum([[*gradient] for gradient, _ in results])
        if self.world.world_size > 1:
            flat = torch.cat([x.flatten() for x in gradients])
            sum_over_ranks(flat, self.world)  # collective
            flat_parts = flat.split([x.numel() for x in gradients])
            gradients = [part.view(x.shape) for part, x in zip(flat_parts, gradients, strict=True)]
        if self.world.num_shards > 1:
            torch._foreach_div_(gradients, self.world.num_shards)
        for p, gradient in zip(self.parameters, gradients, strict=True):
            # a fused optimiser takes the parameters' order of memory for granted
            p.grad = gradient if gradient.stride() == p.stride() else torch.empty_like(p).copy_(gradient)
        return all_stats

    def _average(self, _, bucket):
        """DDP's communication hook: in the last shard's backward, the mean of a bucket over all shards."""
        buffer = bucket.buffer()
        if self.earlier:
            parameters = bucket.parameters()
            # contiguous views, though the bucket keeps each parameter's order of axes
            views = zip(bucket.gradients(), parameters, strict=True)
            gradients = [x.as_strided(p.shape, p.stride()) for x, p in views]
            shards = [[shard[p] for p in parameters] for shard in self.earlier]
            torch._foreach_copy_(gradients, tree_sum([*shards, gradients]))
        sum_over_ranks(buffer, self.world)  # collective
        buffer /= self.world.num_shards
        future = torch.futures.Future()
        future.set_result(buffer)
        return future

    def _compile(self, inputs: Any) -> None:
        """Compile for inputs like these; where that fails on any rank, go on without."""
        self.compiles = False
        # CUDA graphs, and kernels that no timing chooses, on each rank alike
        options = {"triton.cudagraphs": True, "deterministic": True} if self.parameters[0].is_cuda else None
        torch._dynamo.config.trace_autograd_ops = True  # `backward` in a graph may not set `.grad`
        compiled = torch.compile(self.gradient, fullgraph=True, dynamic=False, options=options)
        fault = ""
        try:
            compiled(*inputs)
        except Exception as error:  # the compiler raises many kinds, one of them for a missing g++
            fault = one_line(error)
        faults = [x for x in self.world.gather_objects(fault) if x]  # collective
        if faults:
            self.note(f"--compile: {type(self.bare).__name__} is not compiled ({faults[0]})")
        else:
            self.gradient = compiled
            self.compiled = True


def split(nest: Any, sizes: list[int]) -> list[Any]:
    """Nested tensors (b, ...) -> each shard's, in memory of its own: kernels may round by address."""
    leaves, spec = tree_flatten(nest)
    parts = zip(*(x.split(sizes) for x in leaves), strict=True)
    return [tree_unflatten([x.clone() for x in part], spec) for part in parts]


def tree_sum(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Lists of equal length -> their sum: of neighbours, then of neighbouring sums, up to one."""
    while len(parts) > 1:
        sums = [torch._foreach_add(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = sums + parts[2 * len(sums) :]
    return parts[0]


def sum_over_ranks(flat: torch.Tensor, world: World) -> None:
    """Replace (n,) by its sum over ranks, with shards along a binary tree of ranks."""
    if world.memory:
        for part in flat.split(SLOT // 8):  # numbers of at most 8 bytes
            table = torch.from_numpy(world.memory.gather(part.view(torch.uint8).numpy()))  # collective
            [total] = tree_sum([[row] for row in table.view(flat.dtype)])
            part.copy_(total)
        return
    if not world.sharded:
        dist.all_reduce(flat)  # collective
        return
    distance = 1
    while distance < world.world_size:  # a + b on one rank, b + a on the other: the same bits
        other = world.rank ^ distance
        sent = flat if world.nccl else flat.cpu()  # gloo sends CPU tensors only
        received = torch.empty_like(sent)
        operations = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(operations):  # collective
            work.wait()
        flat += received.to(flat.device)
        distance *= 2


def require_same_on_any_process(loss: nn.Module) -> None:
    """Raise `BadInput` for a module whose random numbers or statistics would differ between processes."""
    kinds = nn.modules.dropout._DropoutNd | nn.RReLU | nn.modules.batchnorm._BatchNorm
    for name, module in loss.named_modules():
        counts = getattr(module, "track_running_stats", False)  # instance normalisation may
        if module.training and (counts or isinstance(module, kinds)):
            fault = f"{type(module).__name__} draws or counts in each process alone"
            raise BadInput(f"{name}: {fault}; leave it out, or take nn.LayerNorm (docs/modify.md).")
