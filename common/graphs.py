"""CUDA graphs: the kernels of an update, or of a look at the observations, launched together and not one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from common.distributed import World
from common.errors import BadInput
from common.tensors import tensors_of

WARMUP = 11  # calls before anything is recorded: DDP needs so many (PyTorch's notes on CUDA graphs)
MOST = 64  # recordings of one function
SEEN = 1024  # sets of shapes whose calls are counted


def graphed(wanted: bool, world: World, function: Callable, *optimizers: torch.optim.Optimizer) -> Callable:
    """`function` itself, or, if `wanted`, a `Graphed` of it with the steps of its `optimizers`.

    Raises `BadInput` (--cuda-graphs) where there is no GPU for each process.
    """
    if wanted and not world.nccl:
        raise BadInput("--cuda-graphs: needs a GPU for each process; leave it off (--no-cuda-graphs).")
    return Graphed(function, *optimizers) if wanted else function


class Graphed:
    """A function of nests of CUDA tensors; for each set of shapes that returns, it is recorded and then replayed.

    A processor takes longer to launch a kernel than a GPU to do a small network's arithmetic; a graph is launched as
    one. A replay reads all but the arguments where the recording did: parameters may change only in place, and Python's
    numbers stay as they were. Results are copies. The arithmetic is the same. Where ranks exchange numbers by NCCL, all
    must record at the same calls.
    """

    def __init__(self, function: Callable, *optimizers: torch.optim.Optimizer) -> None:
        self.function, self.optimizers = function, optimizers
        self.calls, self.recordings = Counter(), {}  # by shapes

    def __call__(self, *inputs: Any) -> Any:
        shapes = tuple(x.shape for x in tensors_of(inputs))
        self.calls[shapes] += 1
        if len(self.calls) > SEEN:
            del self.calls[next(iter(self.calls))]  # the oldest
        if shapes not in self.recordings:
            # a first call loads what these shapes need, which may not happen while it is recorded
            early = self.calls.total() <= WARMUP or self.calls[shapes] == 1
            if early or len(self.recordings) == MOST:
                return self.function(*inputs)
            self.recordings[shapes] = self._record(inputs)
        graph, own_inputs, outputs = self.recordings[shapes]
        torch._foreach_copy_(tensors_of(own_inputs), tensors_of(inputs))
        graph.replay()
        return copies(outputs)

    def _record(self, inputs: Any) -> tuple[torch.cuda.CUDAGraph, Any, Any]:
        """The graph, the inputs that it reads, and the outputs that it writes."""
        graph, own_inputs = torch.cuda.CUDAGraph(), copies(inputs)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group in groups:  # torch asks for this while it records, and warns of it otherwise
            group["capturable"] = True
        # on the stream of all else, where DDP's hooks run too; NCCL's own thread may ask after earlier work meanwhile
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            outputs = self.function(*own_inputs)
        for group in groups:
            group["capturable"] = False
        return graph, own_inputs, outputs


def copies(nest: Any) -> Any:
    """The same nest of copied tensors, in the same layouts."""
    return tree_map_only(torch.Tensor, torch.clone, nest)
