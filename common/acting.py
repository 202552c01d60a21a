"""Acting on a few observations by numpy, whose calls cost a fifth of torch's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from common.processes import World
from common.tensors import default_float, to_tensor

SIMPLE = (nn.Linear, nn.Tanh, nn.ReLU)
PERIOD = 64  # calls between two comparisons of numpy with the module, the same ones on every process


class Policy:
    """The first result of `module` on arrays (n, ...) of this process's environments, each shard alone.

    numpy computes `layers`, if they are all Linear, Tanh or ReLU, on the parameters' own memory. The module
    acts for images, on a GPU and, which `note` says, for other layers, and where the two are found to differ,
    as after an edit of its `forward`.
    """

    def __init__(self, module: nn.Module, layers: nn.Module, world: World, note: Callable[[str], None]) -> None:
        self.module = module
        self.layers = layers
        self.world = world
        self.note = note
        self.dtype = default_float()
        self.calls = 0  # at 0, as after a resume, it chooses anew

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        parts = [obs]
        if self.world.sharded:  # aligned: MKL rounds by address
            parts = [to_tensor(part).numpy() for part in np.split(obs, len(self.world.shards))]
        if self.calls % PERIOD == 0:
            self._choose(parts)
        self.calls += 1
        choices = zip(parts, self.by_numpy, strict=True)
        results = [self._numpy(part) if by_numpy else self._torch(part) for part, by_numpy in choices]
        return np.concatenate(results) if self.world.sharded else results[0]

    def _numpy(self, x: np.ndarray) -> np.ndarray:
        x = x.astype(self.dtype, copy=False)
        for kind, *weights in self.steps:
            if kind is nn.Linear:
                weight, *bias = weights
                x = x @ weight + bias[0] if bias else x @ weight
            else:
                x = np.tanh(x) if kind is nn.Tanh else np.maximum(x, 0.0)
        return x

    @torch.no_grad()
    def _torch(self, obs: np.ndarray) -> np.ndarray:
        return first_result(self.module(to_tensor(obs).to(self.world.device))).cpu().numpy()

    def _choose(self, parts: list[np.ndarray]) -> None:
        """Choose what acts for each shard. Where the module does, it goes on."""
        layers = [layer for layer in flattened(self.layers) if type(layer) is not nn.Identity]
        if self.calls == 0:
            simple = self.world.device.type == "cpu" and parts[0].ndim == 2
            known = all(type(layer) in SIMPLE and not has_hooks(layer) for layer in layers)
            if simple and not (known and self._is_chain(layers, parts[0])):
                simple = self._give_up("it is not Linear, Tanh and ReLU, one after another")
            self.by_numpy = [simple] * len(parts)
        if True in self.by_numpy:
            # for each layer its kind, and for Linear weight and bias
            self.steps = [(type(layer), *(p.detach().numpy().T for p in layer.parameters())) for layer in layers]
        for i, obs in enumerate(parts):
            if self.by_numpy[i] and self._differs(obs):
                self.by_numpy[i] = self._give_up("its result is another")

    def _differs(self, obs: np.ndarray) -> bool:
        """Whether the results of numpy and of the module differ by more than rounding."""
        expected = self._torch(obs)
        size = np.abs(expected).max(initial=0.01) + 0.01 * np.abs(obs).max(initial=0.0).clip(0, 100)
        return not np.allclose(self._numpy(obs), expected, rtol=0.0, atol=1e-4 * size, equal_nan=True)

    def _is_chain(self, layers: list[nn.Module], obs: np.ndarray) -> bool:
        """Whether the module's result is the very tensor that its layers make, one after another."""
        tensor = to_tensor(obs)
        calls = []
        hooks = [layer.register_forward_hook(lambda *call: calls.append(call)) for layer in layers]
        with torch.no_grad():
            result = first_result(self.module(tensor))
        for hook in hooks:
            hook.remove()
        links = [tensor, *(output for *_, output in calls)]
        linked = all(inputs[0] is link for (_, inputs, _), link in zip(calls, links, strict=False))
        return linked and result is links[-1] and [layer for layer, *_ in calls] == layers

    def _give_up(self, reason: str) -> bool:
        self.note(f"{type(self.module).__name__} acts by torch, more slowly than by numpy ({reason})")
        return False


def first_result(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def flattened(module: nn.Module) -> list[nn.Module]:
    """The layers of a Sequential, and of those in it."""
    whole = type(module) is not nn.Sequential or has_hooks(module)
    return [module] if whole else [layer for part in module for layer in flattened(part)]


def has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
