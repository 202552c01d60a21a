"""Scripts learn from every kind of observation and action.

How far from failing, in 18 runs each (six seeds, the arithmetic of this processor and of two older ones): PPO reached
475 at 10,000 to 60,000 transitions, PPG at 20,000 to 60,000; pictures gave 20 of 20 in every evaluation; DQN's best
evaluation was 186 to 461; SAC was above -350 at 3,000 to 5,000 transitions.
"""

import pytest

from runs import run, same_run

SMALL = "--num-steps 32 --total-timesteps 1024 --eval-every 512 --eval-episodes 4 --save-model"
DOTS = "--seed 3 --env-id tests.envs:Dots-v0 --num-steps 64 --total-timesteps 6144 --update-epochs 2"
DOTS += " --learning-rate 2e-3"
DQN = "--prioritized --n-step 3 --double-q --dueling --learning-starts 1000 --learning-rate 1e-3 --eval-episodes 10"
DQN += " --total-timesteps 30000 --exploration-fraction 0.3 --log-every 7000"
SAC = "--learning-starts 500 --batch-size 64 --total-timesteps 8000 --q-lr 2e-3 --policy-lr 1e-3"
# how many processes, flags, evaluations at multiples of so many transitions, and the return at which a run ends
LEARNS = {
    "PPO solves CartPole by its defaults": ("ppo", 1, "--seed 1 --total-timesteps 120000", 10_000, 475),
    "PPG solves CartPole by its defaults": ("ppg", 2, "--seed 2 --total-timesteps 80000", 10_000, 475),
    "PPO acts on what images show, from 10 of 20 at random": ("ppo", 2, DOTS, 2048, 18.5),
    "DQN balances the pole, from 20 at random": ("dqn", 2, DQN, 4000, 120),
    "SAC swings up the pendulum, from -1200 at random": ("sac", 1, SAC, 1000, -350),
}


@pytest.mark.parametrize("what", LEARNS)
def test_a_script_learns(what, tmp_path):
    script, size, flags, period, goal = LEARNS[what]
    flags += f" --eval-every {period} --stop-at-return {goal}"
    result = run(f"{script}_ddp.py", size, flags, tmp_path / "run", dtype="float32")
    returns = result.column("eval/episodic_return")
    assert max(returns[:-1]) < goal <= returns[-1]
    assert len({*result.column("global_step")[-2:]}) == 1  # a row of training, then the evaluation


IMAGES = {
    "ppg_ddp.py": "--num-steps 32 --n-pi 2 --aux-epochs 1 --num-aux-minibatches 2 --shards 2",
    "dqn_ddp.py": "--buffer-size 200 --batch-size 16 --learning-starts 100 --prioritized --checkpoint-every 300",
}


@pytest.mark.parametrize("script", IMAGES)
def test_images_of_either_order_are_the_same_pixels(script, tmp_path):
    options = '{"shape":[12,9,4],"dtype":"uint8","actions":[3,0],"end":0.1,"cut":0.1}'
    flags = f"{IMAGES[script]} --total-timesteps 512 --eval-every 256 --eval-episodes 2 --env-kwargs {options}"
    last, first = (
        run(script, 1, f"--env-id tests.envs:{name}-v0 --save-model {flags}", tmp_path / name, dtype="float32")
        for name in ("Drawn", "TurnedDrawn")
    )
    assert same_run(last, first) == "" and last.column("charts/episodes")[-1] > 0


@pytest.mark.parametrize("script", ["ppo_ddp.py", "ppg_ddp.py", "sac_ddp.py"])
def test_continuous_actions_are_of_their_space(script, tmp_path):
    """Networks in float64, actions in the space's float32, its shape and bounds: the environment asserts each."""
    flags = f"{SMALL} --aux-epochs 0" if script == "ppg_ddp.py" else SMALL
    if script == "sac_ddp.py":
        flags = "--learning-starts 50 --batch-size 8 --total-timesteps 200 --eval-every 100 --eval-episodes 4"
    options = '{"shape":[3],"dtype":"float32","actions":[2,2],"action_dtype":"float32"}'
    result = run(script, 1, f"{flags} --env-id tests.envs:Drawn-v0 --env-kwargs {options}", tmp_path / "run")
    assert len(result.column("eval/episodic_return")) == 3
