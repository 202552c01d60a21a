"""Scripts learn, with every kind of environment and vectorisation that --help offers."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_ddp
from runs import assert_close, run

SMALL = "--num-steps 32 --total-timesteps 1024 --eval-every 512 --eval-episodes 4 --save-model"


@pytest.mark.parametrize("script, steps", [("ppo_ddp.py", 120_000), ("ppg_ddp.py", 80_000)])
@pytest.mark.parametrize("seed, world_size", [(1, 1), (2, 2)])
def test_cartpole_is_solved(script, steps, seed, world_size, tmp_path):
    """With default flags but the budget, an evaluation of 20 episodes reaches 475."""
    flags = f"--seed {seed} --total-timesteps {steps} --eval-every 10000 --stop-at-return 475"
    result = run(script, world_size, flags, tmp_path / "run", dtype="float32")
    assert result.column("eval/episodic_return")[-1] >= 475


@pytest.mark.parametrize("script", ["ppo_ddp.py", "ppg_ddp.py"])
def test_dots_are_learnt_from_images(script, tmp_path):
    """Acting on what a 10 x 10 image shows: from 10 of 20 at random to more than 18."""
    flags = "--env-id tests.envs:Dots-v0 --num-steps 64 --total-timesteps 6144 --eval-every 2048 --learning-rate 2e-3"
    flags += " --n-pi 8" if script == "ppg_ddp.py" else " --update-epochs 2"
    result = run(script, 2, flags, tmp_path / "run", dtype="float32")
    assert result.column("eval/episodic_return")[-1] > 18


def test_asynchronous_environments_give_the_same_numbers(tmp_path):
    """One process per environment or none: the same experiment."""
    a = run("ppo_ddp.py", 1, SMALL, tmp_path / "sync")
    b = run("ppo_ddp.py", 2, f"{SMALL} --vectorization async", tmp_path / "async")
    assert_close(a, b)


def test_shifted_actions(tmp_path):
    """Discrete(2, start=5) trains as Discrete(2) does, number by number."""
    a = run("ppo_ddp.py", 1, f"{SMALL} --env-id CartPole-v1", tmp_path / "a")
    b = run("ppo_ddp.py", 1, f"{SMALL} --env-id tests.envs:Shifted-v0", tmp_path / "b")
    assert a.rows == b.rows


def test_atari_runs_on_two_ranks(tmp_path):
    """Native Pong, images channels-first: steps are exact, and the parameters are not those of the start."""
    flags = "--env-id ALE/Pong-v5 --num-envs 4 --num-steps 8 --num-minibatches 2 --total-timesteps 64 --eval-every 0"
    result = run("ppo_ddp.py", 2, f"{flags} --update-epochs 1 --save-model", tmp_path / "run", dtype="float32")
    assert [int(x) for x in result.column("global_step")] == [32, 64]
    torch.manual_seed(1)
    torch.randint(2**62, ())  # as `train` draws
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    start = ppo_ddp.Agent(space, gym.spaces.Discrete(6), channels_first=True).state_dict()
    moved = {name: (x - start[name]).abs().max().item() for name, x in result.model["agent"].items()}
    assert all(0 < distance < 0.01 for distance in moved.values()), moved


def test_compiled_losses_give_the_same_numbers(tmp_path):
    """`--compile` changes the speed and, in float64, nothing beyond rounding."""
    flags = SMALL.replace("1024", "256")
    a = run("ppg_ddp.py", 1, f"{flags} --n-pi 2 --aux-epochs 1", tmp_path / "a")
    b = run("ppg_ddp.py", 1, f"{flags} --n-pi 2 --aux-epochs 1 --compile", tmp_path / "b", TORCH_LOGS="graph_code")
    assert_close(a, b)
    assert "addmm" in b.err or "linear" in b.err, "nothing was compiled"
