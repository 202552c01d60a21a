"""C1 and C2: the number of processes changes the wall clock alone; and the work is divided."""

import os

import pytest

from common.environments import EVALUATION, TRAINING, environment_seeds
from runs import assert_close, run, same_run

SIZES = "--num-envs 12 --num-steps 16 --num-minibatches 4 --update-epochs 3 --save-model"
TWENTY = f"{SIZES} --total-timesteps {20 * 12 * 16} --eval-every 1500 --eval-episodes 5"
CARTPOLE = f"--env-id tests.envs:ShortCartPole-v0 --learning-rate 2e-3 --target-kl 0.003 {TWENTY}"
PENDULUM = f"--env-id Pendulum-v1 --norm-obs --norm-reward --target-kl 0.0003 --learning-rate 1e-3 {TWENTY}"
PHASES = "--n-pi 8 --aux-epochs 2 --num-aux-minibatches 4 --adam-eps 1e-5"  # 1e-8 magnifies rounding tenfold here
STEPS = "--num-envs 4 --buffer-size 400 --batch-size 32 --learning-starts 200 --train-frequency 8 --save-model"
STEPS += " --total-timesteps 1040 --log-every 100 --eval-every 500 --eval-episodes 5"
DQN = f"--env-id tests.envs:NoisyCartPole-v0 {STEPS} --target-network-frequency 100 --learning-rate 1e-3"
SAC = f"--env-id tests.envs:NoisyPendulum-v0 {STEPS}"
DQN_MORE = "--prioritized --n-step 3 --double-q --dueling --tau 0.5 --loss huber --max-grad-norm 0.3 --per-alpha 0.8"
SAC_MORE = "--prioritized --policy-frequency 3 --target-network-frequency 8 --tau 0.1 --no-autotune --alpha 0.2"
FIVE = f"{SIZES} --total-timesteps {5 * 12 * 16} --eval-every 0"
REPLAY = "--learning-starts 200 --batch-size 32 --total-timesteps 600 --log-every 100 --eval-every 300 --save-model"
REPLAY += " --train-frequency 4 --eval-episodes 3"
DOTS = "--env-id tests.envs:Dots-v0 --num-envs 4 --num-steps 8 --n-pi 2 --aux-epochs 1 --num-aux-minibatches 2"
LENGTHS = {"ShortCartPole": 30.0, "Pendulum-v1": 200.0, "Noisy": 10.0}  # of truncated episodes
CASES = [
    ("ppo_ddp.py", CARTPOLE, 2),
    ("ppo_ddp.py", PENDULUM, 4),
    ("ppo_ddp.py", f"{FIVE} --env-id Hopper-v5 --norm-obs", 2),
    ("ppg_ddp.py", f"{CARTPOLE} {PHASES}", 2),
    ("ppg_ddp.py", f"{PENDULUM} {PHASES} --norm-adv batch", 3),
    ("ppg_ddp.py", f"{DOTS} --total-timesteps 128 --save-model --eval-every 0", 2),
    ("dqn_ddp.py", f"{DQN} --batch-size 3", 4),
    ("dqn_ddp.py", f"{DQN} {DQN_MORE}", 2),
    ("dqn_ddp.py", f"{REPLAY} --env-id MinAtar/Breakout-v1", 2),
    ("sac_ddp.py", f"{SAC} --batch-size 3", 4),
    ("sac_ddp.py", f"{SAC} {SAC_MORE}", 2),
]


@pytest.mark.parametrize("script, flags, size", CASES)
def test_every_metric_and_parameter_is_equal_at_every_world_size(script, flags, size, tmp_path):
    """C1 in float64, 1e-9 relative; of batches of three one of four ranks has none."""
    alone = run(script, 1, flags, tmp_path / "1")
    assert_close(alone, run(script, size, flags, tmp_path / str(size)))
    truncated_at = [length for name, length in LENGTHS.items() if name in flags]
    if truncated_at:
        assert max(alone.column("charts/episodic_length")) == truncated_at[0], "no row had only truncated episodes"
        assert len(alone.column("eval/episodic_return")) == 4
    if TWENTY in flags:
        epochs = alone.column("losses/epochs")
        assert len(epochs) == 20 and min(epochs) < max(epochs), "no early stop happened, or nothing else"
    if script == "ppg_ddp.py":
        assert len(alone.column("losses/aux/kl_loss")) == 2
    if script == "sac_ddp.py":
        alphas, learned = alone.column("losses/alpha"), "--no-autotune" not in flags
        assert min(alphas) < 1.0 if learned else {*alphas} == {0.2}
        assert len(alone.column("losses/alpha_loss")) == 9 * learned


SHORT = {
    "ppo_ddp.py": FIVE,
    "ppg_ddp.py": f"{FIVE} {PHASES} --n-pi 5",
    "dqn_ddp.py": f"{REPLAY} --prioritized",
    "sac_ddp.py": f"{REPLAY} --prioritized",
}


@pytest.mark.parametrize("script", SHORT)
def test_the_same_command_gives_the_same_bytes(script, tmp_path):
    """C2, also where rank 1's processor rounds first parameters otherwise; and C1 in float32, within 1e-3."""
    a = run(script, 2, SHORT[script], tmp_path / "a", dtype="float32")
    b = run(script, 2, SHORT[script], tmp_path / "b", dtype="float32", LOCKSTEP_FAULT="start@1@0")
    assert same_run(a, b) == "" and len(a.rows) >= 5
    assert_close(run(script, 1, SHORT[script], tmp_path / "one", dtype="float32"), a, relative=1e-3, absolute=1e-5)


@pytest.mark.parametrize(
    "script, flags, size",
    [("ppo_ddp.py", SIZES, 4), ("dqn_ddp.py", "--num-envs 12 --buffer-size 1200 --learning-starts 200", 2)],
)
def test_environments_are_divided(script, flags, size, tmp_path, tmp_path_factory):
    """Each environment, known by its seed, is stepped on exactly one rank, in that rank's block."""
    notes = tmp_path_factory.mktemp("notes")
    flags += " --env-id tests.envs:ShortCartPole-v0 --total-timesteps 576 --eval-every 500 --eval-episodes 5"
    run(script, size, flags, tmp_path / "run", LOCKSTEP_NOTES=str(notes))
    lines = {tuple(map(int, (notes / name).read_text().split())) for name in os.listdir(notes)}
    training = {seed: i for i, seed in enumerate(environment_seeds(1, TRAINING, range(12)))}
    evaluation = {seed: e for e, seed in enumerate(environment_seeds(1, EVALUATION, range(5)))}
    expected = [(i // (12 // size), seed) for seed, i in training.items()]
    expected += [(e % size, seed) for seed, e in evaluation.items()]
    assert sorted({(rank, seed) for rank, seed, _ in lines}) == sorted(expected), "one is missing, or is on two ranks"
    assert all(steps == 3 * 16 for _, seed, steps in lines if seed in training)
