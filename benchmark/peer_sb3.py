"""Stable-Baselines3 with a script's hyperparameters, in its own environment; prints steady-state steps per second.

    python peer_sb3.py {ppo-cartpole,ppo-breakout,dqn-cartpole,sac-hopper,startup} TOTAL_TIMESTEPS THREADS

Run by benchmark/speed.py, which installs that environment. `startup` ends at the environment's first step.
"""

import sys
import time

import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack


class Clock(BaseCallback):
    """Times of the starts of rollouts; the first eighth of a run is warm-up."""

    def _on_training_start(self) -> None:
        self.times: list[tuple[int, float]] = []

    def _on_rollout_start(self) -> None:
        self.times.append((self.num_timesteps, time.perf_counter()))

    def _on_step(self) -> bool:
        return True

    def steps_per_second(self) -> float:
        (s0, t0), (s1, t1) = self.times[max(1, len(self.times) // 8)], self.times[-1]
        return (s1 - s0) / (t1 - t0)


def main(work: str, total: int, threads: int) -> None:
    torch.set_num_threads(threads)

    def anneal(remaining: float) -> float:
        return 2.5e-4 * remaining

    shared = {"n_steps": 128, "n_epochs": 4, "learning_rate": anneal, "ent_coef": 0.01, "vf_coef": 0.5, "device": "cpu"}
    if work == "ppo-breakout":
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        env = make_vec_env("BreakoutNoFrameskip-v4", n_envs=8, seed=1, wrapper_class=AtariWrapper)
        env = VecFrameStack(env, n_stack=4)
        model = PPO("CnnPolicy", env, batch_size=256, clip_range=0.1, clip_range_vf=0.1, verbose=0, **shared)
    elif work == "dqn-cartpole":
        model = DQN(
            "MlpPolicy",
            make_vec_env("CartPole-v1", n_envs=1, seed=1),
            learning_rate=2.5e-4,
            buffer_size=10_000,
            learning_starts=1_000,
            batch_size=128,
            train_freq=10,
            target_update_interval=500,
            exploration_fraction=0.5,
            policy_kwargs={"net_arch": [120, 84]},
            device="cpu",
        )
    elif work == "sac-hopper":
        env = make_vec_env("Hopper-v5", n_envs=1, seed=1)
        model = SAC("MlpPolicy", env, learning_rate=3e-4, learning_starts=200, batch_size=256, device="cpu")
    else:
        env_id = "benchmark.first_step:FirstStep-v0" if work == "startup" else "CartPole-v1"
        env = make_vec_env(env_id, n_envs=4, seed=1)
        model = PPO("MlpPolicy", env, batch_size=128, clip_range=0.2, clip_range_vf=0.2, verbose=0, **shared)
    clock = Clock()
    model.learn(total or 512, callback=clock)
    print(f"sps {clock.steps_per_second():.1f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
