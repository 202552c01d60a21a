"""Scripts learn, with every kind of environment and vectorisation that --help offers.

How far from failing, in 18 runs each (seeds 1 to 6, by the arithmetic of this processor and of two older ones, which
ATEN_CPU_CAPABILITY=default, MKL_CBWR, ONEDNN_MAX_CPU_ISA, OPENBLAS_CORETYPE and NPY_DISABLE_CPU_FEATURES imitate): PPO
reached 475 at 10,000 to 60,000 transitions, PPG at 20,000 to 60,000; pictures gave 20 of 20 in every evaluation of all
three scripts; DQN's best evaluation was 186 to 461; SAC was above -350 at 3,000 to 5,000 transitions.
"""

import gymnasium as gym
import numpy as np
import pytest
import torch

import dqn_ddp
import ppo_ddp
from runs import assert_close, run, same_run

SMALL = "--num-steps 32 --total-timesteps 1024 --eval-every 512 --eval-episodes 4 --save-model"


@pytest.mark.parametrize(
    "script, steps, seed, world_size", [("ppo_ddp.py", 120_000, 1, 1), ("ppg_ddp.py", 80_000, 2, 2)]
)
def test_cartpole_is_solved(script, steps, seed, world_size, tmp_path):
    """With default flags but the budget, an evaluation of 20 episodes reaches 475, and there the run ends."""
    flags = f"--seed {seed} --total-timesteps {steps} --eval-every 10000 --stop-at-return 475"
    result = run(script, world_size, flags, tmp_path / "run", dtype="float32")
    assert max(result.column("eval/episodic_return")[:-1]) < 475 <= result.column("eval/episodic_return")[-1]
    assert result.column("global_step")[-1] < steps


def test_dots_are_learnt_from_images(tmp_path):
    """Acting on what a 10 x 10 image shows: from 10 of 20 at random to more than 18."""
    flags = "--env-id tests.envs:Dots-v0 --num-steps 64 --total-timesteps 6144 --eval-every 2048 --learning-rate 2e-3"
    result = run("ppo_ddp.py", 2, f"{flags} --update-epochs 2", tmp_path / "run", dtype="float32")
    assert result.column("eval/episodic_return")[-1] > 18


def test_dqn_learns_cartpole(tmp_path):
    """Two ranks, prioritised double dueling networks over 3 steps: from 20 at random, an evaluation reaches 120."""
    flags = "--prioritized --n-step 3 --double-q --dueling --learning-starts 1000 --learning-rate 1e-3"
    flags += " --total-timesteps 30000 --exploration-fraction 0.3 --eval-every 4000 --eval-episodes 10"
    result = run("dqn_ddp.py", 2, f"{flags} --stop-at-return 120", tmp_path / "run", dtype="float32")
    assert result.column("eval/episodic_return")[-1] >= 120


@pytest.mark.parametrize(
    "script, flags",
    [
        ("ppg_ddp.py", "--num-steps 32 --n-pi 2 --aux-epochs 1 --num-aux-minibatches 2 --shards 2"),
        ("dqn_ddp.py", "--buffer-size 200 --batch-size 16 --learning-starts 100 --prioritized --checkpoint-every 300"),
    ],
)
def test_images_of_either_order_are_the_same_pixels(script, flags, tmp_path):
    """A user's environment may give (height, width, channels) or (channels, height, width): the same bytes."""
    options = '{"shape":[12,9,4],"dtype":"uint8","actions":[3,0],"end":0.1,"cut":0.1}'
    flags += f" --total-timesteps 512 --eval-every 256 --eval-episodes 2 --save-model --env-kwargs {options}"
    last, first = (
        run(script, 1, f"--env-id tests.envs:{name}-v0 {flags}", tmp_path / name, dtype="float32")
        for name in ("Drawn", "TurnedDrawn")
    )
    assert same_run(last, first) == "" and last.column("charts/episodes")[-1] > 0


def test_sac_learns_pendulum(tmp_path):
    """From -1200 at random to above -350 within 8,000 transitions."""
    flags = "--learning-starts 500 --batch-size 64 --total-timesteps 8000 --eval-every 1000 --stop-at-return -350"
    result = run("sac_ddp.py", 1, f"{flags} --q-lr 2e-3 --policy-lr 1e-3", tmp_path / "run", dtype="float32")
    assert result.column("eval/episodic_return")[-1] >= -350


def test_asynchronous_environments_give_the_same_numbers(tmp_path):
    """One process per environment or none: the same experiment."""
    flags = "--learning-starts 100 --batch-size 16 --total-timesteps 240 --eval-every 200 --eval-episodes 4"
    a = run("dqn_ddp.py", 1, f"{flags} --save-model", tmp_path / "sync")
    b = run("dqn_ddp.py", 2, f"{flags} --save-model --vectorization async", tmp_path / "async")
    assert_close(a, b)


@pytest.mark.parametrize("script", ["ppo_ddp.py", "ppg_ddp.py", "sac_ddp.py"])
def test_continuous_actions_are_of_their_space(script, tmp_path):
    """Networks in float64, actions in the space's float32, its shape and bounds; in training and in evaluation."""
    flags = f"{SMALL} --aux-epochs 0" if script == "ppg_ddp.py" else SMALL
    if script == "sac_ddp.py":
        flags = "--learning-starts 50 --batch-size 8 --total-timesteps 200 --eval-every 100 --eval-episodes 4"
    result = run(script, 1, f"{flags} --env-id tests.envs:Strict-v0", tmp_path / "run")
    assert len(result.column("eval/episodic_return")) == 3


ATARI = {
    "ppo_ddp.py": "--num-steps 8 --num-minibatches 2 --total-timesteps 64 --update-epochs 1",
    "dqn_ddp.py": "--buffer-size 400 --learning-starts 40 --batch-size 8 --total-timesteps 80 --train-frequency 8"
    " --log-every 40 --prioritized --n-step 3",
}


@pytest.mark.parametrize("script", ATARI)
def test_atari_runs_on_two_ranks(script, tmp_path):
    """Native Pong, images channels-first: steps are exact, and the parameters are not those of the start."""
    flags = f"--env-id ALE/Pong-v5 --num-envs 4 --eval-every 0 --save-model {ATARI[script]}"
    result = run(script, 2, flags, tmp_path / "run", dtype="float32")
    assert [int(x) for x in result.column("global_step")] == ([32, 64] if script == "ppo_ddp.py" else [40, 80])
    torch.manual_seed(1)
    torch.randint(2**62, ())  # as `train` draws
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    ppo = script == "ppo_ddp.py"
    network = ppo_ddp.Agent(space, gym.spaces.Discrete(6)) if ppo else dqn_ddp.QNetwork(space, 6, False, "auto", True)
    start, end = network.state_dict(), result.model["agent" if ppo else "q_network"]
    moved = {name: (x - start[name]).abs().max().item() for name, x in end.items()}
    assert all(0 < distance < 0.01 for distance in moved.values()), moved
