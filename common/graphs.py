"""CUDA graphs: an update, or a look at the observations, whose kernels are launched together and not one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from common.distributed import World
from common.errors import BadInput

WARMUP = 11  # calls before anything is recorded: so many DDP needs (PyTorch's notes on CUDA graphs)
MOST = 64  # recordings kept of one function
SEEN = 1024  # sets of shapes of which it is known how often they came


def graphed(wanted: bool, world: World, function: Callable, *optimizers: torch.optim.Optimizer) -> Callable:
    """`function` itself, or, if `wanted`, recorded with the steps of its `optimizers`.

    Raises `BadInput` (--cuda-graphs) where there is no GPU for each process.
    """
    if not wanted:
        return function
    if not world.nccl:
        raise BadInput("--cuda-graphs: needs a GPU for each process; leave it off (--no-cuda-graphs).")
    return Graphed(function, *optimizers)


class Graphed:
    """A function of nests of CUDA tensors that is recorded, for each set of shapes that returns, and then replayed.

    Launching a kernel takes the processor longer than a small network's arithmetic takes the GPU; a graph is launched
    as one. What the function reads besides its arguments is read where it was when recorded, so parameters may change
    only in place, and Python's numbers stay as they were. Results are copies. The arithmetic is the same. Ranks may
    record at different calls, as parts of a batch differ in size: what they exchange, and in which order, is the same.
    """

    def __init__(self, function: Callable, *optimizers: torch.optim.Optimizer) -> None:
        self.function, self.optimizers = function, optimizers
        self.calls, self.recordings = Counter(), {}  # by shapes

    def __call__(self, *inputs: Any) -> Any:
        shapes = tuple(x.shape for x in tensors_of(inputs))
        self.calls[shapes] += 1
        if len(self.calls) > SEEN:
            del self.calls[next(iter(self.calls))]  # the oldest
        new = shapes not in self.recordings
        # what shapes need is loaded in their first call, which may not be while it is recorded
        early = self.calls.total() <= WARMUP or self.calls[shapes] == 1
        if new and (early or len(self.recordings) == MOST):
            return self.function(*inputs)
        if new:
            self.recordings[shapes] = self._record(inputs)
        graph, own, outputs = self.recordings[shapes]
        torch._foreach_copy_(tensors_of(own), tensors_of(inputs))
        graph.replay()
        return None if outputs is None else copies(outputs)

    def _record(self, inputs: Any) -> tuple[torch.cuda.CUDAGraph, Any, Any]:
        """The graph, and where it reads its inputs and leaves its outputs."""
        graph, own = torch.cuda.CUDAGraph(), copies(inputs)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group in groups:  # asked for while recording, and else warned of
            group["capturable"] = True
        # on the stream of all else, where DDP's hooks run too; NCCL's own thread may ask after earlier work meanwhile
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            outputs = self.function(*own)
        for group in groups:
            group["capturable"] = False
        return graph, own, outputs


def tensors_of(nest: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, tuples and dicts."""
    return [x for x in tree_leaves(nest) if isinstance(x, torch.Tensor)]


def copies(nest: Any) -> Any:
    """The same nest of copied tensors, in the same layouts."""
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, nest)


def given(number: float, device: torch.device) -> float | torch.Tensor:
    """A learning rate that changes, as Adam takes it: on a GPU a float32 tensor, since a graph would keep a number."""
    return number if device.type == "cpu" else torch.tensor(number, dtype=torch.float32, device=device)
