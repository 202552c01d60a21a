"""DQN: its targets and networks by hand, and when it begins to learn."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

import dqn_ddp
from common.processes import BadInput
from common.replay import Batch
from runs import Run, run


def test_targets_by_hand():
    """Rewards 1 and 2, discounts 0.5 and 0: the target network's best, and its value of the online network's best."""
    rewards, discounts = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0])
    target_q, online_q = torch.tensor([[4.0, 8.0], [4.0, 8.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    parts = {"rewards": rewards, "discounts": discounts, "next_obs": online_q, "weights": torch.ones(2)}
    parts |= {"obs": torch.zeros(2, 2), "actions": torch.tensor([0, 1])}
    for double_q, expected in ((False, [5.0, 2.0]), (True, [3.0, 2.0])):
        args = dqn_ddp.Args(double_q=double_q)
        loss = dqn_ddp.TDLoss(nn.Identity(), lambda obs: target_q, args, 1)  # values of 0 now
        _, stats = loss(Batch(**parts))
        assert (-stats["td_errors"]).tolist() == expected


def test_dueling_values_by_hand():
    """The state's value plus advantages less their mean, each from a hidden layer of its own."""
    space = gym.spaces.Box(-1, 1, (3,), np.float32)
    for dueling in (False, True):
        network, obs = dqn_ddp.QNetwork(space, 4, dueling, "auto", True), torch.randn(6, 3)
        features = network.network(obs)
        assert features.shape == (6, 120) and network.head[0].weight.shape == (84, 120)
        q = network.head(features)
        if dueling:
            assert network.value_head[0].weight.shape == (84, 120) and network.value_head[2].weight.shape == (1, 84)
            q = network.value_head(features) + q - (q[:, :1] + q[:, 1:2] + q[:, 2:3] + q[:, 3:]) / 4
        torch.testing.assert_close(network(obs), q)


def test_no_gradient_step_before_something_can_be_sampled(tmp_path):
    """With `--learning-starts` below n steps: the first losses come when n steps of an environment are there."""
    flags = "--num-envs 2 --n-step 20 --learning-starts 4 --train-frequency 2 --total-timesteps 60 --log-every 2"
    result = run("dqn_ddp.py", 1, f"{flags} --eval-every 0 --batch-size 8", tmp_path / "run")
    assert [int(row["global_step"]) for row in result.rows if row["losses/td_loss"]] == list(range(42, 61, 2))


def test_the_smallest_budget_has_a_gradient_step(tmp_path):
    """What the refusal names as the smallest --total-timesteps takes exactly one gradient step."""
    sizes = {"num_envs": 8, "train_frequency": 3, "learning_starts": 20, "buffer_size": 80, "batch_size": 4}
    with pytest.raises(BadInput, match="--total-timesteps 23: must be at least 24,"):
        dqn_ddp.Args(total_timesteps=23, log_every=1, **sizes)
    dqn_ddp.main(dqn_ddp.Args(total_timesteps=24, log_every=1, eval_every=0, run_dir=str(tmp_path / "run"), **sizes))
    assert len(Run(0, "", "", tmp_path / "run").column("losses/td_loss")) == 1
