"""C1 and C2: the number of processes changes the wall clock and nothing else; and the work is really divided."""

import json
import os
from pathlib import Path

import pytest

import ppo_ddp
from common.environments import EVALUATION, TRAINING, environment_seeds
from runs import assert_close, fork, run, same_run

SIZES = "--num-envs 12 --num-steps 16 --num-minibatches 4 --update-epochs 3 --save-model"
TWENTY = f"{SIZES} --total-timesteps {20 * 12 * 16} --eval-every 1500 --eval-episodes 5"
CARTPOLE = f"--env-id tests.envs:ShortCartPole-v0 --learning-rate 2e-3 --target-kl 0.003 {TWENTY}"
PENDULUM = f"--env-id Pendulum-v1 --norm-obs --norm-reward --target-kl 0.0008 --learning-rate 1e-3 {TWENTY}"
PHASES = "--n-pi 8 --aux-epochs 2 --num-aux-minibatches 4"


@pytest.mark.parametrize(
    "script, flags, size",
    [
        ("ppo_ddp.py", CARTPOLE, 2),
        ("ppo_ddp.py", PENDULUM, 4),
        ("ppg_ddp.py", f"{CARTPOLE} {PHASES} --adam-eps 1e-5", 2),  # PPG's 1e-8 magnifies rounding tenfold here
        ("ppg_ddp.py", f"{PENDULUM} {PHASES} --norm-adv batch --adam-eps 1e-5", 3),
    ],
)
def test_every_metric_and_parameter_is_equal_at_every_world_size(script, flags, size, tmp_path):
    """C1 in float64: 20 iterations, stops by --target-kl, truncations, normalisation, evaluation; 1e-9 relative."""
    alone = run(script, 1, flags, tmp_path / "1")
    assert len(alone.column("losses/policy_loss")) == 20 and len(alone.column("eval/episodic_return")) == 4
    epochs = alone.column("losses/epochs")
    assert min(epochs) < max(epochs), "no early stop happened, or nothing else"
    lengths = alone.column("charts/episodic_length")
    truncated_at = 30.0 if "CartPole" in flags else 200.0
    assert max(lengths) == truncated_at, "no iteration had only truncated episodes"
    if script == "ppg_ddp.py":
        assert len(alone.column("losses/aux/kl_loss")) == 2
    assert_close(alone, run(script, size, flags, tmp_path / str(size)))


FIVE = f"{SIZES} --total-timesteps {5 * 12 * 16} --eval-every 0"
REPLAY = "--learning-starts 200 --batch-size 32 --total-timesteps 600 --log-every 100 --eval-every 300 --save-model"
REPLAY += " --train-frequency 4"


@pytest.mark.parametrize(
    "script, flags",
    [
        ("ppo_ddp.py", f"{FIVE} --env-id Hopper-v5 --norm-obs"),
        ("dqn_ddp.py", f"{REPLAY} --env-id MinAtar/Breakout-v1"),
    ],
)
def test_simulators_and_images_agree_over_ranks(script, flags, tmp_path):
    """C1 in float64 on MuJoCo and on images: 1e-9."""
    one, two = (run(script, size, flags, tmp_path / str(size)) for size in (1, 2))
    assert_close(one, two)


@pytest.mark.parametrize("script", ["ppo_ddp.py", "ppg_ddp.py", "dqn_ddp.py", "sac_ddp.py"])
def test_the_same_command_gives_the_same_bytes(script, tmp_path):
    """C2 at world size 2 in float32, also where another processor rounds the first parameters of rank 1 otherwise."""
    flags = f"{REPLAY} --prioritized"
    if script in ("ppo_ddp.py", "ppg_ddp.py"):
        flags = FIVE if script == "ppo_ddp.py" else f"{FIVE} {PHASES} --n-pi 5"
    a = run(script, 2, flags, tmp_path / "a", dtype="float32")
    b = run(script, 2, flags, tmp_path / "b", dtype="float32", LOCKSTEP_FAULT="start@1@0")
    assert same_run(a, b) == "" and len(a.rows) >= 5


@pytest.mark.parametrize(
    "script, flags",
    [
        ("ppo_ddp.py", FIVE),
        ("ppg_ddp.py", f"{FIVE} {PHASES} --n-pi 5 --adam-eps 1e-5"),
        ("dqn_ddp.py", REPLAY),
        ("sac_ddp.py", REPLAY),
    ],
)
def test_float32_agrees_over_the_first_updates(script, flags, tmp_path):
    """C1 in float32: within 1e-3 over five iterations, or a hundred gradient steps."""
    one, two = (run(script, size, flags, tmp_path / str(size), dtype="float32") for size in (1, 2))
    assert_close(one, two, relative=1e-3, absolute=1e-5)


def test_libraries_that_an_environment_draws_from_are_seeded(tmp_path):
    """Rewards from `random` and `numpy.random`: the same command gives the same numbers."""
    flags = "--env-id tests.envs:LibraryCartPole-v0 --num-steps 32 --total-timesteps 512 --eval-every 0"
    a, b = (run("ppo_ddp.py", 1, flags, tmp_path / name) for name in "ab")
    assert a.rows == b.rows and len(set(a.column("losses/value_loss"))) == 4


@pytest.mark.parametrize(
    "script, flags, size",
    [("ppo_ddp.py", SIZES, 4), ("dqn_ddp.py", "--num-envs 12 --buffer-size 1200 --learning-starts 200", 2)],
)
def test_environments_are_divided(script, flags, size, tmp_path):
    """Each environment, known by its seed, is stepped on exactly one rank, in that rank's block."""
    flags += " --env-id tests.envs:ShortCartPole-v0 --total-timesteps 576 --eval-every 500 --eval-episodes 5"
    notes = tmp_path / "notes"
    notes.mkdir()
    run(script, size, flags, tmp_path / "run", LOCKSTEP_NOTES=str(notes))
    lines = [tuple(map(int, (notes / name).read_text().split())) for name in os.listdir(notes)]
    training = {int(s): i for i, s in enumerate(environment_seeds(1, TRAINING, range(12)))}
    evaluation = {int(s): e for e, s in enumerate(environment_seeds(1, EVALUATION, range(5)))}
    seeds = [seed for _, seed, _ in lines]
    assert sorted(seeds) == sorted([*training, *evaluation]), "an environment is missing, or is on two ranks"
    for rank, seed, steps in lines:
        if seed in training:
            assert rank == training[seed] // (12 // size) and steps == 3 * 16
        else:
            assert rank == evaluation[seed] % size


def recorded_minibatches(run_dir: str) -> None:
    """One iteration of PPO; the observations of each minibatch go to a file of this rank."""
    batches, forward = [], ppo_ddp.PPOLoss.forward

    def record(self, minibatch):
        batches.append(sorted(map(tuple, minibatch.obs.tolist())))
        return forward(self, minibatch)

    ppo_ddp.PPOLoss.forward = record
    ppo_ddp.main(ppo_ddp.Args(num_envs=4, num_steps=8, total_timesteps=32, eval_every=0, run_dir=run_dir))
    Path(f"{run_dir}{os.environ.get('RANK', 0)}.json").write_text(json.dumps(batches))


def test_minibatches_are_divided(tmp_path):
    """Minibatch k of one process is, row by row, the disjoint union of the ranks' minibatches k."""
    for name, size in (("one", 1), ("two", 2)):
        fork(recorded_minibatches, (str(tmp_path / name),), size, tmp_path / f"{name}.out", {})
    whole, *parts = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one0", "two0", "two1"))
    assert len(whole) == 16 and all(len(batch) == 8 for batch in whole)
    for batch, part0, part1 in zip(whole, *parts, strict=True):
        assert len(part0) == len(part1) == 4
        assert sorted([*part0, *part1]) == batch
        assert len(set(map(tuple, batch))) == 8
