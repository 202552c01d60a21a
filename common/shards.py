"""Shards: the parts of an experiment whose arithmetic is the same on any number of processes.

Shard s of N is the environments `[s * num_envs // N, (s + 1) * num_envs // N)` and all that follows from them;
a process holds neighbouring shards, and both numbers are powers of two. Arithmetic that rounds differently in
another shape is done for each shard alone. Sums over shards have one order: gradients are added along a binary
tree (here), all else along a table of all shards (`World.gather_shards`). Without `--shards` each process is
one shard.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from common.distributed import World
from common.errors import BadInput, Fault, one_line
from common.memory import SLOT
from common.tensors import is_dense


class Gradients:
    """The backward passes of losses, after which gradients are means over all shards of all processes."""

    def __init__(self, world: World, note: Callable[[str], None] = print) -> None:
        self.world = world
        self.note = note
        # of each loss; weak, since gloo may abort the process if a DDP module outlives its process group
        self.parameters: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
        self.compiled: WeakKeyDictionary[nn.Module, CompiledGradient] = WeakKeyDictionary()
        self.earlier: list[dict[nn.Parameter, torch.Tensor]] = []  # gradients of this process's shards but the last

    def add_loss(self, loss: nn.Module, *inputs: list[Any], compiles: bool = False) -> None:
        """Prepare a loss, which DDP wraps if there are several processes, before its first `backward`.

        `compiles`: whether to compile the loss and its gradient into one graph, for inputs like these.
        Raises `BadInput` for a module that would make the result depend on the number of processes.
        """
        if self.world.uses_ddp or self.world.sharded:
            require_same_on_any_process(loss)
        self.parameters[loss] = [p for p in loss.parameters() if p.requires_grad]
        if compiles:
            self._compile(loss, *inputs)  # collective
        if isinstance(loss, DDP) and (self.world.sharded or self.world.memory) and loss not in self.compiled:
            loss.register_comm_hook(None, self._average_bucket)

    def _compile(self, loss: nn.Module, *inputs: list[Any]) -> None:
        """Compile a loss for these inputs; where that fails on any process, say why, and go on without."""
        if not self.compiled:
            torch.compiler.reset()  # torch keeps eight graphs of a function, over all runs of a process
        bare = loss.module if isinstance(loss, DDP) else loss
        fault = ""
        try:
            gradient = CompiledGradient(bare, self.parameters[loss], len(inputs[0]))
            gradient(0, *(shards[0] for shards in inputs))
        except Exception as error:  # the compiler raises many kinds, one of them for a missing g++
            fault = one_line(error)
        faults = [x for x in self.world.gather_objects(fault) if x]  # collective
        if faults:
            self.note(f"--compile: {type(bare).__name__} is not compiled ({faults[0]})")
        else:
            self.compiled[loss] = gradient

    def backward(self, loss: nn.Module, *inputs: list[Any]) -> list[dict[str, torch.Tensor]]:
        """Call `loss` with each shard's inputs, and leave in `.grad` the mean over all shards of all processes.

        `inputs`: lists with an entry for each shard of this process. Returns what the loss reports for each shard.
        Every process must call.
        """
        if any(p.grad is not None for p in self.parameters[loss]):
            raise Fault("run.backward: gradients are not None; call optimizer.zero_grad() before.")
        if loss in self.compiled:
            return self._backward_compiled(self.compiled[loss], *inputs)  # collective
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
            if any(shard.keys() != set(used) for shard in self.earlier):
                raise Fault("a loss uses a parameter for one shard and not for another: use it at every call.")
            gradients = [p.grad for p in used]
            self._add_earlier(used, gradients)
            torch._foreach_div_(gradients, self.world.num_shards)
        self.earlier.clear()
        return stats

    def _backward_compiled(self, gradient: CompiledGradient, *inputs: list[Any]) -> list[dict[str, torch.Tensor]]:
        stats = [gradient(index, *shard) for index, shard in enumerate(zip(*inputs, strict=True))]
        flat, *others = gradient.flats
        if others:
            flat.copy_(tree_sum([[x] for x in gradient.flats])[0])
        if self.world.sharded or self.world.memory:
            sum_over_ranks(flat, self.world)  # collective
        elif self.world.world_size > 1:
            dist.all_reduce(flat)  # collective
        if self.world.num_shards > 1:
            flat /= self.world.num_shards
        for p, view in zip(gradient.parameters, gradient.views[0], strict=True):
            p.grad = view
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
            gradients = bucket.gradients()  # contiguous, though the bucket keeps each parameter's order of axes
            for i, p in enumerate(parameters):
                if not p.is_contiguous() and is_dense(p):
                    gradients[i] = gradients[i].as_strided(p.shape, p.stride())
            self._add_earlier(parameters, gradients)
        sum_over_ranks(buffer, self.world)  # collective
        buffer /= self.world.num_shards
        future = torch.futures.Future()
        future.set_result(buffer)
        return future


class CompiledGradient:
    """A loss and its gradient as one graph: by `torch.autograd.grad`, since `backward` in a graph may not set `.grad`.

    `flats`: for each of `num_shards`, the newest gradients in one vector; `views`: the same, as parameters.
    """

    def __init__(self, loss: nn.Module, parameters: list[nn.Parameter], num_shards: int) -> None:
        def gradient(*inputs: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
            value, stats = loss(*inputs)
            return torch.autograd.grad(value, parameters), stats

        self.parameters = parameters
        self.on_gpu = parameters[0].is_cuda
        # CUDA graphs, as by the mode "reduce-overhead"; and kernels that no timing chooses, in each process alike
        options = {"triton.cudagraphs": True, "deterministic": True} if self.on_gpu else None
        self.function = torch.compile(gradient, fullgraph=True, dynamic=False, options=options)
        self.may_trace = torch._dynamo.config.patch(trace_autograd_ops=True)  # 20 us to make, none to enter
        self.flats = parameters[0].new_zeros(num_shards, sum(p.numel() for p in parameters))
        self.views = []
        for flat in self.flats:
            parts = flat.split([p.numel() for p in parameters])
            # with the parameters' strides, which a fused optimiser takes for granted
            self.views.append([x.as_strided(p.shape, p.stride()) for x, p in zip(parts, parameters, strict=True)])

    def __call__(self, index: int, *inputs: Any) -> dict[str, torch.Tensor]:
        """Write the gradients of shard `index` to `flats` -> what the loss reports."""
        with self.may_trace:
            gradients, stats = self.function(*inputs)
        torch._foreach_copy_(self.views[index], gradients)
        return {name: x.clone() for name, x in stats.items()} if self.on_gpu else stats  # CUDA graphs write there again


def require_same_on_any_process(loss: nn.Module) -> None:
    """Raise `BadInput` for a module whose random numbers or statistics would differ between processes."""
    for name, module in loss.named_modules():
        fault = ""
        if isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU):
            fault = "draws for each process alone; leave it out, or draw as rule 2 of docs/modify.md says"
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) or getattr(module, "track_running_stats", False):
            fault = "keeps statistics of each process alone; take nn.LayerNorm"
        if fault and module.training:
            name = name.removeprefix("module.")
            raise BadInput(f"{name}: {type(module).__name__} {fault} (one process without --shards may have it).")


def tree_sum(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Lists of equal length -> their sum: of neighbours, then of neighbouring sums, up to one."""
    while len(parts) > 1:
        sums = [torch._foreach_add(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = sums + parts[2 * len(sums) :]
    return parts[0]


def sum_over_ranks(buffer: torch.Tensor, world: World) -> None:
    """Replace `buffer` (n,) by its sum over ranks, along a binary tree of ranks."""
    if world.memory:
        for part in buffer.split(SLOT // 8):  # numbers of at most 8 bytes
            table = torch.from_numpy(world.memory.gather(part.view(torch.uint8).numpy()))  # collective
            [total] = tree_sum([[row] for row in table.view(buffer.dtype)])
            part.copy_(total)
        return
    distance = 1
    while distance < world.world_size:  # a + b on one rank, b + a on the other: the same bits
        other = world.rank ^ distance
        sent = buffer if world.nccl else buffer.cpu()  # gloo sends CPU tensors only
        received = torch.empty_like(sent)
        operations = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(operations):  # collective
            work.wait()
        buffer += received.to(buffer.device)
        distance *= 2
