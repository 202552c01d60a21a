"""Acting on a few observations: what a module's `forward` computes, translated from its own code to numpy.

On a few observations torch's calls cost five times the arithmetic. torch.fx runs `forward` once on symbols and
records each operation; a plain Python function then does the same in numpy, or in torch on numpy's memory. It reads
the parameters' own memory, so it sees an optimiser's step at once. If an operation has no translation, the module acts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from common.distributed import World
from common.errors import Fault
from common.shards import per_shard
from common.tensors import to_tensor, upload


class Acting:
    """Computes on arrays what a module's `forward` computes on tensors; of several results, the first.

    `derived` is the translation to numpy, or None: then the module acts, and `note` prints one line that says why. On
    images the module always acts, and nothing is printed. `shards`: each shard's slice of this process's environments.
    `forward`, if given, is called in the module's place: a CUDA graph of it, for instance.
    """

    def __init__(
        self, module: nn.Module, world: World, shards: list[slice], note: Callable, forward: Callable | None = None
    ) -> None:
        self.module, self.world, self.shards, self.forward = module, world, shards, forward or module
        self.note = functools.cache(note)  # each reason once
        self.derived, self.copy_parameters, self.attributes = None, lambda: None, None

    def network(self, *inputs: np.ndarray) -> np.ndarray:
        """The module itself, on its device: arrays (n, ...) -> an array (n, ...)."""
        with torch.inference_mode():
            tensors = upload([to_tensor(x) for x in inputs], self.world.device)
            return first_result(self.forward(*tensors)).cpu().numpy()

    def refresh(self, *inputs: np.ndarray) -> Callable[..., np.ndarray]:
        """Returns the function that acts for all environments here, after a comparison with the module on `inputs`.

        Call this before each rollout, or every few hundred steps, and `copy_parameters` after updates (for a GPU).
        Raises `Fault` if the two differ by more than rounding: then `forward` reads a number that changes and that is
        no attribute.
        """
        return per_shard(self.choose(*inputs), self.shards, self.world)

    def choose(self, *inputs: np.ndarray) -> Callable[..., np.ndarray]:
        """What acts on one shard: the translation, made again if an attribute has changed, or the module."""
        if any(x.ndim > 2 for x in inputs):
            return self.network
        attributes, kind = [snapshot(vars(part)) for part in self.module.modules()], type(self.module).__name__
        try:
            if attributes != self.attributes:
                self.attributes, self.derived = attributes, None
                self.derived, self.copy_parameters = derive(self.module, self.world.device, len(inputs))
            if self.derived is None:
                return self.network
            self.copy_parameters()
            expected, result = self.network(*inputs), self.derived(*inputs)
            if (result.shape, result.dtype) != (expected.shape, expected.dtype):
                raise Unknown(f"numpy gives {result.dtype} {result.shape}, torch {expected.dtype} {expected.shape}")
        except Exception as error:  # an error of the module's own comes again when it acts
            self.note(f"{kind} acts by torch, more slowly than by numpy ({' '.join(str(error).split())})")
            self.derived, self.copy_parameters = None, lambda: None
            return self.network
        gap, size, *sizes = (np.abs(x).max(initial=0.0) for x in (result - expected, expected, *inputs))
        if gap > 1e-4 * max(size, *sizes):  # False where a network has diverged, which is said elsewhere
            differs = f"{kind}.forward differs from its translation, by {gap:.2g} of {size:.2g}"
            raise Fault(f"{differs}: keep each number that it reads and that changes in an attribute of its module.")
        return self.derived


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
    """Records operations, inside layers too, and every tensor that they read."""

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
        node = self.create_node("get_attr", "tensor", (), {})
        node.meta["tensor"] = value.detach()
        return node


def derive(module: nn.Module, device: torch.device, num_inputs: int) -> tuple[Callable, Callable[[], Any]]:
    """Returns `forward` as a function of arrays, and a function that copies its parameters; or raises `Unknown`."""
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or nn.utils.parametrize.is_parametrized(part):
            raise Unknown("a hook or a parametrization", [(name, type(part))])
    options = list(inspect.signature(module.forward).parameters.values())[num_inputs:]
    gpus = [device] if device.type == "cuda" else []
    tracer, attributes = Tracer(), [(part, dict(vars(part))) for part in module.modules()]
    with torch.random.fork_rng(gpus):
        states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]
        try:
            graph = tracer.trace(module, {option.name: option.default for option in options})
        except Exception as error:
            raise Unknown(str(error).partition(". ")[0], tracer.module_stack.values()) from error
        finally:
            for part, before in attributes:  # `forward` may have set some
                part.__dict__ = before
        if not all(map(torch.equal, states, [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)])):
            raise Unknown("random numbers are drawn")

    reads = [node for node in graph.nodes if node.op == "get_attr"]
    arrays, copy_parameters = arrays_of([node.meta["tensor"] for node in reads], device)
    names = {"torch": np, "device": torch.device, "inf": np.inf, "nan": np.nan}  # numpy has torch's types
    for node, array in zip(reads, arrays, strict=True):
        names |= {node.name: array, f"{node}_T": array.T}
    return compiled(graph, names, num_inputs), copy_parameters


def arrays_of(tensors: list[torch.Tensor], device: torch.device) -> tuple[list[np.ndarray], Callable]:
    """Returns tensors as arrays, and a function that updates these: a CPU's share memory, a GPU's are copied."""
    if device.type == "cpu":
        return [x.numpy() for x in tensors], lambda: None
    copy = torch.cat([x.reshape(-1) for x in tensors]).cpu()
    if any(x.dtype != copy.dtype for x in tensors):
        raise Unknown("tensors of several types on a GPU")
    parts = zip(copy.split([x.numel() for x in tensors]), tensors, strict=True)
    arrays = [part.view(x.shape).numpy() for part, x in parts]
    return arrays, lambda: copy.copy_(torch.cat([x.reshape(-1) for x in tensors]))


def compiled(graph: fx.Graph, names: dict[str, Any], num_inputs: int) -> Callable[..., np.ndarray]:
    """Returns a Python function for the first result of a graph, without the operations that it does not need."""
    *nodes, output = graph.nodes
    inputs = [node.name for node in nodes if node.op == "placeholder"][:num_inputs]
    result = first_result(output.args[0])
    needed, lines = {result}, [f"return {result!r}"]  # from the last line to the first
    for node in reversed(nodes):
        operation = getattr(node.target, "__name__", node.target)
        if node.op.startswith("call") and (node in needed or operation.endswith("_")):  # in place, like `add_`
            last_used = [x for x in node.all_input_nodes if x not in needed]
            needed.update(last_used)
            lines += [f"del {x}" for x in last_used if x.op.startswith("call")]
            lines.append(f"{node} = {expression(node, operation, names)}")
    exec("\n    ".join([f"def function({', '.join(inputs)}):", *reversed(lines)]), names)
    return names["function"]


def expression(node: fx.Node, name: str, names: dict[str, Any]) -> str:
    """Returns the operation called `name` as Python code, and adds the function that it calls to `names`."""
    words = [repr(x) for x in node.args]
    if name == "linear" and len(words) == 3 and None not in node.args and node.args[1].op == "get_attr":
        return "{} @ {}_T + {}".format(*words)
    if name in OPERATORS and not node.kwargs:
        return OPERATORS[name].format(*words)
    if name in NUMPY:
        function = NUMPY[name]
    elif name == "getattr" and node.args[1] in ("dtype", "shape", "ndim"):
        function = getattr
    elif name in TORCH:
        function = on_arrays(getattr(torch.Tensor, name) if node.op == "call_method" else node.target)
    else:
        raise Unknown(f"{name} is not translated", node.meta.get("nn_module_stack", {}).values())
    names[f"do_{node}"] = function
    words += [f"{word}={x!r}" for word, x in node.kwargs.items()]
    return f"do_{node}({', '.join(words)})"


def on_arrays(function: Callable) -> Callable:
    """Returns a function of torch that takes and gives arrays."""

    def tensor(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return torch.from_numpy(x if x.flags.writeable else x.copy())
        return x

    def apply(*args: Any, **options: Any) -> Any:
        output = function(*map(tensor, args), **{name: tensor(x) for name, x in options.items()})
        return output.numpy() if isinstance(output, torch.Tensor) else [x.numpy() for x in output]

    return apply


def chunk(x: np.ndarray, chunks: int, dim: int = 0) -> list[np.ndarray]:
    size, after = -(-x.shape[dim] // chunks), (slice(None),) * (x.ndim - 1 - dim % x.ndim)
    return [x[(..., slice(i, i + size), *after)] for i in range(0, x.shape[dim], size)]


# by torch's names; what is in none of these has no translation. fx has operators such as "add": "{} + {}"
OPERATORS = {**fx.graph.magic_methods, "pow": "({}) ** {}", "to": "{}.astype({}, copy=False)"}
NUMPY = {
    "linear": lambda x, weight, bias=None: x @ weight.T + (0.0 if bias is None else bias),
    "relu": lambda x, inplace=False: np.maximum(x, 0.0, out=x if inplace else None),
    "clamp": lambda x, min=None, max=None: np.clip(x, min, max),
    "chunk": chunk,
    "expand_as": lambda x, other: np.broadcast_to(x, other.shape),
    "cat": lambda tensors, dim=0: np.concatenate(tensors, dim),
    "stack": lambda tensors, dim=0: np.stack(tensors, dim),
    "mean": lambda x, dim=None, keepdim=False: x.mean(dim, keepdims=keepdim),
    "sum": lambda x, dim=None, keepdim=False: x.sum(dim, keepdims=keepdim),
    "float": lambda x: x.astype(np.float32, copy=False),
    "size": lambda x, dim=None: x.shape if dim is None else x.shape[dim],
}
NUMPY |= {"abs": np.abs, "cos": np.cos, "exp": np.exp, "log": np.log, "sin": np.sin, "sqrt": np.sqrt}
NUMPY |= {"square": np.square, "tanh": np.tanh}
TORCH = """elu silu gelu mish leaky_relu hardtanh softplus sigmoid softmax log_softmax layer_norm rms_norm
    amax amin max min maximum minimum std var logsumexp where erf log1p expm1 detach clone contiguous
    expand split unbind flatten view reshape squeeze unsqueeze transpose permute""".split()  # torch on that memory
