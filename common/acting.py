"""Acting on a few observations: what a module's `forward` computes, translated from its own code to numpy.

On a few observations torch's calls cost five times the arithmetic. torch.fx runs `forward` once on symbols and records
each operation; these are replaced by numpy's, on the parameters' own memory, so that an optimiser's step is seen at
once. What numpy lacks is done by torch on that memory. If an operation cannot be translated, the module acts.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from common.distributed import World
from common.tensors import to_tensor, upload

PERIOD = 64  # calls between two comparisons with the module, the same ones on every process
optimizer_steps = Counter()  # of all optimisers: fused ones leave the versions of tensors as they were
register_optimizer_step_post_hook(lambda *_: optimizer_steps.update(["steps"]))


class Acting:
    """What a module's `forward` computes, of arrays (n, ...) for this process's environments, shard by shard.

    Of several results, the first. `shards`: each shard's slice of the n. `derived` is the translation, or None: then
    the module acts, and `notes` (to be printed once each) say why. On images the module always acts.
    """

    def __init__(self, module: nn.Module, world: World, shards: list[slice], note: Callable[[str], None]) -> None:
        self.module = module
        self.world = world
        self.shards = shards
        self.note = functools.cache(note)  # each text once
        self.restart()

    def restart(self) -> None:
        """Translate anew at the next call: a run that goes on from a checkpoint does so too."""
        self.calls = 0
        self.attributes: Any = None
        self.derived: Derived | None = None

    def __call__(self, *inputs: np.ndarray) -> np.ndarray:
        parts = [inputs]
        if self.world.sharded:
            parts = [[to_tensor(x[shard]).numpy() for x in inputs] for shard in self.shards]
        if self.calls % PERIOD == 0:
            self._choose(parts)
        self.calls += 1
        if self.derived is not None:
            self.derived.update()
        results = [function(*part) for function, part in zip(self.functions, parts, strict=True)]
        return results[0] if len(results) == 1 else np.concatenate(results)

    def by_module(self, *inputs: np.ndarray) -> np.ndarray:
        """The module itself, on its device: arrays (n, ...) -> an array (n, ...)."""
        with torch.inference_mode():
            tensors = upload([to_tensor(x) for x in inputs], self.world.device)
            return first_result(self.module(*tensors)).cpu().numpy()

    def _choose(self, parts: list[list[np.ndarray]]) -> None:
        """Choose for each shard what acts: the translation, made again if an attribute has changed, or the module."""
        attributes = [snapshot(vars(part)) for part in self.module.modules()]
        if attributes != self.attributes:
            self.attributes = attributes
            self.functions = [self.by_module] * len(parts)
            self.derived = None
            if any(x.ndim > 2 for x in parts[0]):
                return
            try:
                self.derived = Derived(self.module, self.world.device, len(parts[0]))
            except Unknown as error:
                self._act_by_module(str(error))
                return
            self.functions = [self.derived] * len(parts)
        for number, part in enumerate(parts):
            if self.functions[number] is self.derived and self.derived is not None:
                self.derived.update()
                if difference := self._difference(part):
                    self.functions[number] = self.by_module
                    self._act_by_module(difference)

    def _difference(self, inputs: list[np.ndarray]) -> str:
        """How the translation's result differs from the module's by more than rounding; empty if it does not."""
        expected = self.by_module(*inputs)
        try:
            result = np.asarray(self.derived(*inputs))
        except Exception as error:  # an error of the module's own comes again when it acts
            return str(error)
        if (result.shape, result.dtype) != (expected.shape, expected.dtype):
            return f"numpy gives {result.dtype} {result.shape}, torch {expected.dtype} {expected.shape}"
        gap = np.abs(result - expected).max(initial=0.0)
        size = max(np.abs(x).max(initial=0.0) for x in (expected, *inputs))
        if gap > 1e-4 * size:  # False if a network has diverged, which is said elsewhere
            return f"its translation gives other numbers, by {gap:.2g} of {size:.2g}"
        return ""

    def _act_by_module(self, reason: str) -> None:
        kind = type(self.module).__name__
        self.note(f"{kind} acts by torch, more slowly than by numpy ({' '.join(reason.split())})")


def first_result(output: Any) -> Any:
    return output[0] if isinstance(output, list | tuple) else output


INTERNAL = vars(nn.Module()).keys() - {"training", "_parameters", "_buffers", "_modules"}
INTERNAL -= {"_forward_hooks", "_forward_pre_hooks"}


def snapshot(value: Any) -> Any:
    """An attribute's state, to be compared later: numbers by value, tensors by address, else the identity."""
    if isinstance(value, dict):
        return {name: snapshot(x) for name, x in value.items() if name not in INTERNAL}
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return [snapshot(x) for x in value] if isinstance(value, list | tuple) else id(value)


class Unknown(Exception):
    """What has no translation, and the layer that it is in."""

    def __init__(self, what: str, layers: Iterable[tuple[str, type]] = ()) -> None:
        innermost = list(layers)[-1:]
        super().__init__(what + "".join(f", in {kind.__name__} {path}".rstrip() for path, kind in innermost))


class Symbol(fx.Proxy):
    """A tensor while `forward` is recorded. `x += y` changes x under all its names, which fx would record as x + y."""

    def in_place(self, other: Any) -> Any:
        raise Unknown("an operation such as += is not translated")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = in_place
    __imatmul__ = __iand__ = __ior__ = __ixor__ = in_place


class Tracer(fx.Tracer):
    """Records operations, inside layers too, and every tensor that they read (`tensors`, by name)."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Symbol(node, self)

    def is_leaf_module(self, *_: Any) -> bool:
        return False

    def path_of_module(self, module: nn.Module) -> str:
        return next((name for name, part in self.root.named_modules() if part is module), "made in forward")

    def getattr(self, name: str, value: Any, *_: Any) -> Any:
        return self.proxy(self.create_arg(value)) if isinstance(value, torch.Tensor) else value

    def create_arg(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return super().create_arg(value)
        name = f"tensor_{len(self.tensors)}"
        self.tensors[name] = value.detach()
        return self.create_node("get_attr", name, (), {})


class Derived:
    """A module's `forward`, translated to numpy; or raises `Unknown`. `num_inputs`: how many arrays it is to take."""

    def __init__(self, module: nn.Module, device: torch.device, num_inputs: int) -> None:
        for name, part in module.named_modules():
            if part._forward_hooks or part._forward_pre_hooks or nn.utils.parametrize.is_parametrized(part):
                raise Unknown("a hook or a parametrization", [(name, type(part))])
        options = list(inspect.signature(module.forward).parameters.values())[num_inputs:]
        tracer = Tracer()
        attributes = [(part, dict(vars(part))) for part in module.modules()]
        try:
            graph = tracer.trace(module, {option.name: option.default for option in options})
        except Exception as error:
            raise Unknown(str(error).partition(". ")[0], tracer.module_stack.values()) from error
        finally:
            for part, before in attributes:  # `forward` may have set some
                part.__dict__ = before
        self.tensors = tracer.tensors
        self.versions: list[int] = []
        arrays = {name: x.cpu().numpy() for name, x in self.tensors.items()}  # on a CPU, the same memory
        self.copies = arrays if device.type != "cpu" else {}
        translate(graph, num_inputs)
        self.function = fx.GraphModule(arrays, graph).forward

    def __call__(self, *inputs: np.ndarray) -> np.ndarray:
        return self.function(*inputs)

    def update(self) -> None:
        """Copy parameters that an optimiser has changed on a GPU."""
        if self.copies:
            versions = [optimizer_steps["steps"], *(x._version for x in self.tensors.values())]
            if versions != self.versions:
                self.versions = versions
                for name, copy in self.copies.items():
                    torch.from_numpy(copy).copy_(self.tensors[name])


def translate(graph: fx.Graph, num_inputs: int) -> None:
    """Replace a graph's operations by numpy's, and leave out what its first result does not need."""
    *nodes, output = graph.nodes
    output.args = (first_result(output.args[0]),)
    inputs = [node for node in nodes if node.op == "placeholder"][:num_inputs]
    for node in reversed(nodes):
        name = getattr(node.target, "__name__", node.target)
        if node.op.startswith("call") and name.endswith("_"):  # in place, like `add_`
            raise Unknown(f"{name} is not translated", node.meta.get("nn_module_stack", {}).values())
        if not node.users and node not in inputs:
            graph.erase_node(node)
    for node in graph.nodes:
        if not node.op.startswith("call"):
            continue
        name = getattr(node.target, "__name__", node.target)
        if getattr(node.target, "__module__", None) in ("_operator", "builtins"):
            continue  # these take arrays too; and of Python's numbers they make Python's, not numpy's float64
        if name in NUMPY:
            node.target = NUMPY[name]
        elif node.op == "call_method":
            node.target = on_arrays(name, getattr(torch.Tensor, name))
        else:
            node.target = on_arrays(name, node.target)
        node.op = "call_function"


def on_arrays(name: str, function: Callable) -> Callable:
    """Returns a function of torch that takes and gives arrays."""

    def tensor(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x if x.flags.writeable else x.copy())

    def apply(*args: Any, **options: Any) -> Any:
        args, options = tree_map_only(np.ndarray, tensor, (args, options))
        return tree_map_only(torch.Tensor, torch.Tensor.numpy, function(*args, **options))

    apply.__name__ = f"torch_{name}"
    return apply


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    return x @ weight.T if bias is None else x @ weight.T + bias


def relu(x: np.ndarray, inplace: bool = False) -> np.ndarray:
    return np.maximum(x, 0.0, out=x if inplace else None)


def clamp(x: np.ndarray, min: Any = None, max: Any = None) -> np.ndarray:
    return np.clip(x, min, max)


def cat(arrays: list[np.ndarray], dim: int = 0) -> np.ndarray:
    return np.concatenate(arrays, dim)


def chunk(x: np.ndarray, chunks: int, dim: int = 0) -> list[np.ndarray]:
    size = -(-x.shape[dim] // chunks)
    after = (slice(None),) * (x.ndim - 1 - dim % x.ndim)
    return [x[(..., slice(i, i + size), *after)] for i in range(0, x.shape[dim], size)]


def expand_as(x: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x, other.shape)


def to(x: np.ndarray, dtype: Any) -> np.ndarray:
    """`dtype`: torch's, or an array's own, of which `x.dtype` was asked."""
    return x.astype(numpy_type(dtype) if isinstance(dtype, torch.dtype) else dtype, copy=False)


@functools.cache
def numpy_type(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


# by torch's names; what is not here is done by torch. `tensor * symbol` is recorded as Tensor.mul
NUMPY = {"linear": linear, "relu": relu, "clamp": clamp, "chunk": chunk, "expand_as": expand_as, "to": to}
NUMPY |= {"cat": cat, "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
NUMPY |= {"truediv": np.divide, "neg": np.negative, "pow": np.power, "tanh": np.tanh, "exp": np.exp}
