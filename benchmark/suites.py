"""The benchmark runs as plain data: script, environment, exact flags, and the seeds at each world size.

A `variant` tells two works of one script on one environment apart. `REFERENCES` are published returns, with source.
A file of your own, such as my_suite.py, is a suite where it defines `SUITE`, a list of `work`s, and, if you like,
`REFERENCES` and `SCALES` as here:

    from benchmark.suites import work

    SUITE = [
        work("ppo_ddp.py", "CartPole-v1", f"--total-timesteps 100000 --learning-rate {x}", {1: (1, 2, 3)}, f"lr{x}")
        for x in ("1e-3", "2.5e-4")
    ]
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.processes import BadInput

ONE_TO_FIVE = {1: (1, 2, 3, 4, 5), 2: (1, 2)}  # world size: seeds
ONE_TO_THREE = {1: (1, 2, 3)}
ONE_AND_TWO = {1: (1,), 2: (1,)}

# as RL Zoo's settings for PPO, apart from normalisation, larger minibatches, our falling rate and clipped value loss
LUNAR = "--total-timesteps 1000000 --eval-every 50000 --num-envs 16 --gamma 0.999 --gae-lambda 0.98 --norm-obs"
PPO_TOY = "--total-timesteps 1500000 --eval-every 100000 --num-envs 64 --learning-rate 5e-3 --ent-coef 0.05"
PPO_TOY += " --no-clip-vloss"
DQN_TOY = "--total-timesteps 300000 --eval-every 20000 --log-every 5000 --num-envs 8 --buffer-size 50000"
DQN_TOY += " --learning-rate 1e-3 --learning-starts 1000 --train-frequency 4"
CLIFF = "--env-kwargs '{\"max_episode_steps\": 200}'"
ROBOTS = ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid", "Swimmer", "Reacher", "Pusher")
ROBOTS += ("InvertedPendulum", "InvertedDoublePendulum")
PPO_MUJOCO = "--total-timesteps 1000000 --eval-every 50000 --num-envs 1 --num-steps 2048 --num-minibatches 32"
PPO_MUJOCO += " --update-epochs 10 --learning-rate 3e-4 --ent-coef 0 --norm-obs"
# as Ant-v4 is: v5 observes contact forces, and charges at most 0.04 a step for them; v3's were all zero
NO_CONTACTS = """--env-kwargs '{"include_cfrc_ext_in_observation": false, "contact_cost_weight": 0}'"""
# as RL Zoo's settings for PPO, apart from larger minibatches and its state-dependent exploration, which we lack
PPO_LUNAR = f"{LUNAR} --num-steps 1024 --num-minibatches 64 --learning-rate 3e-4"
PPO_WALKER = "--total-timesteps 5000000 --eval-every 250000 --num-envs 32 --num-steps 2048 --num-minibatches 256"
PPO_WALKER += " --update-epochs 10 --learning-rate 3e-4 --gamma 0.999 --clip-coef 0.18 --ent-coef 0 --norm-obs"
PPO_PENDULUM = "--total-timesteps 102400 --eval-every 8192 --num-steps 1024 --num-minibatches 64 --update-epochs 10"
PPO_PENDULUM += " --learning-rate 1e-3 --gamma 0.9 --ent-coef 0"
# RL Zoo's discount, lambda, epochs and entropy bonus; its clipping, rate, steps, exploration and budget are others
PPO_CAR = "--total-timesteps 100000 --eval-every 10000 --num-envs 8 --num-steps 256 --num-minibatches 32 --norm-obs"
PPO_CAR += " --update-epochs 10 --learning-rate 3e-4 --gamma 0.9999 --gae-lambda 0.9 --ent-coef 0.004"
SAC_BOX2D = "--total-timesteps 500000 --eval-every 25000 --log-every 10000 --checkpoint-every 25000 --compile"
SAC_CAR = "--total-timesteps 50000 --eval-every 5000 --gamma 0.9999 --tau 0.01"
SAC_SHORT = "--total-timesteps 300000 --eval-every 15000 --log-every 5000"
# about two hours each on a core; they go on after a stop
SAC_MUJOCO = "--total-timesteps 1000000 --eval-every 50000 --log-every 10000 --checkpoint-every 50000 --compile"
GAMES = ("Breakout", "SpaceInvaders", "Asterix", "Freeway", "Seaquest")
PPO_MINATAR = "--total-timesteps 1000000 --eval-every 50000 --num-envs 64 --num-minibatches 8 --learning-rate 2e-3"
PPO_MINATAR += " --no-norm-reward --no-clip-vloss"
PPG_MINATAR = "--total-timesteps 1000000 --eval-every 50000 --num-envs 64 --num-minibatches 8 --learning-rate 2e-3"
PPG_MINATAR += " --update-epochs 4 --n-pi 8"
DQN_MINATAR = "--total-timesteps 1000000 --eval-every 50000 --log-every 10000 --buffer-size 100000 --batch-size 32"
DQN_MINATAR += " --learning-starts 5000 --train-frequency 4 --target-network-frequency 1000 --exploration-fraction 0.1"
DQN_EXACT = "--prioritized --total-timesteps 200000 --eval-every 10000 --log-every 5000"
PPO_ATARI = "--total-timesteps 10000000 --eval-every 500000 --eval-episodes 10 --checkpoint-every 250000"
PPO_ATARI += " --num-envs 8 --clip-coef 0.1 --no-norm-reward"  # the rest of ppo_atari.py's settings are our defaults
DQN_ATARI = "--total-timesteps 10000000 --eval-every 250000 --log-every 50000 --num-envs 8 --buffer-size 1000000"
DQN_ATARI += " --batch-size 32 --learning-rate 1e-4 --learning-starts 80000 --train-frequency 4"
DQN_ATARI += " --target-network-frequency 1000 --exploration-fraction 0.1 --end-e 0.01"
# what a machine without a GPU learns in hours, and goes on with after a stop
PONG = "--shards 2 --num-envs 8 --eval-every 100000 --eval-episodes 10 --checkpoint-every 100000"
PPO_PONG = f"{PONG} --clip-coef 0.1 --no-norm-reward --learning-rate 3e-4 --total-timesteps 2000000"
# as Tianshou's (3-step, double, pixels not divided by 255), but epsilon falls in a tenth of its transitions, and a
# gradient step on half as many images follows 4 transitions instead of 10
DQN_PONG = "--shards 2 --num-envs 8 --eval-every 50000 --eval-episodes 10 --checkpoint-every 100000 --log-every 10000"
DQN_PONG += " --buffer-size 100000 --batch-size 32 --learning-rate 1e-4 --no-anneal-lr --learning-starts 10000"
DQN_PONG += " --train-frequency 4 --target-network-frequency 2000 --n-step 3 --double-q --no-scale-pixels"
DQN_PONG += " --end-e 0.02 --exploration-fraction 0.16 --total-timesteps 600000 --save-model"

# the paper's (arXiv:2009.04416, table 2 and its code): 64 environments on each of four workers
PROCGEN = "--network impala --total-timesteps 100000000 --eval-every 5000000 --checkpoint-every 8388608"
PROCGEN += " --num-envs 256 --num-steps 256 --num-minibatches 8 --learning-rate 5e-4 --no-anneal-lr --adam-eps 1e-8"
PROCGEN += " --gamma 0.999 --norm-adv batch --no-clip-vloss --vf-coef 1 --max-grad-norm inf --eval-episodes 100"
# for a CPU: 200 easy levels, small batches, the network by size, a two-hundredth of the transitions
EASY = "--env-kwargs '{\"num_levels\": 200}' --total-timesteps 500000 --eval-every 50000 --eval-episodes 50"
EASY += " --checkpoint-every 32768 --num-envs 64 --num-steps 64 --num-minibatches 8 --learning-rate 5e-4 --gamma 0.999"
EASY += " --no-clip-vloss --num-threads 1"
PPO_EASY = f"{EASY} --update-epochs 3"
PPG_EASY = f"{EASY} --update-epochs 1 --n-pi 8 --aux-epochs 6 --num-aux-minibatches 32"
PPO_PROCGEN = f"{PROCGEN} --update-epochs 3"
PPG_PROCGEN = f"{PROCGEN} --update-epochs 1 --n-pi 32 --aux-epochs 6 --num-aux-minibatches 512"
# of the picture in README
PROMISE = "--total-timesteps 1000000 --eval-every 16384 --num-envs 16 --num-steps 1024 --num-minibatches 64"
PROMISE += " --learning-rate 3e-4 --gamma 0.999 --gae-lambda 0.98 --norm-obs"


def work(
    script: str, env_id: str, flags: str, seeds: dict[int, tuple[int, ...]], variant: str = "", training: bool = False
) -> dict:
    """`training`: its returns are those of the episodes that it learns from, and not of evaluations."""
    return dict(script=script, env_id=env_id, flags=flags, seeds=seeds, variant=variant, training=training)


# of 16 games, what gives a normalised return of 0 and of 1, hard and easy (arXiv:1912.01588, appendix C)
PROCGEN_SCALES = {
    "Bigfish": ((0, 40), (1, 40)),
    "Bossfight": ((0.5, 13), (0.5, 13)),
    "Caveflyer": ((2, 13.4), (3.5, 12)),
    "Chaser": ((0.5, 14.2), (0.5, 13)),
    "Climber": ((1, 12.6), (2, 12.6)),
    "Coinrun": ((5, 10), (5, 10)),
    "Dodgeball": ((1.5, 19), (1.5, 19)),
    "Fruitbot": ((-0.5, 27.2), (-1.5, 32.4)),
    "Heist": ((2, 10), (3.5, 10)),
    "Jumper": ((1, 10), (3, 10)),
    "Leaper": ((1.5, 10), (3, 10)),
    "Maze": ((4, 10), (5, 10)),
    "Miner": ((1.5, 20), (1.5, 13)),
    "Ninja": ((2, 10), (3.5, 10)),
    "Plunder": ((3, 30), (4.5, 30)),
    "Starpilot": ((1.5, 35), (2.5, 64)),
}

SUITES = {
    "classic": [
        work("ppo_ddp.py", "CartPole-v1", "--total-timesteps 200000 --eval-every 10000", ONE_TO_FIVE),
        work("ppg_ddp.py", "CartPole-v1", "--total-timesteps 300000 --eval-every 15000", ONE_TO_FIVE),
        work("dqn_ddp.py", "CartPole-v1", "--eval-every 25000 --log-every 5000", ONE_TO_FIVE),
        work(
            "dqn_ddp.py", "CartPole-v1", "--eval-every 25000 --log-every 5000 --prioritized", ONE_TO_FIVE, "prioritized"
        ),
        work(
            "dqn_ddp.py",
            "CartPole-v1",
            "--eval-every 25000 --log-every 5000 --no-anneal-lr --end-e 0.05",
            {1: (1, 2, 3, 4, 5)},
            "constant",
        ),
        work("ppo_ddp.py", "Acrobot-v1", "--total-timesteps 500000 --eval-every 25000", ONE_TO_FIVE),
        work("ppg_ddp.py", "Acrobot-v1", "--total-timesteps 500000 --eval-every 25000", ONE_TO_FIVE),
        work("dqn_ddp.py", "Acrobot-v1", "--eval-every 25000 --log-every 5000", ONE_TO_FIVE),
        work(
            "ppo_ddp.py",
            "LunarLander-v3",
            PPO_LUNAR,
            ONE_TO_FIVE,
        ),
        work("ppg_ddp.py", "LunarLander-v3", f"{LUNAR} --num-minibatches 8 --update-epochs 4", ONE_TO_FIVE),
        work(
            "dqn_ddp.py",
            "LunarLander-v3",
            "--total-timesteps 500000 --eval-every 25000 --log-every 5000 --buffer-size 100000 --train-frequency 4"
            " --learning-rate 5e-4 --exploration-fraction 0.2 --double-q",
            {1: (1, 2, 3, 4, 5), 2: (1, 2, 3, 4, 5)},
        ),
        work("sac_ddp.py", "Pendulum-v1", "--total-timesteps 20000 --eval-every 1000", ONE_TO_FIVE),
        work(
            "ppo_ddp.py",
            "CartPole-v1",
            "--total-timesteps 200000 --eval-every 10000 --compile",
            ONE_TO_THREE,
            "compile",
        ),
        work(
            "ppg_ddp.py",
            "CartPole-v1",
            "--total-timesteps 300000 --eval-every 15000 --compile",
            ONE_TO_THREE,
            "compile",
        ),
        work("dqn_ddp.py", "CartPole-v1", "--eval-every 25000 --log-every 5000 --compile", ONE_TO_THREE, "compile"),
        work(
            "sac_ddp.py", "Pendulum-v1", "--total-timesteps 20000 --eval-every 1000 --compile", ONE_TO_THREE, "compile"
        ),
    ],
    "exact": [
        work("ppo_ddp.py", "CartPole-v1", "--shards 2 --total-timesteps 200000 --eval-every 10000", ONE_AND_TWO),
        work("ppg_ddp.py", "Acrobot-v1", "--shards 2 --total-timesteps 200000 --eval-every 10000", ONE_AND_TWO),
        work("dqn_ddp.py", "CartPole-v1", f"--shards 2 {DQN_EXACT}", ONE_AND_TWO, "prioritized"),
        work("sac_ddp.py", "Pendulum-v1", "--shards 2 --total-timesteps 20000 --eval-every 1000", ONE_AND_TWO),
    ],
    "promise": [
        work("ppo_ddp.py", "LunarLander-v3", flags, {1: (1,), 2: (1,), 4: (1,)}, variant)
        for flags, variant in ((f"--shards 4 --checkpoint-every 65536 {PROMISE}", "shards"), (PROMISE, ""))
    ],
    "toytext": [
        work(script, env_id, f"{flags} {own}", ONE_TO_THREE)
        for env_id, own in (("FrozenLake-v1", "--eval-episodes 100"), ("Taxi-v4", ""), ("CliffWalking-v1", CLIFF))
        for script, flags in (("ppo_ddp.py", PPO_TOY), ("dqn_ddp.py", DQN_TOY))
    ],
    "minatar": [
        work(script, f"MinAtar/{game}-v1", flags, ONE_TO_THREE, variant)
        for game in GAMES
        for script, flags, variant in (
            ("ppo_ddp.py", PPO_MINATAR, ""),
            ("ppg_ddp.py", PPG_MINATAR, ""),
            ("dqn_ddp.py", DQN_MINATAR, ""),
            ("dqn_ddp.py", f"{DQN_MINATAR} --prioritized", "prioritized"),
        )
    ],
    "continuous": [
        work(script, env_id, flags, ONE_TO_THREE)
        for script, env_id, flags in (
            ("ppo_ddp.py", "BipedalWalker-v3", PPO_WALKER),
            ("ppo_ddp.py", "LunarLanderContinuous-v3", PPO_LUNAR),
            ("ppo_ddp.py", "MountainCarContinuous-v0", PPO_CAR),
            ("ppo_ddp.py", "Pendulum-v1", PPO_PENDULUM),
            ("sac_ddp.py", "BipedalWalker-v3", SAC_BOX2D),
            ("sac_ddp.py", "LunarLanderContinuous-v3", SAC_BOX2D),
            ("sac_ddp.py", "MountainCarContinuous-v0", SAC_CAR),
        )  # SAC on Pendulum is in `classic`
    ],
    "minatar-3m": [
        work(script, f"MinAtar/{game}-v1", flags.replace("1000000", "3000000"), ONE_TO_THREE)
        for game in GAMES
        for script, flags in (("ppo_ddp.py", PPO_MINATAR), ("ppg_ddp.py", PPG_MINATAR))
    ],
    "mujoco": [
        *(work("ppo_ddp.py", f"{robot}-v5", PPO_MUJOCO, {1: (1, 2, 3, 4, 5)}) for robot in ROBOTS),
        work("ppo_ddp.py", "Ant-v5", f"{PPO_MUJOCO} {NO_CONTACTS}", {1: (1, 2, 3, 4, 5)}, "no-contacts"),
        *(
            work("sac_ddp.py", f"{robot}-v5", flags, seeds, variant)
            for robot in ROBOTS[:3]
            for flags, seeds, variant in ((SAC_MUJOCO, ONE_TO_THREE, ""), (SAC_SHORT, {1: (1, 2)}, "300k"))
        ),
    ],
    "atari": [
        work(script, env_id, flags, ONE_TO_THREE)
        for env_id in ("ALE/Pong-v5", "ALE/Breakout-v5", "ALE/BeamRider-v5")
        for script, flags in (("ppo_ddp.py", PPO_ATARI), ("dqn_ddp.py", DQN_ATARI))
    ],
    "pong": [
        work("ppo_ddp.py", "ALE/Pong-v5", PPO_PONG, {1: (1,), 2: (1, 2, 3)}),
        work("dqn_ddp.py", "ALE/Pong-v5", DQN_PONG, {1: (1, 2, 3), 2: (1,)}),
    ],
    "breakout": [work("ppo_ddp.py", "ALE/Breakout-v5", f"{PPO_ATARI} --shards 2", {2: (1,)}, training=True)],
    "procgen": [
        work(script, f"envpool/{game}Hard-v0", flags, {4: (1, 2, 3)}, training=True)
        for game in PROCGEN_SCALES
        for script, flags in (("ppo_ddp.py", PPO_PROCGEN), ("ppg_ddp.py", PPG_PROCGEN))
    ],
    "procgen-easy": [
        work(script, "envpool/CoinrunEasy-v0", flags, {1: (1, 2)}, training=True)
        for script, flags in (("ppo_ddp.py", PPO_EASY), ("ppg_ddp.py", PPG_EASY))
    ],
}

CLEANRL, RL_ZOO = "CleanRL's documentation", "RL Zoo's benchmark page, one run"
TIANSHOU = "Tianshou's benchmark, best mean of ten seeds within the budget"
REFERENCES = {  # (script, environment): (return, spread, transitions, source)
    ("ppo_ddp.py", "CartPole-v1"): (490, 6, 500_000, CLEANRL),
    ("dqn_ddp.py", "CartPole-v1"): (489, 16, 500_000, CLEANRL),
    ("ppo_ddp.py", "Acrobot-v1"): (-86, 1, 500_000, CLEANRL),
    ("dqn_ddp.py", "Acrobot-v1"): (-92, 7, 500_000, CLEANRL),
    ("ppo_ddp.py", "LunarLander-v3"): (242, 32, 1_000_000, f"{RL_ZOO} (v2)"),
    ("ppo_ddp.py", "HalfCheetah-v5"): (1443, 46, 1_000_000, f"{CLEANRL} (v4)"),
    ("ppo_ddp.py", "Hopper-v5"): (2383, 272, 1_000_000, f"{CLEANRL} (v4)"),
    ("ppo_ddp.py", "Walker2d-v5"): (2288, 572, 1_000_000, f"{CLEANRL} (v4)"),
    ("ppo_ddp.py", "Ant-v5"): (3258, 1079, 1_000_000, f"{TIANSHOU} (v3)"),
    ("ppo_ddp.py", "Humanoid-v5"): (716, 49, 1_000_000, f"{CLEANRL} (v4)"),
    ("ppo_ddp.py", "Swimmer-v5"): (67, 99, 1_000_000, f"{TIANSHOU} (v3)"),
    ("ppo_ddp.py", "Reacher-v5"): (-4.1, 0.3, 1_000_000, f"{TIANSHOU} (v2)"),
    ("ppo_ddp.py", "Pusher-v5"): (-40.4, 7.2, 1_000_000, f"{CLEANRL} (v4)"),
    ("ppo_ddp.py", "InvertedPendulum-v5"): (963, 22, 1_000_000, f"{CLEANRL} (v4)"),
    ("ppo_ddp.py", "InvertedDoublePendulum-v5"): (9231, 270, 1_000_000, f"{TIANSHOU} (v2)"),
    ("ppo_ddp.py", "BipedalWalker-v3"): (213, 129, 5_000_000, RL_ZOO),
    ("ppo_ddp.py", "LunarLanderContinuous-v3"): (271, 32, 1_000_000, f"{RL_ZOO} (v2)"),
    ("ppo_ddp.py", "MountainCarContinuous-v0"): (88.3, 2.6, 20_000, RL_ZOO),
    ("ppo_ddp.py", "Pendulum-v1"): (-172, 104, 100_000, RL_ZOO),
    ("sac_ddp.py", "BipedalWalker-v3"): (298, 33, 500_000, RL_ZOO),
    ("sac_ddp.py", "LunarLanderContinuous-v3"): (260, 65, 500_000, f"{RL_ZOO} (v2)"),
    ("sac_ddp.py", "MountainCarContinuous-v0"): (94.7, 1.1, 50_000, RL_ZOO),
    ("sac_ddp.py", "Pendulum-v1"): (-157, 89, 20_000, RL_ZOO),
    ("sac_ddp.py", "HalfCheetah-v5"): (9635, 1424, 1_000_000, f"{CLEANRL} (v4)"),
    ("sac_ddp.py", "Hopper-v5"): (2310, 343, 1_000_000, f"{CLEANRL} (v4)"),
    ("sac_ddp.py", "Walker2d-v5"): (3591, 911, 1_000_000, f"{CLEANRL} (v4)"),
    ("ppo_ddp.py", "ALE/Pong-v5"): (20.4, 0.2, 10_000_000, f"{CLEANRL} (NoFrameskip-v4)"),
    ("ppo_ddp.py", "ALE/Breakout-v5"): (415, 28, 10_000_000, f"{CLEANRL} (NoFrameskip-v4)"),
    ("ppo_ddp.py", "ALE/BeamRider-v5"): (1916, 485, 10_000_000, f"{CLEANRL} (NoFrameskip-v4)"),
    ("dqn_ddp.py", "ALE/Pong-v5"): (20.3, 0.4, 10_000_000, f"{CLEANRL} (NoFrameskip-v4)"),
    ("dqn_ddp.py", "ALE/Breakout-v5"): (367, 40, 10_000_000, f"{CLEANRL} (NoFrameskip-v4)"),
}

# what a random agent and a good one reach: returns are scaled between them (0 to 1) in a suite's aggregate figure
SCALES = {
    "CartPole-v1": (22, 500),
    "Acrobot-v1": (-500, -80),
    "LunarLander-v3": (-180, 250),
    "Pendulum-v1": (-1230, -150),
    "BipedalWalker-v3": (-99, 310),
    "LunarLanderContinuous-v3": (-200, 280),
    "MountainCarContinuous-v0": (-33, 95),
    "FrozenLake-v1": (0, 0.75),
    "Taxi-v4": (-765, 8),
    "CliffWalking-v1": (-2041, -13),
    "MinAtar/Breakout-v1": (0.4, 30),
    "MinAtar/SpaceInvaders-v1": (3, 150),
    "MinAtar/Asterix-v1": (0.4, 20),
    "MinAtar/Freeway-v1": (0.4, 60),
    "MinAtar/Seaquest-v1": (0.1, 40),
    "HalfCheetah-v5": (-280, 9635),
    "Hopper-v5": (20, 3300),
    "Walker2d-v5": (2, 5000),
    "Ant-v5": (-33, 5000),
    "Humanoid-v5": (96, 5500),
    "Swimmer-v5": (4, 150),
    "Reacher-v5": (-42, -3),
    "Pusher-v5": (-146, -22),
    "InvertedPendulum-v5": (7, 1000),
    "InvertedDoublePendulum-v5": (59, 9360),
    "ALE/Pong-v5": (-20.7, 20.4),
    "ALE/Breakout-v5": (1.7, 415),
    "ALE/BeamRider-v5": (364, 1916),
}
SCALES |= {f"envpool/{game}Hard-v0": hard for game, (hard, _) in PROCGEN_SCALES.items()}
SCALES |= {f"envpool/{game}Easy-v0": easy for game, (_, easy) in PROCGEN_SCALES.items()}


@dataclass(frozen=True)
class Suite:
    name: str
    works: list[dict]
    references: dict[tuple[str, str], tuple[float, float, int, str]]
    scales: dict[str, tuple[float, float]]
    folder: Path  # where its scripts are looked for first
    home: Path  # of its `results` and `figures`, in the folder that one is in

    def scaled(self, env_id: str, returns: np.ndarray) -> np.ndarray:
        """Returns in units in which a random agent's is 0 and a good one's 1, of a task with a scale."""
        low, high = self.scales[env_id]
        return (returns - low) / (high - low)


def suite_of(name: str) -> Suite:
    """A suite from here, or from a file of a user's own. Raises `BadInput` for what is neither."""
    root = Path(__file__).parent.parent
    if name in SUITES:
        return Suite(name, SUITES[name], REFERENCES, SCALES, root, Path("benchmark"))
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        raise BadInput(f"SUITE {name}: must be one of {', '.join(SUITES)}, or a file of your own, such as my_suite.py.")
    found = runpy.run_path(name)
    works, names = found.get("SUITE"), work(*4 * [""]).keys()
    if not works or not isinstance(works, list) or not all(isinstance(x, dict) and x.keys() == names for x in works):
        raise BadInput(f"SUITE {name}: must define SUITE, a list of works; see benchmark/suites.py.")
    curves = [(x["script"], x["env_id"], x["variant"]) for x in works]
    if twice := next((x for x in curves if curves.count(x) > 1), None):
        raise BadInput(f"SUITE {name}: {twice[0]} on {twice[1]} is there twice; give the works variants.")
    own = (found.get("REFERENCES", {}), found.get("SCALES", {}))
    return Suite(path.stem, works, REFERENCES | own[0], SCALES | own[1], path.absolute().parent, Path("runs"))
