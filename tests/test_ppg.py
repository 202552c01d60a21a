"""PPG is PPG: what its phases move and what they leave."""

import numpy as np
import pytest
import torch

import ppg_ddp
import ppo_ddp
from runs import flat, run, train


@pytest.mark.parametrize("norm_obs", [False, True])
def test_what_phases_move_and_what_they_leave(norm_obs, monkeypatch, tmp_path):
    """Policy phases leave the auxiliary head; in auxiliary ones KL is 0 at first, value loss falls.

    Both learn from the same pairs of observation and return.
    """
    pairs = {ppg_ddp.PPOLoss: set(), ppg_ddp.AuxLoss: set()}
    aux_losses, calls = [], []  # of each call the loss's class, copies of all parameters, and what it reports
    for cls in pairs:

        def forward(self, *batch, cls=cls, original=cls.forward):
            loss, stats = original(self, *batch)
            if cls is ppg_ddp.AuxLoss and not aux_losses:
                aux_losses.append(self)
            obs, returns = batch[:2] if cls is ppg_ddp.AuxLoss else (batch[0].obs, batch[0].returns)
            pairs[cls] |= {*map(tuple, torch.column_stack([obs, returns]).tolist())}
            copies = {name: p.detach().clone() for aux in aux_losses for name, p in aux.named_parameters()}
            calls.append((cls, copies, [x.item() for x in stats.values()]))
            return loss, stats

        monkeypatch.setattr(cls, "forward", forward)
    sizes = {"num_steps": 32, "n_pi": 4, "aux_epochs": 4, "num_aux_minibatches": 4, "total_timesteps": 3 * 4 * 128}
    train(ppg_ddp, tmp_path / "run", **sizes, aux_learning_rate=2e-3, anneal_lr=False, norm_obs=norm_obs)
    assert norm_obs or pairs[ppg_ddp.PPOLoss] == pairs[ppg_ddp.AuxLoss]  # moments move between phases
    moves = 0
    for (cls, before, _), (next_cls, after, _) in zip(calls, calls[1:], strict=False):
        if cls is next_cls is ppg_ddp.PPOLoss and before:
            stay = {name for name in before if before[name].equal(after[name])}
            assert stay == {"aux_critic.weight", "aux_critic.bias"}
            moves += 1
    assert moves >= 30
    aux = np.array([parts for cls, _, parts in calls if cls is ppg_ddp.AuxLoss]).reshape(3, 4, 4, 3)
    value_losses, kls, _ = np.moveaxis(aux, -1, 0)  # by phase, epoch and minibatch
    assert np.abs(kls[:, 0, 0]).max() < 1e-7 and kls[:, -1].min() > 1e-8
    assert (value_losses[:, -1].mean(1) < value_losses[:, 0].mean(1)).all()


@pytest.mark.parametrize("world_size, env", [(1, "Pendulum-v1 --norm-obs"), (2, "tests.envs:ShortCartPole-v0")])
def test_without_auxiliary_phases_it_is_ppo(world_size, env, tmp_path):
    """With PPO's flags, bit for bit, also where all episodes are truncated."""
    flags = f"--env-id {env} --total-timesteps 1536 --save-model --eval-every 1000"
    ppo = ppo_ddp.Args()
    for name in ("learning_rate", "update_epochs", "adam_eps", "norm_adv", "gamma"):
        flags += f" --{name.replace('_', '-')} {getattr(ppo, name)}"
    a = run("ppo_ddp.py", world_size, flags, tmp_path / "ppo", dtype="float32")
    flags += " --aux-epochs 0 --clip-vloss"
    b = run("ppg_ddp.py", world_size, flags, tmp_path / "ppg", dtype="float32")
    shared = a.rows[0].keys()
    assert a.rows == [{name: row[name] for name in shared} for row in b.rows]
    assert not any(row[name] for row in b.rows for name in row.keys() - shared)
    tensors = dict(flat(b.model))
    assert all(x.equal(tensors[name]) for name, x in flat(a.model)) and a.model["agent"]
