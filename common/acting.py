"""Acting on a few observations: what a module's `forward` computes, translated from its own code to numpy.

On a few observations torch's calls cost five times the arithmetic. torch.fx runs `forward` once on symbols and
records its operations. numpy's take their place, on the parameters' own memory (for a GPU, on copies that
follow each update). What numpy lacks is done by torch. If `forward` cannot be translated, the module acts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from common.distributed import World
from common.tensors import to_tensor, upload

PERIOD = 64  # calls between two comparisons with the module, the same ones on every process


class Acting:
    """The first result of a module's `forward` on arrays (n, ...) of this process's environments, shard by shard.

    The numpy translation acts (`derived`). The module itself acts for images, without a translation, and on
    a shard where the two differ; `note` says why, except for images.
    """

    def __init__(self, module: nn.Module, world: World, shards: list[slice], note: Callable[[str], None]) -> None:
        self.module = module
        self.world = world
        self.shards = shards
        self.note = functools.cache(note)  # each text once
        self.restart()

    def restart(self) -> None:
        """Translate anew at the next call, as after a resume."""
        self.calls = 0
        self.attributes: Any = None
        self.derived: Derived | None = None
        self.parameters_changed = False  # by an update since the last call

    def __call__(self, *inputs: np.ndarray) -> np.ndarray:
        parts = [inputs]
        if self.world.sharded:  # aligned: MKL rounds by address
            parts = [[to_tensor(x[shard]).numpy() for x in inputs] for shard in self.shards]
        if self.parameters_changed and self.derived is not None:
            self.derived.copy_parameters()
        self.parameters_changed = False
        if self.calls % PERIOD == 0:
            self._choose(parts)
        self.calls += 1
        if len(parts) == 1:
            return self.functions[0](*parts[0])
        return np.concatenate([function(*part) for function, part in zip(self.functions, parts, strict=True)])

    def by_module(self, *inputs: np.ndarray) -> np.ndarray:
        """The module itself, on its device: arrays (n, ...) -> an array (n, ...)."""
        with torch.inference_mode():
            tensors = upload([to_tensor(x) for x in inputs], self.world.device)
            return first_result(self.module(*tensors)).cpu().numpy()

    def _choose(self, parts: list[list[np.ndarray]]) -> None:
        """Choose what acts for each shard. Translate anew if an attribute of the module has changed."""
        attributes = [snapshot(vars(part)) for part in self.module.modules()]
        if attributes != self.attributes:
            self.attributes = attributes
            self.derived = None
            if all(x.ndim <= 2 for x in parts[0]):
                try:
                    self.derived = Derived(self.module, self.world.device, len(parts[0]))
                except Exception as error:
                    self._say(str(error).partition(". ")[0])
            self.functions = [self.derived.function if self.derived else self.by_module] * len(parts)
        for number, part in enumerate(parts):
            if self.functions[number] != self.by_module:
                difference = self._difference(part)
                if difference:
                    self.functions[number] = self.by_module
                    self._say(difference)

    def _difference(self, inputs: list[np.ndarray]) -> str:
        """How the translation's result differs from the module's by more than rounding, or nothing."""
        expected = self.by_module(*inputs)
        try:
            result = np.asarray(self.derived.function(*inputs))
        except Exception as error:
            return str(error)
        if (result.shape, result.dtype) != (expected.shape, expected.dtype):
            return f"numpy gives {result.dtype} {result.shape}, torch {expected.dtype} {expected.shape}"
        gap = np.abs(result - expected).max(initial=0.0)
        largest_input = max(np.abs(x).max(initial=0.0) for x in inputs)
        # of larger inputs the result is large too, or the module scales them first
        size = max(np.abs(expected).max(initial=0.0), min(largest_input, 100.0))
        differs = not gap <= 1e-4 * size and np.isfinite(expected).all()  # divergence is said elsewhere
        return f"its translation gives other numbers, by {gap:.2g} of {size:.2g}" if differs else ""

    def _say(self, reason: str) -> None:
        kind = type(self.module).__name__
        self.note(f"{kind} acts by torch, more slowly than by numpy ({' '.join(reason.split())})")


def first_result(output: Any) -> Any:
    return output[0] if isinstance(output, list | tuple) else output


INTERNAL = vars(nn.Module()).keys() - {"training", "_parameters", "_buffers", "_modules"}


def snapshot(value: Any) -> Any:
    """An attribute's state, to be compared later: numbers by value, tensors by address, else the identity."""
    if isinstance(value, dict):
        return {name: snapshot(x) for name, x in value.items() if name not in INTERNAL}
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return [snapshot(x) for x in value] if isinstance(value, list | tuple) else id(value)


class Tracer(fx.Tracer):
    """Records operations, inside layers too, and every tensor that they read (`tensors`, by name)."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}

    def is_leaf_module(self, *_: Any) -> bool:
        return False

    def path_of_module(self, module: nn.Module) -> str:
        return ""  # also of layers that are made in `forward`

    def getattr(self, name: str, value: Any, *_: Any) -> Any:
        return self.proxy(self.create_arg(value)) if isinstance(value, torch.Tensor) else value

    def create_arg(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return super().create_arg(value)
        name = f"tensor_{len(self.tensors)}"
        self.tensors[name] = value.detach()
        return self.create_node("get_attr", name, (), {})


class Derived:
    """A module's `forward` of `num_inputs` arrays, in numpy. Raises an error for what has no translation."""

    def __init__(self, module: nn.Module, device: torch.device, num_inputs: int) -> None:
        for part in module.modules():
            if part._forward_hooks or part._forward_pre_hooks or nn.utils.parametrize.is_parametrized(part):
                raise ValueError(f"{type(part).__name__} has a hook or a parametrization")
        options = list(inspect.signature(module.forward).parameters.values())[num_inputs:]
        tracer = Tracer()
        graph = tracer.trace(module, {option.name: option.default for option in options})
        translate(graph, num_inputs)
        self.tensors = list(tracer.tensors.values())
        arrays = {name: x.cpu().numpy() for name, x in tracer.tensors.items()}  # on a CPU, the same memory
        self.copies = list(arrays.values()) if device.type != "cpu" else []
        self.function = fx.GraphModule(arrays, graph).forward

    def copy_parameters(self) -> None:
        """Copy tensors that lie on a GPU to the arrays, as one."""
        if self.copies:
            device = self.tensors[0].device  # constants may lie on a CPU
            packed = torch.cat([x.reshape(-1).view(torch.uint8).to(device) for x in self.tensors]).cpu()
            parts = packed.split([copy.nbytes for copy in self.copies])
            for copy, part in zip(self.copies, parts, strict=True):
                copy[...] = part.numpy().view(copy.dtype).reshape(copy.shape)


def translate(graph: fx.Graph, num_inputs: int) -> None:
    """Replace a graph's operations by numpy's, and leave out what its first result does not need."""
    *nodes, output = graph.nodes
    output.args = (first_result(output.args[0]),)
    inputs = [node for node in nodes if node.op == "placeholder"][:num_inputs]
    for node in reversed(nodes):
        is_call = node.op.startswith("call")
        is_operator = getattr(node.target, "__module__", None) in ("_operator", "builtins")
        name = getattr(node.target, "__name__", node.target)
        if is_call and not is_operator and name.endswith("_"):  # in place, like `add_`
            raise ValueError(f"{name} is not translated")
        if not node.users and node not in inputs:
            graph.erase_node(node)
        elif is_call and not is_operator:
            # operators work on arrays as they are, and keep Python's numbers Python's (not numpy's float64)
            function = getattr(torch.Tensor, name) if node.op == "call_method" else node.target
            node.target = NUMPY.get(name) or on_arrays(function)
            node.op = "call_function"


def on_arrays(function: Callable) -> Callable:
    """A torch function, made to take and give arrays."""

    def apply(*args: Any, **options: Any) -> Any:
        args, options = tree_map_only(np.ndarray, torch.tensor, (args, options))
        return tree_map_only(torch.Tensor, torch.Tensor.numpy, function(*args, **options))

    return apply


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    return x @ weight.T if bias is None else x @ weight.T + bias


def relu(x: np.ndarray, inplace: bool = False) -> np.ndarray:
    return np.maximum(x, 0.0, out=x if inplace else None)


def cat(arrays: list[np.ndarray], dim: int = 0) -> np.ndarray:
    return np.concatenate(arrays, dim)


def chunk(x: np.ndarray, chunks: int, dim: int = 0) -> list[np.ndarray]:
    size = -(-x.shape[dim] // chunks)
    after = (slice(None),) * (x.ndim - 1 - dim % x.ndim)
    return [x[(..., slice(i, i + size), *after)] for i in range(0, x.shape[dim], size)]


def expand_as(x: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x, other.shape)


def to(x: np.ndarray, dtype: Any) -> np.ndarray:
    """`dtype`: torch's, or numpy's where `forward` used `x.dtype`."""
    return x.astype(TYPES.get(dtype, dtype), copy=False)


TYPES = {torch.float32: np.float32, torch.float64: np.float64}
# by torch's names; torch does what is missing here. `tensor * symbol` is recorded as Tensor.mul
NUMPY = {"linear": linear, "relu": relu, "clamp": np.clip, "chunk": chunk, "expand_as": expand_as, "to": to}
NUMPY |= {"cat": cat, "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
NUMPY |= {"truediv": np.divide, "neg": np.negative, "pow": np.power, "tanh": np.tanh, "exp": np.exp}
