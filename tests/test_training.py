"""Scripts learn, with every kind of environment and vectorisation that --help offers."""

import psutil
import pytest

from runs import assert_close, run

SMALL = "--num-steps 32 --total-timesteps 1024 --eval-every 512 --eval-episodes 4 --save-model"


@pytest.mark.parametrize("script, steps", [("ppo_ddp.py", 120_000), ("ppg_ddp.py", 80_000)])
@pytest.mark.parametrize("seed, world_size", [(1, 1), (2, 1), (3, 2)])
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
    """One process per environment or none: the same experiment, and no process left."""
    before = set(psutil.pids())
    a = run("ppo_ddp.py", 1, SMALL, tmp_path / "sync")
    b = run("ppo_ddp.py", 2, f"{SMALL} --vectorization async", tmp_path / "async")
    assert_close(a, b)
    left = [p for p in psutil.process_iter() if p.pid not in before and "launcher.py" in " ".join(p.cmdline())]
    assert not left


def test_shifted_actions(tmp_path):
    """Discrete(2, start=5) trains as Discrete(2) does, number by number."""
    a = run("ppo_ddp.py", 1, f"{SMALL} --env-id CartPole-v1", tmp_path / "a")
    b = run("ppo_ddp.py", 1, f"{SMALL} --env-id tests.envs:Shifted-v0", tmp_path / "b")
    assert a.rows == b.rows


def test_atari_runs_on_two_ranks(tmp_path):
    """Native Pong, images channels-first, with a lost point no end of the game; steps are exact."""
    flags = "--env-id ALE/Pong-v5 --num-envs 4 --num-steps 8 --num-minibatches 2 --total-timesteps 64 --eval-every 0"
    result = run("ppo_ddp.py", 2, f"{flags} --update-epochs 1 --save-model", tmp_path / "run", dtype="float32")
    assert [int(x) for x in result.column("global_step")] == [32, 64]
    assert result.column("losses/entropy")[0] > 1.7 and result.model["agent"]["trunk.layers.0.weight"].abs().sum() > 0


def test_compiled_losses_give_the_same_numbers(tmp_path):
    """`--compile` changes the speed and, in float64, nothing beyond rounding."""
    flags = SMALL.replace("1024", "256")
    a = run("ppg_ddp.py", 1, f"{flags} --n-pi 2 --aux-epochs 1", tmp_path / "a")
    b = run("ppg_ddp.py", 1, f"{flags} --n-pi 2 --aux-epochs 1 --compile --timeout 300", tmp_path / "b")
    assert_close(a, b)
