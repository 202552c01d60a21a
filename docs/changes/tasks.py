"""Two environments for the curves of docs/modify.md: `--env-id docs.changes.tasks:PositionCartPole-v0`."""

import gymnasium as gym
import numpy as np


class Goal(gym.Wrapper):
    """Reward 1 where an episode terminates, and 0 everywhere else."""

    def step(self, action):
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, float(terminated), terminated, truncated, info


def sparse_mountain_car(**options):
    return Goal(gym.make("MountainCar-v0", **options))


def position_cart_pole(**options):
    """CartPole without the velocities of its cart and of its pole."""
    env = gym.make("CartPole-v1", **options)
    space = gym.spaces.Box(env.observation_space.low[::2], env.observation_space.high[::2], dtype=np.float32)
    return gym.wrappers.TransformObservation(env, lambda obs: obs[::2], space)


gym.register("SparseMountainCar-v0", sparse_mountain_car)
gym.register("PositionCartPole-v0", position_cart_pole)
