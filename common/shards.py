"""Shards: groups of environments, whose arithmetic is the same on any number of processes.

Arithmetic rounds differently in arrays of another shape. So networks run on each shard's numbers alone, and
sums over shards have one order: gradients along a binary tree, all else along a table (`World.gather_shards`).
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_flatten, tree_unflatten

from common.processes import BadInput, World, one_line

# CUDA graphs, of kernels that no timing chooses: on each rank alike
GRAPHS = {"triton.cudagraphs": True, "deterministic": True}
Gradients = Sequence[torch.Tensor]  # one for each parameter; of a graph for shards, in one vector
Stats = dict[str, torch.Tensor]


class Gradient:
    """Runs a loss and its backward on a batch; leaves in `.grad` the mean over all shards of all ranks.

    `loss`: a module, or DDP around it, which returns the loss and a dict of tensors. DDP averages over ranks
    itself or, if there are shards or shared memory, by the hook `_average`. `compiles`: loss and gradient, into
    one graph. Raises `BadInput` for random numbers or statistics that would differ between processes.
    """

    def __init__(self, loss: nn.Module, world: World, compiles: bool, note: Callable[[str], None]) -> None:
        self.world = world
        self.loss = loss
        self.bare = loss.module if isinstance(loss, DDP) else loss
        self.compiles = compiles
        self.compiled: Callable[..., tuple[Gradients, Stats]] | None = None
        self.note = note
        kinds = nn.modules.dropout._DropoutNd | nn.RReLU | nn.modules.batchnorm._BatchNorm
        for name, module in self.bare.named_modules() if world.num_shards > 1 else ():
            counts = getattr(module, "track_running_stats", False)  # instance normalisation may
            if module.training and (counts or isinstance(module, kinds)):
                fault = f"{type(module).__name__} draws or counts in each process alone"
                raise BadInput(f"{name}: {fault}; leave it out, or take nn.LayerNorm (docs/modify.md).")
        if loss is self.bare and world.world_size > 1:
            raise BadInput(f"{type(loss).__name__}: must be in DDP(...) on several processes.")
        self.parameters = [p for p in loss.parameters() if p.requires_grad]
        self.places = {p: place for place, p in enumerate(self.parameters)}
        self.gradients: list[Gradients] = []  # of this rank's shards so far
        if isinstance(loss, DDP) and (world.sharded or world.memory):
            loss.register_comm_hook(weakref.proxy(self), Gradient._average)  # DDP must not keep itself

    def __call__(self, inputs: Any, sizes: list[int] | None) -> list[Stats]:
        """`inputs` as in `Run.backward` -> what the loss reports for each shard here. Collective."""
        *earlier, last = split(inputs, sizes, len(self.world.shards)) if self.world.sharded else [inputs]
        if self.compiles:
            self._compile(last)  # collective
        self.gradients = []
        stats = [self._add(self.bare, part) for part in earlier]
        stats.append(self._add(self.loss, last))  # collective: DDP averages over ranks
        if self.compiled or (self.loss is self.bare and self.world.num_shards > 1):
            self._set_mean(tree_sum(self.gradients))  # collective
        return stats

    def _add(self, loss: nn.Module, inputs: Any) -> Stats:
        """Add a shard's gradients to the list -> what the loss reports."""
        if self.compiled:
            gradients, stats = self.compiled(*inputs)
            if self.parameters[0].is_cuda:  # CUDA graphs write there again
                gradients, stats = copied((gradients, stats))
        else:
            for p in self.parameters:
                p.grad = None
            value, stats = loss(*inputs)
            value.backward()
            gradients = [p.grad for p in self.parameters]
            if any(x is None for x in gradients):
                unused = [name for name, p in self.bare.named_parameters() if p.requires_grad and p.grad is None]
                raise BadInput(f"{type(self.bare).__name__}: its result must depend on {', '.join(unused)}.")
        self.gradients.append(gradients)
        return stats

    def _set_mean(self, gradients: Gradients) -> None:
        """Set `.grad`, in the parameters' order of memory, to the mean over shards."""
        if self.world.world_size > 1:
            sum_over_ranks(gradients[0], self.world)  # collective; the only one, since it is compiled
        if self.world.num_shards > 1:
            torch._foreach_div_(gradients, self.world.num_shards)
        if self.compiled and self.world.num_shards > 1:
            parts = gradients[0].split([p.numel() for p in self.parameters])
            gradients = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.grad = gradient if gradient.stride() == p.stride() else torch.empty_like(p).copy_(gradient)

    def _average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's hook: in the last shard's backward, the mean of a bucket over all shards."""
        buffer = bucket.buffer()
        if self.gradients:
            # contiguous views; the bucket keeps each parameter's order of axes
            views = zip(bucket.gradients(), bucket.parameters(), strict=True)
            last = [x.as_strided(p.shape, p.stride()) for x, p in views]
            places = [self.places[p] for p in bucket.parameters()]
            earlier = [[of_shard[place] for place in places] for of_shard in self.gradients]
            torch._foreach_copy_(last, tree_sum([*earlier, last]))
        sum_over_ranks(buffer, self.world)  # collective
        buffer /= self.world.num_shards
        future = torch.futures.Future()
        future.set_result(buffer)
        return future

    def _compile(self, inputs: Any) -> None:
        """Compile for inputs like these; where that fails on any rank, go on without."""

        def gradient(*inputs: Any) -> tuple[Gradients, Stats]:
            value, stats = self.bare(*inputs)
            gradients = torch.autograd.grad(value, self.parameters)
            if self.world.num_shards > 1:  # in one vector, as they are added and sent
                gradients = (torch.cat([x.flatten() for x in gradients]),)
            return gradients, stats

        self.compiles = False
        torch._dynamo.config.trace_autograd_ops = True  # `backward` in a graph may not set `.grad`
        options = GRAPHS if self.parameters[0].is_cuda else None
        compiled = torch.compile(gradient, fullgraph=True, dynamic=False, options=options)
        fault = ""
        try:
            compiled(*inputs)
        except Exception as error:  # the compiler raises many kinds, one of them for a missing g++
            fault = one_line(error)
        faults = [x for x in self.world.gather_objects(fault) if x]  # collective
        if faults:
            self.note(f"--compile: {type(self.bare).__name__} is not compiled ({faults[0]})")
        else:
            self.compiled = compiled


def split(nest: Any, sizes: list[int] | None, num_parts: int) -> list[Any]:
    """Nested tensors (b, ...) -> the same for each part, in memory of its own."""
    leaves, spec = tree_flatten(nest)
    parts = zip(*(x.split(sizes or len(x) // num_parts) for x in leaves), strict=True)
    return [tree_unflatten([x.clone() for x in part], spec) for part in parts]  # kernels may round by address


def copied(nest: Any) -> Any:
    """Nested tensors of floats -> the same in other memory, by one kernel."""
    leaves, spec = tree_flatten(nest)
    return tree_unflatten(torch._foreach_mul(leaves, 1.0), spec)


def tree_sum(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Lists of equal length -> their sum: of neighbours, then of neighbouring sums, up to one."""
    while len(parts) > 1:
        sums = [torch._foreach_add(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = sums + parts[2 * len(sums) :]
    return parts[0]


def sum_over_ranks(flat: torch.Tensor, world: World) -> None:
    """Replace (n,) by its sum over ranks, with shards or shared memory along a binary tree of ranks."""
    if not world.sharded and not world.memory:
        dist.all_reduce(flat)  # collective
        return
    [total] = tree_sum([[row] for row in world.rows(flat)])  # collective
    flat.copy_(total)
