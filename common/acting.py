"""Acting on a few observations by numpy, whose calls cost a fifth of torch's."""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from common.processes import World
from common.tensors import default_float, to_tensor

SIMPLE = {nn.Linear: [], nn.Tanh: [(np.tanh, None)], nn.ReLU: [(np.maximum, 0.0)]}  # what numpy does after weights
PERIOD = 128  # calls between two comparisons of numpy with the module, the same ones on every process


class Policy:
    """All results of `module` on arrays (n, ...) of this process's environments, each shard alone.

    Where only Linear, Tanh and ReLU layers make them of a vector, numpy computes them on the parameters' own
    memory, of a GPU's on a copy. Otherwise, which `note` says, and for images the module acts.
    """

    def __init__(self, module: nn.Module, forward: Callable, world: World, note: Callable[[str], None]) -> None:
        self.module = module
        self.forward = forward  # the module, or a faster form of it
        self.world = world
        self.note = cache(note)  # says a thing once
        self.dtype = default_float()
        self.calls = 0  # at 0, as after a resume, it chooses anew

    def __call__(self, obs: np.ndarray) -> list[np.ndarray]:
        parts = obs.reshape(len(self.world.shards), -1, *obs.shape[1:])
        if self.calls == 0:
            self.layers = [self._traced(part) for part in parts]
        if self.calls % PERIOD == 0:  # choose what acts for each shard; where the module does, it goes on
            pairs = zip(parts, self.layers, strict=True)
            self.steps = [layers and self._steps(part, layers) for part, layers in pairs]
            self.alike = all(layers and layers == self.layers[0] for layers in self.layers)
            if parts.ndim == 3 and not all(self.steps):
                reason = "it is not Linear, Tanh, ReLU in a row, none in place"
                self.note(f"{type(self.module).__name__} acts by torch, more slowly than by numpy ({reason})")
        self.calls += 1
        if self.alike:  # numpy makes a product for each shard
            return self._numpy(parts, self.steps[0])
        choices = zip(parts, self.steps, strict=True)
        of_shards = [self._numpy(part, steps) if steps else self._torch(part) for part, steps in choices]
        return [np.concatenate(x) for x in zip(*of_shards, strict=True)]

    def _numpy(self, obs: np.ndarray, steps: list[tuple]) -> list[np.ndarray]:
        obs = obs.astype(self.dtype, copy=False)
        results = []
        for shape, operations in steps:
            x = obs
            for function, operand in operations:
                x = function(x) if operand is None else function(x, operand)
            results.append(x.reshape(-1, *shape))
        return results

    def _torch(self, obs: np.ndarray) -> list[np.ndarray]:
        return [x.cpu().numpy() for x in self._results(self.forward, to_tensor(obs.copy()).to(self.world.device))]

    @torch.no_grad()
    def _results(self, forward: Callable, obs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = forward(obs)
        return output if isinstance(output, tuple) else (output,)

    def _traced(self, part: np.ndarray) -> list[list[nn.Module]]:
        """The layers that make each result of a shard's observations; none if other code may take part."""
        obs = to_tensor(part.copy()).to(self.world.device)
        calls = []
        with register_module_forward_hook(lambda *call: calls.append(call)):
            results = self._results(self.module, obs)
        traced = []
        for tensor in results:
            base = tensor._base
            if base is not None and base.numel() == tensor.numel():  # as values without an axis
                tensor = base
            layers = []
            for layer, inputs, output in reversed(calls):
                edited = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
                if output is tensor and tensor._version == 0 and type(layer) in SIMPLE and not edited:
                    tensor = inputs[0]
                    layers.insert(0, layer)
            if tensor is obs and obs._version == 0:
                traced.append(layers)
        try:
            self._results(torch.vmap(self.module), obs[:, None])  # refuses a branch on numbers
        except Exception:
            return []
        return traced if len(traced) == len(results) else []

    def _steps(self, obs: np.ndarray, traced: list[list[nn.Module]]) -> list[tuple]:
        """Each result's shape and operations (function, operand); none from now on if results differ."""
        steps = []
        for result, layers in zip(self._torch(obs), traced, strict=True):
            operations = []
            for layer in layers:
                weights = [p.detach().cpu().numpy().T for p in layer.parameters()]
                operations += [*zip((np.matmul, np.add), weights, strict=False), *SIMPLE[type(layer)]]
            steps.append((result.shape[1:], operations))
            [x] = self._numpy(obs, steps[-1:])
            size = np.abs(result).max(initial=0.01) + 0.01 * np.abs(obs).max(initial=0.0).clip(0, 100)
            if not (np.abs(x - result) < 1e-4 * size).all():  # nor where a result is infinite
                traced.clear()
                return []
        return steps
