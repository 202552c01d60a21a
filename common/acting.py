"""Acting on a few observations by numpy, whose calls cost a fifth of torch's."""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import nn

from common.processes import World
from common.tensors import default_float, to_tensor

SIMPLE = (nn.Linear, nn.Tanh, nn.ReLU)
PERIOD = 128  # calls between two comparisons of numpy with the module, the same ones on every process


class Policy:
    """The first result of `module` on arrays (n, ...) of this process's environments, each shard alone.

    Where only Linear, Tanh and ReLU layers make it of a vector, numpy computes them on the parameters' own
    memory, of a GPU's on a copy. Otherwise, which `note` says, and for images the module acts.
    """

    def __init__(self, module: nn.Module, forward: Callable, world: World, note: Callable[[str], None]) -> None:
        self.module = module
        self.forward = forward  # the module, or a faster form of it
        self.world = world
        self.note = cache(note)  # says a thing once
        self.dtype = default_float()
        self.calls = 0  # at 0, as after a resume, it chooses anew
        self.stale = False  # whether a GPU's parameters have moved since they were copied

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        parts = obs.reshape(len(self.world.shards), -1, *obs.shape[1:])
        if self.calls % PERIOD == 0 or self.stale:
            self._choose(parts)
        self.calls += 1
        if self.alike:  # numpy makes a product for each shard
            return self._numpy(parts, self.steps[0]).reshape(len(obs), -1)
        choices = zip(parts, self.steps, strict=True)
        results = [self._numpy(part, steps) if steps else self._torch(part) for part, steps in choices]
        return np.concatenate(results)

    def _numpy(self, x: np.ndarray, steps: list[tuple]) -> np.ndarray:
        x = x.astype(self.dtype, copy=False)
        for kind, *weights in steps:
            if kind is nn.Linear:
                weight, *bias = weights
                x = x @ weight + bias[0] if bias else x @ weight
            else:
                x = np.tanh(x) if kind is nn.Tanh else np.maximum(x, 0.0)
        return x

    def _torch(self, obs: np.ndarray) -> np.ndarray:
        return self._result(self.forward, to_tensor(obs).to(self.world.device)).cpu().numpy()

    @torch.no_grad()
    def _result(self, forward: Callable, obs: torch.Tensor) -> torch.Tensor:
        output = forward(obs)
        return output[0] if isinstance(output, tuple) else output

    def _choose(self, parts: np.ndarray) -> None:
        """Choose what acts for each shard. Where the module does, it goes on."""
        vectors = parts.ndim == 3
        self.stale = False
        if self.calls == 0:
            self.layers = [self._traced(part) if vectors else [] for part in parts]
        self.steps = [self._steps(part, layers) for part, layers in zip(parts, self.layers, strict=True)]
        self.alike = all(layers and layers == self.layers[0] for layers in self.layers)
        if vectors and not all(self.steps):
            name = type(self.module).__name__
            reason = "it is not Linear, Tanh and ReLU, one after another"
            self.note(f"{name} acts by torch, more slowly than by numpy ({reason})")

    def _traced(self, part: np.ndarray) -> list[nn.Module]:
        """The layers from a shard's observations to the module's result; none where other code takes part."""
        obs = to_tensor(part).to(self.world.device)
        calls = []
        hooks = []
        for layer in self.module.modules():
            changed = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
            if type(layer) in SIMPLE and not changed:
                hooks.append(layer.register_forward_hook(lambda *call: calls.append(call)))
        tensor = self._result(self.module, obs)
        for hook in hooks:
            hook.remove()
        layers = []
        for layer, inputs, output in reversed(calls):
            if output is tensor:
                tensor = inputs[0]
                layers.insert(0, layer)
        return layers if tensor is obs else []

    def _steps(self, obs: np.ndarray, layers: list[nn.Module]) -> list[tuple]:
        """Each layer's kind and, for Linear, weight and bias; none from now on if results differ."""
        steps = [(type(layer), *(p.detach().cpu().numpy().T for p in layer.parameters())) for layer in layers]
        if steps:
            expected = self._torch(obs)
            size = np.abs(expected).max(initial=0.01) + 0.01 * np.abs(obs).max(initial=0.0).clip(0, 100)
            result = self._numpy(obs, steps)
            if not np.allclose(result, expected, rtol=0.0, atol=1e-4 * size, equal_nan=True):
                layers.clear()
                steps = []
        return steps
