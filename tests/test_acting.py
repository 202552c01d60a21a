"""Acting in numpy: a translation gives the module's numbers or does not act, and the module is left as it was."""

import gc
import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common.acting import PERIOD, Acting, Derived
from common.distributed import World

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
    """After a first call, by a translation."""
    policy = Acting(Module(function, layer), WORLD, SHARDS, pytest.fail)
    assert_acts_as_module(policy, OBS)
    return policy


def assert_acts_as_module(policy: Acting, obs: np.ndarray) -> None:
    """A translation acts, and gives the module's numbers."""
    result = policy(obs)
    assert policy.derived is not None and policy.functions == [policy.derived.function] * len(policy.functions)
    np.testing.assert_allclose(result, policy.by_module(obs), rtol=1e-5, atol=1e-6)


def unpacked(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mean, deviation = module.layer(x).split(2, -1)
    one, two = x.chunk(2, 1)
    return mean * one + deviation.exp() * two


LAYERS = [nn.Linear(4, 3), nn.Linear(4, 3, bias=False), nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.ELU()]
LAYERS += [nn.GELU("tanh"), nn.Softplus(), nn.LayerNorm(4), nn.RMSNorm(4), nn.Flatten(), nn.Softmax(-1), nn.Identity()]
LAYERS += [
    nn.Softsign(),
    nn.Bilinear(4, 4, 2),
    nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ELU(), nn.Linear(4, 2))),
]
OPERATIONS = {
    "constants": lambda m, x: 2 - x * 3 + (1 - x) / 2 + -x + x**2 + 2**x + 1 / (x.abs() + 1),
    "parameters": lambda m, x: m.weight + m.buffer * x - m.tensor + m.tensor * x - m.gate / (m.tensor.abs() + 1 + x**2),
    "functions": lambda m, x: torch.exp(x) + torch.log(x.abs() + 1) + (x * x).sqrt() + x.sin() - torch.cos(x),
    "activations": lambda m, x: F.relu(x) + torch.tanh(x) + x.sigmoid() + F.softplus(x) + F.gelu(x) + x.relu(),
    "clamp": lambda m, x: x.clamp(-0.5, 0.5) + torch.clamp(x, min=0.1) + x.clamp(*m.bounds) + x.clamp(max=0.2),
    "cat": lambda m, x: torch.cat([x, m.weight.expand_as(x), x[:, :1]], -1) + torch.cat((x, x, x[:, 1:2]), dim=1),
    "unpacked": unpacked,
    "moments": lambda m, x: (
        (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + x.sum(-1, keepdim=True) + x.mean()
    ),
    "extremes": lambda m, x: x.amax(-1, keepdim=True) - x.max(-1, keepdim=True)[0] + torch.maximum(x, m.weight),
    "shapes": lambda m, x: (
        x.view(x.shape[0], -1) + x.reshape(-1, 4) + x.unsqueeze(1).squeeze(1) + x.expand(x.size(0), 4)
    ),
    "indices": lambda m, x: x[:, [0, 2]] + x[..., 1:3] + x[:, -1, None] + x[:, 3:],
    "where": lambda m, x: torch.where(x.abs() > 0.5, x, m.weight),
    "residual": lambda m, x: x + m.layer(F.elu(m.layer(x))),
    "nested": lambda m, x: F.linear(x, m.layer.weight / m.layer.weight.abs().sum(), m.layer.bias),
    "rare": lambda m, x: torch.special.erfcx(x) + torch.topk(x, 2)[0].sum(-1, keepdim=True),
}


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_layer_does_what_torch_does(layer):
    function = (lambda m, x: m.layer(x, x)) if isinstance(layer, nn.Bilinear) else (lambda m, x: m.layer(1 * x))
    assert_acts_as_module(acting_of(function, layer), 3 * OBS)


@pytest.mark.filterwarnings("error")  # of torch, which dislikes arrays that it may not write to
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_does_what_torch_does(name):
    assert_acts_as_module(acting_of(OPERATIONS[name]), 3 * OBS[:2])


def doubled(module: nn.Module, *_) -> None:
    """A hook."""


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
    "an operation in place": ("its translation gives other numbers", aliased, None),
    "dropout": ("gives other numbers", lambda m, x: m.layer(x), nn.Sequential(nn.ReLU(), nn.Dropout())),
    "recurrent": ("control flow", lambda m, x: m.layer(x), nn.GRU(4, 4)),
    "hook": ("Linear has a hook or a parametrization", lambda m, x: m.layer(x), hooked()),
    "control flow": ("control flow", lambda m, x: x if x.sum() > 0 else -x, None),
    "in place": ("clamp_ is not translated", lambda m, x: [y := 2 * x, y.clamp_(-0.1, 0.1)][0], None),
    "draws": ("gives other numbers", lambda m, x: x + torch.randn(4), None),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_the_module_does(name):
    said, function, layer = UNKNOWN[name]
    notes = []
    policy = Acting(Module(function, layer), WORLD, SHARDS, notes.append)
    for _ in range(PERIOD + 1):
        policy(OBS)
        assert policy.functions == [policy.by_module]
    (note,) = notes
    assert note.startswith("Module acts by torch, more slowly than by numpy (") and "\n" not in note
    assert re.search(said, note)


def test_a_large_observation_hides_no_difference():
    """One number of 1e5 among small ones, which the module scales; and rounding alone is no difference."""
    scale = torch.tensor([1.0, 1.0, 1.0, 1e-5])
    large = OBS / scale.numpy()
    notes = []
    policy = Acting(Module(lambda m, x: aliased(m, x * scale)), WORLD, SHARDS, notes.append)
    policy(large)
    assert policy.functions == [policy.by_module] and "its translation gives other numbers" in notes[0]
    policy = Acting(Module(lambda m, x: m.layer(x).tanh()), WORLD, SHARDS, pytest.fail)
    policy(large)
    assert policy.functions == [policy.derived.function]


def test_images_are_for_the_module():
    policy = Acting(Module(lambda m, x: x.flatten(1)), WORLD, SHARDS, pytest.fail)
    policy(np.ones((2, 3, 4, 4), np.float32))
    assert policy.functions == [policy.by_module]


def test_where_a_translation_differs_the_module_acts_for_that_shard_alone():
    """The same bytes, whichever other shards are in its process; said once; until all is translated anew."""
    shards = [slice(0, 2), slice(2, 5)]
    small = OBS / 10
    large = np.concatenate([small[:3], 100 * small[3:]])  # in the second shard
    notes = []

    def policies(split: list[list[slice]]) -> list[Acting]:
        module = Module(lambda m, x: m.layer(x if isinstance(x, torch.fx.Proxy) else x.clamp(-5, 5)) * x.shape[0])
        return [Acting(module, World(False, 2), part, notes.append) for part in split]

    [together] = policies([shards])
    apart = policies([[slice(0, 2)], [slice(0, 3)]])
    for call in range(3 * PERIOD):
        obs = large if call >= PERIOD + 5 else small  # found at call 2 * PERIOD
        parts = [policy(obs[shard]) for policy, shard in zip(apart, shards, strict=True)]
        assert together(obs).tobytes() == np.concatenate(parts).tobytes()
        expected = together.by_module if call >= 2 * PERIOD else together.derived.function
        assert together.functions == [together.derived.function, expected] and together.derived is not None
    assert len(notes) == 2 and notes[0] == notes[1] and "its translation gives other numbers, by" in notes[0]
    together.restart()
    together(small)
    assert together.functions == [together.derived.function] * 2


def test_steps_in_place_are_seen_at_once():
    """Of parameters, buffers and plain tensors, at the next call."""
    policy = acting_of(lambda m, x: m.layer(x) * m.tensor + m.buffer * m.gate)
    derived = policy.derived
    with torch.no_grad():
        for x in (*policy.module.parameters(), policy.module.buffer, policy.module.tensor):
            x += 0.5
    assert_acts_as_module(policy, OBS)
    assert policy.derived is derived


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
    """At the next comparison, the same call on every process."""
    policy = acting_of(lambda m, x: m.layer(scaled(m, x)) + m.weight)
    before = policy.derived
    policy(OBS)
    CHANGES[name](policy.module)
    for _ in range(PERIOD - 2):
        policy(OBS)
        assert policy.derived is before
    assert_acts_as_module(policy, OBS)
    after = policy.derived
    assert after is not before
    for _ in range(2 * PERIOD):
        policy(OBS)
    assert policy.derived is after


def test_what_changes_elsewhere_is_found():
    """A number in a closure; not where a network has diverged, which is said elsewhere."""
    numbers = {"scale": 1.0}
    policy = Acting(Module(lambda m, x: m.layer(x) * numbers["scale"]), WORLD, SHARDS, (notes := []).append)
    assert_acts_as_module(policy, OBS)
    for scale in (math.nan, 1.001):
        numbers["scale"] = scale
        assert not notes
        for _ in range(PERIOD):
            policy(OBS)
    assert policy.functions == [policy.by_module] and len(notes) == 1
    np.testing.assert_array_equal(policy(OBS), policy.by_module(OBS))


def copies_of(module: nn.Module) -> dict:
    return {name: dict(x) if isinstance(x, dict) else x for name, x in vars(module).items()}


def test_translating_leaves_the_module_as_it_was():
    """Its attributes and its parameters."""
    module = Module(scaled)
    attributes = [copies_of(x) for x in module.modules()]
    values = [x.detach().clone() for x in module.parameters()]
    Derived(module, torch.device("cpu"), 1)
    assert [copies_of(x) for x in module.modules()] == attributes
    assert all(x.equal(y) for x, y in zip(values, module.parameters(), strict=True))
    gc.collect()
    assert not any(isinstance(x, torch.fx.Proxy) for x in gc.get_objects())


def test_what_a_gpu_holds_is_copied_after_an_update(monkeypatch):
    """On a device that is no CPU (here in name only), and not otherwise."""
    module = Module(lambda m, x: m.layer(x) * m.gate + m.tensor)
    with monkeypatch.context() as patch, torch.inference_mode():  # as in a rollout
        patch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
        derived = Derived(module, torch.device("meta"), 1)
    before = derived.function(OBS)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5, fused=True)
    module(torch.from_numpy(OBS)).sum().backward()
    optimizer.step()
    assert np.array_equal(derived.function(OBS), before)
    policy = Acting(module, WORLD, SHARDS, pytest.fail)
    policy(OBS)
    policy.derived = derived
    policy.functions = [derived.function]
    assert np.array_equal(policy(OBS), before)
    policy.parameters_changed = True  # as `run.backward` says
    after = module(torch.from_numpy(OBS)).detach().numpy()
    np.testing.assert_allclose(policy(OBS), after, rtol=1e-5, atol=1e-6)
    assert np.abs(after - before).max() > 0.1


def test_an_option_of_forward_has_its_default():
    class Optional(nn.Linear):
        def forward(self, x: torch.Tensor, greedy: bool = False, scale: float = 2.0) -> torch.Tensor:
            return super().forward(x) if greedy else super().forward(x) * scale

    assert_acts_as_module(Acting(Optional(4, 2), WORLD, SHARDS, pytest.fail), OBS)
