"""DQN: its targets by hand, the same experiment at every world size, and unequal shares of a batch."""

import os
from collections.abc import Callable
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import dqn_ddp
from common.distributed import World
from common.errors import BadInput
from common.replay import Batch
from common.shards import Gradients
from runs import Run, assert_close, fork, run

FLAGS = "--env-id tests.envs:NoisyCartPole-v0 --num-envs 4 --buffer-size 400 --batch-size 32 --learning-starts 200"
FLAGS += " --train-frequency 8 --total-timesteps 1040 --log-every 100 --eval-every 500 --eval-episodes 5 --save-model"
FLAGS += " --check-sync-every 400 --target-network-frequency 100 --learning-rate 1e-3"


@pytest.mark.parametrize(
    "extra",
    ["", "--prioritized --n-step 3 --double-q --dueling --tau 0.5 --loss huber --max-grad-norm 0.3 --per-alpha 0.8"],
)
def test_every_metric_and_parameter_is_equal_at_every_world_size(extra, tmp_path):
    """C1 in float64: 105 gradient steps, the buffer wrapping round, truncations; uniform and prioritised, 1e-9."""
    alone = run("dqn_ddp.py", 1, f"{FLAGS} {extra}", tmp_path / "1")
    assert len(alone.column("losses/td_loss")) == 9 and len(alone.column("eval/episodic_return")) == 4
    assert max(alone.column("charts/episodic_length")) == 10.0, "no row had only truncated episodes"
    size = 2 if extra else 4
    assert_close(alone, run("dqn_ddp.py", size, f"{FLAGS} {extra}", tmp_path / str(size)))


def test_targets_by_hand():
    """Rewards 1 and 2, discounts 0.5 and 0: the target network's best, and its value of the online network's best."""
    rewards, discounts = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0])
    target_q, online_q = torch.tensor([[4.0, 8.0], [4.0, 8.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    parts = {"rewards": rewards, "discounts": discounts, "next_obs": online_q, "weights": torch.ones(2)}
    parts |= {"obs": torch.zeros(2, 2), "actions": torch.tensor([0, 1]), "positions": None, "indices": None}
    for double_q, expected in ((False, [5.0, 2.0]), (True, [3.0, 2.0])):
        args = dqn_ddp.Args(double_q=double_q)
        loss = dqn_ddp.TDLoss(nn.Identity(), lambda obs: target_q, args, 1)  # values of 0 now
        _, stats = loss(Batch(**parts))
        assert (-stats["td_errors"]).tolist() == expected


def test_dueling_values_by_hand():
    """The state's value plus advantages less their mean, each from a hidden layer of its own."""
    space = dqn_ddp.gym.spaces.Box(-1, 1, (3,), dqn_ddp.np.float32)
    for dueling in (False, True):
        network, obs = dqn_ddp.QNetwork(space, 4, dueling, "auto", True), torch.randn(6, 3)
        features = network.trunk(obs)
        assert features.shape == (6, 120) and network.head[0].weight.shape == (84, 120)
        q = network.head(features)
        if dueling:
            assert network.value_head[0].weight.shape == (84, 120) and network.value_head[2].weight.shape == (1, 84)
            q = network.value_head(features) + q - (q[:, :1] + q[:, 1:2] + q[:, 2:3] + q[:, 3:]) / 4
        torch.testing.assert_close(network(obs), q)


def random_batch(actions: torch.Tensor) -> Batch:
    """Of vectors of 3."""
    obs, next_obs = torch.randn(2, len(actions), 3)
    weights, rewards, discounts = torch.rand(3, len(actions))
    return Batch(None, None, weights, obs, actions, rewards, discounts, next_obs)


def assert_shares_give_the_gradients_of_the_whole(
    world: World, make_loss: Callable[[int], nn.Module], inputs: Callable[[slice], tuple]
) -> None:
    """On two ranks. `make_loss`: of a number of shards; `inputs`: of these rows of a batch of 8."""
    for ends in ([0, 8, 8], [0, 3, 8]):
        loss = make_loss(1)
        parameters = [p for p in loss.parameters() if p.requires_grad]
        loss.zero_grad()
        loss(*inputs(slice(0, 8)))[0].backward()
        whole = [p.grad for p in parameters]
        loss.zero_grad()
        ddp_loss = DDP(make_loss(2))
        gradients = Gradients(world)
        gradients.add_loss(ddp_loss)
        rows = slice(ends[world.rank], ends[world.rank + 1])
        gradients.backward(ddp_loss, *([x] for x in inputs(rows)))
        for p, g in zip(parameters, whole, strict=True):
            torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=1e-14)
            assert g.abs().max() > 0.0
    os.write(1, f"equal on rank {world.rank}\n".encode())


def gradients_of_shares() -> None:
    """On two ranks, one of them with none of the batch, and one with 3 of 8 rows, against the whole batch's."""
    torch.set_default_dtype(torch.float64)
    world = World(cuda=False)
    args = SimpleNamespace(double_q=True, loss="huber", batch_size=8)
    with world.process_group(60):
        torch.manual_seed(0)
        network, target_network = (
            dqn_ddp.QNetwork(gym.spaces.Box(-1, 1, (3,)), 2, True, "auto", True) for _ in range(2)
        )
        target_network.requires_grad_(False)
        batch = random_batch(torch.randint(0, 2, (8,)))
        assert_shares_give_the_gradients_of_the_whole(
            world,
            lambda num_shards: dqn_ddp.TDLoss(network, target_network, args, num_shards),
            lambda rows: (Batch(None, None, *(x[rows] for x in batch[2:])),),
        )


def test_unequal_shares_give_the_gradient_of_the_whole(tmp_path):
    """One process's gradient, to 1e-12."""
    printed = fork(gradients_of_shares, (), 2, tmp_path / "out", {})
    assert "equal on rank 0" in printed and "equal on rank 1" in printed


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
