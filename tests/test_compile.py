"""`--compile`: each loss and its gradient as one graph, in which parameters move as without."""

import functools
from collections import Counter

import pytest
import torch

import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common.shards import Gradient
from runs import flat, train
from test_shards import Rows, run_of

ROLLOUTS = {"num_envs": 4, "num_steps": 16, "total_timesteps": 512}
REPLAY = {"learning_starts": 200, "buffer_size": 1000, "batch_size": 32}
CASES = {
    "ppo": (ppo_ddp, ROLLOUTS),
    "ppg": (ppg_ddp, ROLLOUTS | {"update_epochs": 2, "n_pi": 4, "num_aux_minibatches": 8, "aux_epochs": 4}),
    "dqn": (dqn_ddp, REPLAY | {"total_timesteps": 640, "prioritized": True, "n_step": 3, "double_q": True}),
    "sac": (sac_ddp, REPLAY | {"total_timesteps": 280}),
}


@pytest.fixture(autouse=True)
def quick_compiler(float64, monkeypatch):
    """The graph is traced as for users, but runs by torch's own operators: compiling these takes seconds."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def trained(module, settings, run_dir) -> dict:
    return dict(flat(train(module, run_dir, **settings, num_threads=1, save_model=True).model))


@pytest.mark.parametrize("case", CASES)
def test_parameters_move_as_without(case, tmp_path, watch):
    module, settings = CASES[case]
    calls = watch(Gradient, "__call__")
    compiled = trained(module, settings | {"compile": True}, tmp_path / "compiled")
    gradients = Counter(gradient for (gradient, *_), _ in calls)
    assert len(gradients) == (2 if module in (ppg_ddp, sac_ddp) else 1) and min(gradients.values()) >= 50
    assert all(gradient.compiled for gradient in gradients)
    without = trained(module, settings, tmp_path / "without")
    assert compiled.keys() == without.keys()
    for name, x in without.items():
        torch.testing.assert_close(compiled[name], x, rtol=1e-6, atol=1e-8)


def test_a_loss_that_is_no_graph_goes_on_without(tmp_path, watch, monkeypatch, capfd):
    """One line says why, and the run is the one without the flag."""
    calls = watch(Gradient, "__call__")
    forward = ppo_ddp.PPOLoss.forward

    def with_print(self, mb):
        torch._dynamo.graph_break()
        return forward(self, mb)

    monkeypatch.setattr(ppo_ddp.PPOLoss, "forward", with_print)
    compiled = trained(ppo_ddp, ROLLOUTS | {"compile": True}, tmp_path / "compiled")
    assert calls and not any(gradient.compiled for (gradient, *_), _ in calls)
    lines = capfd.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("--compile: PPOLoss is not compiled (")]) == 1
    without = trained(ppo_ddp, ROLLOUTS, tmp_path / "without")
    assert all(x.equal(without[name]) for name, x in compiled.items())


def test_parts_that_change_their_size_are_not_compiled(tmp_path, watch, capfd):
    """Of prioritised batches, and where shards do not divide a batch. One line says so."""
    calls = watch(Gradient, "__call__")
    for number, more in enumerate(({"prioritized": True}, {"batch_size": 31})):
        settings = REPLAY | {"total_timesteps": 240, "shards": 2, "compile": True} | more
        trained(dqn_ddp, settings, tmp_path / str(number))
        [line] = [line for line in capfd.readouterr().out.splitlines() if "--compile" in line]
        assert line == "--compile: not used, since a shard's part of a batch changes its size"
    assert calls and not any(gradient.compiled for (gradient, *_), _ in calls)


def test_the_tenth_run_of_a_process_is_compiled_too():
    """torch keeps eight graphs of one function, and a sweep may call `main` more often."""
    for size in range(1, 11):
        loss = Rows(size)
        new = run_of(1, compiles=True, loss=loss, optimizer=torch.optim.Adam(loss.parameters()))
        new.backward(loss, torch.ones(3, size))
        assert new.gradients[loss].compiled
