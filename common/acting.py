"""Acting on a few observations: what a module's `forward` computes, translated from its own code to numpy.

On a few rows torch's calls cost five times the arithmetic. torch.fx runs `forward` once on symbols and records each
operation; numpy then does them, or torch on the same memory, in one plain Python function. Parameters are read where
they are, so a step of an optimiser is seen at once. What cannot be translated is left to the module itself.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from common.errors import Fault
from common.shards import to_tensor


class Acting:
    """Computes on arrays what a module's `forward` computes on tensors; of several results, the first.

    `derived` is the translation to numpy, or None. If there is none, the module acts, and `note` prints one line that
    says why. On images the module always acts, and nothing is printed. `forward`, if given, is called in the module's
    place: a CUDA graph of it, for instance.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, note: Callable[[str], None], forward: Callable | None = None
    ) -> None:
        self.module, self.device, self.note, self.forward = module, device, note, forward or module
        self.derived, self.copy_parameters, self.attributes, self.reason = None, nothing, None, ""

    def network(self, *inputs: np.ndarray) -> np.ndarray:
        """The module itself, on its device: arrays (n, ...) -> an array (n, ...)."""
        with torch.inference_mode():
            return first_result(self.forward(*(to_tensor(x, self.device) for x in inputs))).cpu().numpy()

    def refresh(self, *inputs: np.ndarray) -> Callable[..., np.ndarray]:
        """Returns the function that acts until the next call, compared with the module on `inputs`.

        Call this before each rollout, or every few hundred steps, and `copy_parameters` after updates, which a GPU
        needs. The module is translated again if a plain attribute of it has changed. Raises `Fault` if the two differ
        by more than rounding: then `forward` reads a number that changes and that is no attribute.
        """
        if any(x.ndim > 2 for x in inputs):
            return self.network
        attributes = attributes_of(self.module)
        if attributes != self.attributes:
            self.attributes = attributes
            try:
                self.derived, self.copy_parameters = derive(self.module, self.device, len(inputs))
            except Exception as error:
                self._give_up(error)
        if self.derived is None:
            return self.network
        self.copy_parameters()
        expected = self.network(*inputs)  # first, so that an error of the module's own is shown as such
        try:
            result = self.derived(*inputs)
            if (result.shape, result.dtype) != (expected.shape, expected.dtype):
                raise Unknown(f"numpy gives {result.dtype} {result.shape}, torch {expected.dtype} {expected.shape}")
        except Exception as error:
            self._give_up(error)
            return self.network
        gap, size, *sizes = (np.abs(x).max(initial=0.0) for x in (result - expected, expected, *inputs))
        if gap > 1e-4 * max(size, *sizes):  # False where a network has diverged, which is said elsewhere
            differs = f"{type(self.module).__name__}.forward differs from its translation, by {gap:.2g} of {size:.2g}"
            raise Fault(f"{differs}: keep each number that it reads and that changes in an attribute of its module.")
        return self.derived

    def _give_up(self, error: Exception) -> None:
        self.derived, self.copy_parameters = None, nothing
        before, self.reason = self.reason, " ".join(str(error).split())
        if self.reason != before:
            self.note(f"{type(self.module).__name__} acts by torch, more slowly than by numpy ({self.reason})")


def nothing() -> None:
    pass


class Unknown(Exception):
    """The operation that has no translation, and the layer that it is in."""


INTERNAL = vars(nn.Module()).keys() - {"training", "_parameters", "_buffers", "_modules"}
INTERNAL -= {"_forward_hooks", "_forward_pre_hooks"}


def attributes_of(module: nn.Module) -> list[dict[str, Any]]:
    """All that `forward` may read of its modules, to be compared later: numbers by value, tensors by address."""

    def snapshot(value: Any) -> Any:
        if isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            return value.data_ptr()
        if isinstance(value, dict):
            return {name: snapshot(x) for name, x in value.items()}
        return [snapshot(x) for x in value] if isinstance(value, list | tuple) else id(value)

    parts = map(vars, module.modules())
    return [{name: snapshot(x) for name, x in part.items() if name not in INTERNAL} for part in parts]


def first_result(output: Any) -> Any:
    return output[0] if isinstance(output, list | tuple) else output


class Tracer(fx.Tracer):
    """Records operations, inside layers too, and every tensor that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}

    def is_leaf_module(self, *_: Any) -> bool:
        return False

    def path_of_module(self, module: nn.Module) -> str:
        return next((name for name, part in self.root.named_modules() if part is module), "made in forward")

    def getattr(self, name: str, value: Any, *_: Any) -> Any:
        return self.proxy(self.create_arg(value)) if isinstance(value, torch.Tensor) else value

    def create_arg(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return super().create_arg(value)
        self.tensors[f"tensor{id(value)}"] = value
        return self.create_node("get_attr", f"tensor{id(value)}", (), {})


def derive(module: nn.Module, device: torch.device, num_inputs: int) -> tuple[Callable, Callable[[], None]]:
    """Returns `forward` as a function of arrays, and what copies its parameters again. Raises what says why not."""
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or nn.utils.parametrize.is_parametrized(part):
            raise Unknown(f"a hook or a parametrization, in {type(part).__name__} {name}".rstrip())
    tracer, before = Tracer(), [(part, dict(vars(part))) for part in module.modules()]
    options = list(inspect.signature(module.forward).parameters.values())[num_inputs:]
    generators = [torch, torch.cuda] if device.type == "cuda" else [torch]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        states = [generator.get_rng_state() for generator in generators]
        try:
            graph = tracer.trace(module, {option.name: option.default for option in options})
        except Exception as error:
            raise Unknown(f"{str(error).partition('. ')[0]}{inside(tracer.module_stack)}") from error
        finally:
            for part, attributes in before:  # `forward` may have set some
                vars(part).clear()
                vars(part).update(attributes)
        if not all(state.equal(x.get_rng_state()) for state, x in zip(states, generators, strict=True)):
            raise Unknown("random numbers are drawn")
    arrays, copy_parameters = arrays_of([x.detach() for x in tracer.tensors.values()], device)
    return compiled(graph, dict(zip(tracer.tensors, arrays, strict=True)), num_inputs), copy_parameters


def inside(stack: Mapping[str, tuple[str, type]]) -> str:
    return "".join(f", in {kind.__name__} {path}" for path, kind in list(stack.values())[-1:])


def arrays_of(tensors: list[torch.Tensor], device: torch.device) -> tuple[list[np.ndarray], Callable[[], None]]:
    """Returns tensors as arrays, and what updates these: nothing on a CPU (same memory), one transfer from a GPU."""
    if device.type == "cpu":
        return [x.numpy() for x in tensors], nothing
    copy = torch.cat([x.reshape(-1) for x in tensors]).cpu()
    if any(x.dtype != copy.dtype for x in tensors):
        raise Unknown("tensors of several types on a GPU")
    parts = zip(copy.split([x.numel() for x in tensors]), tensors, strict=True)
    arrays = [part.view(x.shape).numpy() for part, x in parts]
    return arrays, lambda: copy.copy_(torch.cat([x.reshape(-1) for x in tensors]))


def compiled(graph: fx.Graph, arrays: dict[str, np.ndarray], num_inputs: int) -> Callable[..., np.ndarray]:
    """Returns the first result of a graph as one Python function, without the operations that it does not need."""
    *nodes, output = graph.nodes
    result = first_result(output.args[0])
    last_use = {result: output}  # of each node that is needed
    for node in reversed(nodes):
        if node in last_use:
            for needed in node.all_input_nodes:
                last_use.setdefault(needed, node)
    inputs = [node.name for node in nodes if node.op == "placeholder"][:num_inputs]
    lines, names = [], {"torch": np, "device": torch.device, "inf": math.inf, "nan": math.nan}  # np has torch's types
    for node in nodes:
        name = getattr(node.target, "__name__", node.target)
        if node.op == "get_attr":
            names |= {node.name: arrays[node.target], f"{node}_T": arrays[node.target].T}
        elif node.op == "placeholder" or (node not in last_use and not name.endswith("_")):
            continue  # an operation in place, such as `add_`, is needed in any case; it is not known below
        elif name == "linear" and len(node.args) == 3 and None not in node.args and node.args[1].op == "get_attr":
            lines.append("    {} = {} @ {}_T + {}\n".format(node, *node.args))
        elif name in OPERATORS and not node.kwargs:
            lines.append(f"    {node} = {OPERATORS[name].format(*map(repr, node.args))}\n")
        else:
            names[f"do_{node}"] = translation(node, name)
            words = [*map(repr, node.args), *(f"{word}={x!r}" for word, x in node.kwargs.items())]
            lines.append(f"    {node} = do_{node}({', '.join(words)})\n")
        for used in node.all_input_nodes:
            if used.op.startswith("call") and last_use[used] is node:
                lines.append(f"    del {used}\n")
    exec(f"def function({', '.join(inputs)}):\n{''.join(lines)}    return {result!r}\n", names)
    return names["function"]


def translation(node: fx.Node, name: str) -> Callable:
    """Returns the function on arrays for a node's function on tensors."""
    if name in NUMPY:
        return NUMPY[name]
    if name == "getattr" and node.args[1] in ("dtype", "shape", "ndim"):
        return getattr
    if name in TORCH:
        return on_arrays(getattr(torch.Tensor, name) if node.op == "call_method" else node.target)
    raise Unknown(f"{name} is not translated{inside(node.meta.get('nn_module_stack', {}))}")


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


# by torch's names; what is in none of these has no translation
OPERATORS = {"to": "{}.astype({}, copy=False)", "getitem": "{}[{}]", "matmul": "{} @ {}"}
OPERATORS |= {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "truediv": "{} / {}", "div": "{} / {}"}
OPERATORS |= {"lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}"}
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
    "pow": operator.pow,
}
NUMPY |= {"abs": np.abs, "cos": np.cos, "exp": np.exp, "log": np.log, "neg": np.negative, "sin": np.sin}
NUMPY |= {"sqrt": np.sqrt, "square": np.square, "tanh": np.tanh}
TORCH = {  # what torch does on the arrays' memory
    *("elu", "silu", "gelu", "mish", "leaky_relu", "hardtanh", "softplus", "sigmoid", "softmax", "log_softmax"),
    *("layer_norm", "rms_norm", "amax", "amin", "max", "min", "maximum", "minimum", "std", "var", "logsumexp"),
    *("expand", "split", "unbind", "flatten", "view", "reshape", "squeeze", "unsqueeze"),
    *("transpose", "permute", "contiguous", "detach", "clone", "where", "erf", "log1p", "expm1"),
}
