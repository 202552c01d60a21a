"""What a GPU is asked to do, tried without one: tests/card.py stands in for it. How fast it is, only a GPU can tell."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from card import CARD, Card

import dqn_ddp
import ppg_ddp
import ppo_ddp
import sac_ddp
from common.environments import Environments
from common.processes import World
from common.tensors import upload
from runs import Run, flat

PPO = {"total_timesteps": 256, "num_steps": 32, "eval_every": 0}
PPG = PPO | {"n_pi": 2, "aux_epochs": 4, "num_aux_minibatches": 4, "update_epochs": 2, "num_minibatches": 4}
REPLAY = {"total_timesteps": 240, "learning_starts": 100, "batch_size": 16, "buffer_size": 300, "train_frequency": 4}
REPLAY |= {"num_envs": 4, "log_every": 120, "eval_every": 0}
PENDULUM, MINATAR, SHARDS = {"env_id": "Pendulum-v1"}, {"env_id": "MinAtar/Breakout-v1"}, {"shards": 2}
# how much crosses at most, as a rule, from one vector step or gradient step to the next
STEPS = {("step", "step"): 2, ("loss", "loss"): 0}  # observations, and what comes out
AUX = {("aux", "aux"): 2}  # indices, then observations
BATCH = {("step", "step"): 2, ("step", "loss"): 6}
PRIORITIES = {("step", "loss"): 6, ("loss", "step"): 5}  # acting for two shards, and the TD errors
EVERYTHING = {"prioritized": True, "n_step": 3, "double_q": True, "dueling": True, "max_grad_norm": 1.0}
CASES = {
    "ppo": (ppo_ddp, PPO, STEPS),
    "ppo shards": (ppo_ddp, PPO | PENDULUM | SHARDS | {"norm_obs": True, "target_kl": 0.02}, {("loss", "loss"): 0}),
    "ppo images": (ppo_ddp, PPO | MINATAR | {"norm_adv": "batch"}, STEPS),
    "ppg": (ppg_ddp, PPG, STEPS | AUX),
    "dqn": (dqn_ddp, REPLAY, BATCH),
    "dqn prioritized": (dqn_ddp, REPLAY | SHARDS | EVERYTHING, PRIORITIES),
    "dqn images": (dqn_ddp, REPLAY | MINATAR | {"start_e": 0.0}, BATCH),
    "sac": (sac_ddp, REPLAY | PENDULUM, {("step", "loss"): 7, ("loss", "loss"): 1}),  # the noise of actions
}


@pytest.fixture
def card(monkeypatch):
    """Scripts take the stand-in for the device of every process, and float64, which hides how products are rounded."""
    monkeypatch.setattr(World, "device", property(lambda self: CARD, lambda *_: None), raising=False)
    optimizer = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides it
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: ["cpu", CARD.type])
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # which stand-ins for tensors cannot be made in
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, device="cpu", **kwargs: tensor(*args, **kwargs).to(device))
    torch.set_default_dtype(torch.float64)
    yield Card()
    torch.set_default_dtype(torch.float32)


def test_an_upload_is_one_copy_of_all_that_is_in_it(card):
    """Of arrays of any type, layout and size."""
    noise = np.arange(512.0).reshape(64, 2, 4)
    arrays = [noise[:, 1:], noise[:, 0].T, np.array([True, False, True]), np.zeros((0, 3)), np.array([7])]
    with card:
        there = upload(arrays, CARD)
        assert card.crossings == ["up"]
        back = [x.cpu().numpy() for x in there]
    assert all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(back, arrays, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_the_card(case, card, tmp_path, monkeypatch):
    """It never mixes devices, gives the CPU's numbers, and each vector step and batch costs what it must."""
    module, settings, expected = CASES[case]
    settings = {"num_threads": 1, "save_model": True} | settings

    def mark(owner, name, word):
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (card.crossings.append(word), method(*args))[1])

    mark(Environments, "step", "step")
    losses = [name for name in vars(module) if name.endswith("Loss")]
    for name in losses:
        mark(getattr(module, name), "forward", "aux" if name == "AuxLoss" else "loss")
    with card:
        module.main(module.Args(run_dir=str(tmp_path / "card"), **settings))
    monkeypatch.undo()
    module.main(module.Args(run_dir=str(tmp_path / "cpu"), cuda=False, **settings))
    runs = [Run(0, "", "", tmp_path / device) for device in ("card", "cpu")]
    assert len(runs[0].rows) == len(runs[1].rows) >= 2
    for rows in zip(*(run.rows for run in runs), strict=True):
        numbers = [{name: float(x) for name, x in row.items() if x} for row in rows]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-6)  # learning rates are float32 on a GPU
    model, cpu_model = (dict(flat(run.model)) for run in runs)
    torch.testing.assert_close(model, cpu_model, rtol=1e-4, atol=1e-6)

    between = defaultdict(Counter)
    marks = [(i, x) for i, x in enumerate(card.crossings) if x in ("step", "loss", "aux")]
    for (i, first), (k, then) in pairwise(marks):
        between[first, then][k - i - 1] += 1
    for pair, most in expected.items():
        ((crossed, times),) = between[pair].most_common(1)
        assert crossed <= most and times >= 0.7 * between[pair].total() > 9, between
