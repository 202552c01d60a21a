"""Acting in numpy: each operation and layer does what torch does, where it can, and the module is left as it was."""

import gc
import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common import acting
from common.acting import Acting
from common.distributed import World
from common.errors import Fault

CPU = torch.device("cpu")
WORLD, SHARDS = World(False), [slice(0, 5)]
OBS = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


class Module(nn.Module):
    """`function` of the module and its input; a layer, a parameter, a buffer, tensors and numbers to be used in it."""

    def __init__(self, function, layer: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.layer = function, layer or nn.Linear(4, 4)
        self.weight, self.gate = nn.Parameter(torch.randn(4)), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("buffer", torch.randn(4))
        self.tensor, self.number, self.flag, self.bounds = torch.randn(4), 2.0, False, (-1.0, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def acting_of(function, layer: nn.Module | None = None) -> Acting:
    made = Acting(Module(function, layer), WORLD, SHARDS, pytest.fail)
    made.refresh(OBS)
    return made


def unpacked(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mean, deviation = module.layer(x).split(2, -1)
    one, two = x.chunk(2, 1)
    return mean * one + deviation.exp() * two


LAYERS = [
    nn.Linear(4, 3),
    nn.Linear(4, 3, bias=False),
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.Tanh(),
    nn.ELU(),
    nn.SiLU(),
]
LAYERS += [nn.GELU(), nn.GELU("tanh"), nn.LeakyReLU(), nn.Softplus(), nn.Sigmoid(), nn.LayerNorm(4), nn.Identity()]
LAYERS += [nn.LayerNorm(4, elementwise_affine=False), nn.RMSNorm(4), nn.Flatten(), nn.Hardtanh(), nn.Softmax(-1)]
LAYERS += [nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ELU(), nn.Linear(4, 2)))]
OPERATIONS = {
    "constants": lambda m, x: 2 - x * 3 + (1 - x) / 2 + -x + x**2 + 2**x + 1 / (x.abs() + 1),
    "parameters": lambda m, x: m.weight + m.buffer * x - m.tensor + m.tensor * x - m.gate / (m.tensor.abs() + 1 + x**2),
    "functions": lambda m, x: torch.exp(x) + torch.log(x.abs() + 1) + (x * x).sqrt() + x.sin() - torch.cos(x),
    "activations": lambda m, x: F.relu(x) + torch.tanh(x) + x.sigmoid() + F.softplus(x) + F.gelu(x) + x.relu(),
    "read-only": lambda m, x: F.softplus(m.weight.expand_as(x)),
    "clamp": lambda m, x: x.clamp(-0.5, 0.5) + torch.clamp(x, min=0.1) + x.clamp(*m.bounds) + x.clamp(max=0.2),
    "cat": lambda m, x: torch.cat([x, m.weight.expand_as(x), x[:, :1]], -1) + torch.cat((x, x, x[:, 1:2]), dim=1),
    "stack": lambda m, x: torch.stack([x, 2 * x], -1).flatten(1),
    "chunk": lambda m, x: torch.cat([x.chunk(2, -1)[1], torch.chunk(x, 3, 1)[0]], -1) + x.chunk(2)[0].sum(0),
    "unpacked": unpacked,
    "moments": lambda m, x: (
        (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + x.sum(-1, keepdim=True) + x.mean()
    ),
    "extremes": lambda m, x: x.amax(-1, keepdim=True) - x.max(-1, keepdim=True)[0] + torch.maximum(x, m.weight),
    "types": lambda m, x: x.to(torch.float64).to(x.dtype) + x.to(torch.get_default_dtype()) + x.float(),
    "shapes": lambda m, x: (
        x.view(x.shape[0], -1) + x.reshape(-1, 4) + x.unsqueeze(1).squeeze(1) + x.expand(x.size(0), 4)
    ),
    "indices": lambda m, x: x[:, [0, 2]] + x[..., 1:3] + x[:, -1, None] + x[:, 3:],
    "infinity": lambda m, x: x.clamp(-math.inf, 1.0),
    "where": lambda m, x: torch.where(x.abs() > 0.5, x, m.weight),
    "residual": lambda m, x: x + m.layer(F.elu(m.layer(x))),
    "nested": lambda m, x: F.linear(x, m.layer.weight / m.layer.weight.abs().sum(), m.layer.bias),
    "linear": lambda m, x: F.linear(x, m.layer.weight) + F.linear(x, weight=m.layer.weight, bias=m.layer.bias),
    "several results": lambda m, x: (x.tanh(), torch.special.erfcx(x)),
    "not needed": lambda m, x: [x.tanh(), m.layer(x).softmax(-1).digamma()][0],
}


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_layer_does_what_torch_does(layer):
    made = acting_of(lambda module, x: module.layer(1 * x), layer)
    np.testing.assert_allclose(made.derived(3 * OBS), made.network(3 * OBS), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("error")  # of torch, which dislikes arrays that it may not write to
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_does_what_torch_does(name):
    made = acting_of(OPERATIONS[name])
    np.testing.assert_allclose(made.derived(3 * OBS[:2]), made.network(3 * OBS[:2]), rtol=1e-5, atol=1e-6)


def doubled(module: nn.Module, *_) -> None:
    """A hook."""


def kept(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module.number, module.seen = module.number + 1, module.layer(x)
    return torch.special.erfcx(module.seen)


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(doubled)
    return layer


def aliased(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`h += ...` changes `skip` too."""
    h = skip = module.layer(x)
    h += module.weight
    return h * skip


UNKNOWN = {  # what is said, function, layer
    "an operation in place": (r"an operation such as \+= is not translated", aliased, None),
    "an operation": ("special_erfcx is not translated", lambda m, x: torch.special.erfcx(x), None),
    "of a layer": ("softsign is not translated, in Softsign layer", lambda m, x: m.layer(x), nn.Softsign()),
    "dropout": (
        "dropout is not translated, in Dropout layer.1",
        lambda m, x: m.layer(x),
        nn.Sequential(nn.ReLU(), nn.Dropout()),
    ),
    "batch norm": ("control flow, in BatchNorm1d layer", lambda m, x: m.layer(x), nn.BatchNorm1d(4)),
    "recurrent": (", in GRU layer", lambda m, x: m.layer(x), nn.GRU(4, 4)),
    "hook": ("a hook or a parametrization, in Linear layer", lambda m, x: m.layer(x), hooked()),
    "control flow": ("control flow", lambda m, x: x if x.sum() > 0 else -x, None),
    "iteration": ("Proxy object cannot be iterated", lambda m, x: sum(list(x)), None),
    "in place": ("clamp_ is not translated", lambda m, x: [y := 2 * x, y.clamp_(-0.1, 0.1)][0], None),
    "draws": ("random numbers are drawn", lambda m, x: x + torch.randn(4), None),
    "another type": ("numpy gives float64 .* torch float32", lambda m, x: x.to(torch.int32) / 2, None),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_the_module_does(name):
    said, function, layer = UNKNOWN[name]
    notes = []
    made = Acting(Module(function, layer), WORLD, SHARDS, notes.append)
    assert made.refresh(OBS) == made.network == made.refresh(OBS) and made.derived is None
    made.module.number += 1  # translated anew, in vain
    assert made.refresh(OBS) == made.network
    (note,) = notes
    assert note.startswith("Module acts by torch, more slowly than by numpy (") and "\n" not in note
    assert re.search(said, note)


def test_images_are_for_the_module():
    made = Acting(Module(lambda m, x: x.flatten(1)), WORLD, SHARDS, pytest.fail)
    assert made.refresh(np.ones((2, 3, 4, 4), np.float32)) == made.network


def test_steps_in_place_are_seen_at_once():
    """Of parameters, buffers and plain tensors, without another look."""
    made = acting_of(lambda m, x: m.layer(x) * m.tensor + m.buffer * m.gate)
    with torch.no_grad():
        for x in (*made.module.parameters(), made.module.buffer, made.module.tensor):
            x += 0.5
    np.testing.assert_allclose(made.derived(OBS), made.network(OBS), rtol=1e-5, atol=1e-6)


def scaled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clamp(*module.bounds) * module.number + module.tensor
    return module.layer(x) if module.flag else x


CHANGES = {
    "number": lambda m: setattr(m, "number", 3.0),
    "flag": lambda m: setattr(m, "flag", True),
    "tuple": lambda m: setattr(m, "bounds", (-0.1, 0.1)),
    "another tensor": lambda m: setattr(m, "tensor", torch.ones(4)),
    "other memory": lambda m: setattr(m.weight, "data", torch.ones(4)),
    "another layer": lambda m: setattr(m, "layer", nn.Tanh()),
    "another function": lambda m: setattr(m, "function", lambda m, x: 2 * m.layer(x)),
    "another weight": lambda m: setattr(m.layer, "weight", nn.Parameter(torch.ones(4, 4))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_attribute_that_changes_is_translated_anew(name):
    made = acting_of(lambda m, x: m.layer(scaled(m, x)) + m.weight)
    before = made.derived
    CHANGES[name](made.module)
    assert made.refresh(OBS) is made.derived is not before
    np.testing.assert_allclose(made.derived(OBS), made.network(OBS), rtol=1e-5, atol=1e-6)
    assert made.refresh(OBS) is made.refresh(OBS)


def test_what_changes_elsewhere_is_found():
    """A number in a closure; not where a network has diverged, which is said elsewhere."""
    numbers = {"scale": 1.0}
    made = acting_of(lambda m, x: m.layer(x) * numbers["scale"])
    numbers["scale"] = 1.001
    with pytest.raises(
        Fault, match="^Module.forward differs from its translation, by .* in an attribute of its module.$"
    ):
        made.refresh(OBS)
    with torch.no_grad():
        made.module.layer.weight.fill_(math.nan)
    assert made.refresh(OBS) is made.derived


@pytest.mark.parametrize("function", [scaled, kept, lambda m, x: x + torch.randn(4)])
def test_translating_leaves_the_module_as_it_was(function):
    """Its attributes, also those that `forward` sets, its parameters, and torch's generator."""
    module = Module(function)
    attributes, values = [dict(vars(x)) for x in module.modules()], [x.detach().clone() for x in module.parameters()]
    state = torch.get_rng_state()
    try:
        acting.derive(module, CPU, 1)
    except acting.Unknown:
        assert function is not scaled
    assert [dict(vars(x)) for x in module.modules()] == attributes and state.equal(torch.get_rng_state())
    assert all(x.equal(y) for x, y in zip(values, module.parameters(), strict=True))
    gc.collect()
    assert not any(isinstance(x, torch.fx.Proxy) for x in gc.get_objects())


def test_what_a_gpu_holds_is_copied_when_asked():
    """On a device that is no CPU (here in name only), one copy for all tensors."""
    module = Module(lambda m, x: m.layer(x) * m.gate + m.tensor)
    function, copy_parameters = acting.derive(module, torch.device("meta"), 1)
    before = module(torch.from_numpy(OBS)).detach().numpy()
    with torch.no_grad():
        for x in (*module.parameters(), module.tensor):
            x += 0.5
    np.testing.assert_allclose(function(OBS), before, rtol=1e-5, atol=1e-6)
    copy_parameters()
    after = module(torch.from_numpy(OBS)).detach().numpy()
    np.testing.assert_allclose(function(OBS), after, rtol=1e-5, atol=1e-6)
    assert np.abs(after - before).max() > 0.1


def test_an_option_of_forward_has_its_default():
    class Optional(nn.Linear):
        def forward(self, x: torch.Tensor, greedy: bool = False, scale: float = 2.0) -> torch.Tensor:
            return super().forward(x) if greedy else super().forward(x) * scale

    made = Acting(Optional(4, 2), WORLD, SHARDS, pytest.fail)
    np.testing.assert_allclose(made.refresh(OBS)(OBS), made.network(OBS), rtol=1e-5, atol=1e-6)
    assert made.derived
