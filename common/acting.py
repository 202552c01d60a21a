"""Acting on a few observations: a numpy copy of a stack of layers, and the check that it is what the networks do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import nn

from common.launch import Fault

Policy = Callable[..., np.ndarray]


def numpy_layers(*modules: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """The modules one after another, (n, inputs) -> (n, outputs), in numpy on the parameters' memory (GPU: copies).

    On a few rows torch's calls cost five times the arithmetic. Takes `Linear`, `ReLU`, `Tanh` and `Sequential` of
    these; raises `TypeError` naming another layer, or one with hooks (such as torch's old weight_norm's).
    """
    layers = list(flat(modules))
    known = {nn.Linear: linear, nn.ReLU: lambda _: relu, nn.Tanh: lambda _: np.tanh}
    for layer in layers:
        if type(layer) not in known or layer._forward_pre_hooks or layer._forward_hooks:
            hooks = " with hooks" if type(layer) in known else ""
            raise TypeError(f"{type(layer).__name__}{hooks} is not a layer it knows")
    steps = [known[type(layer)](layer) for layer in layers]
    dtype = next(layer.weight for layer in layers if isinstance(layer, nn.Linear)).detach().cpu().numpy().dtype

    def apply(x: np.ndarray) -> np.ndarray:
        x = x.astype(dtype, copy=False)
        for step in steps:
            x = step(x)
        return x

    return apply


def flat(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        yield from flat(module) if isinstance(module, nn.Sequential) else [module]


def linear(layer: nn.Linear) -> Callable[[np.ndarray], np.ndarray]:
    weight = layer.weight.detach().cpu().numpy().T
    bias = 0.0 if layer.bias is None else layer.bias.detach().cpu().numpy()
    return lambda x: x @ weight + bias


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0)


def checked(make: Callable[[], Policy | None], networks: Policy, *inputs: np.ndarray, thorough: bool = False) -> Policy:
    """`make()`, a module's method, which computes in numpy what `networks` computes in torch, if on `inputs` it does.

    `networks` itself where `make()` is None. `thorough`: tried with other parameters too, which are then put back, so
    that a bound or a squashing shows that does not bite yet. Raises `Fault` saying what to change where the two differ:
    after an edit of the networks alone, a run would otherwise act with another policy than it learns. Roundings pass.
    """
    if thorough:
        parameters, generator = list(make.__self__.parameters()), torch.Generator().manual_seed(0)
        kept = [parameter.detach().clone() for parameter in parameters]
        draws = [torch.randn(p.shape, generator=generator) / (p.shape[-1] ** 0.5 if p.dim() > 1 else 1) for p in kept]
        for size in (1.0, -1.0, 8.0, -8.0):
            set_values(parameters, [size * draw for draw in draws])
            compare(make, networks, *inputs)
        set_values(parameters, kept)
    return compare(make, networks, *inputs)


@torch.no_grad()
def set_values(parameters: list[nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def compare(make: Callable[[], Policy | None], networks: Policy, *inputs: np.ndarray) -> Policy:
    """`make()`, or `networks` where that is None, if both give the same on `inputs`; otherwise raises `Fault`."""
    expected, name = networks(*inputs), make.__qualname__  # first, so that a fault of their own is shown as such
    way = f"do in {name} what the networks do, or let it return None: then they act themselves, slower"
    try:
        fast = make()
        if fast is None:
            return networks
        given = fast(*inputs)
    except Exception as error:
        raise Fault(f"{name} does not fit the networks ({' '.join(str(error).split())}): {way}.") from error
    if given.shape != expected.shape:
        raise Fault(f"{name} gives shape {given.shape}, the networks {expected.shape}: {way}.")
    gap, size, *sizes = (np.abs(x).max(initial=0.0) for x in (given - expected, expected, *inputs))
    if gap > 1e-4 * max(size, *sizes):  # False where a network has diverged, which is said elsewhere
        raise Fault(f"{name} differs from the networks, by {gap:.2g} where they give up to {size:.2g}: {way}.")
    return fast
