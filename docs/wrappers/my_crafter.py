"""Crafter has the interface of gym 0.21: its seed is an argument of the constructor.

It goes through sets of objects in the order of their addresses. With numbers of their own it repeats.
"""

import crafter
import gymnasium as gym
import numpy as np


class Crafter(gym.Env):
    observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = gym.spaces.Discrete(17)

    def reset(self, *, seed=None, options=None):
        self.game = crafter.Env(seed=seed)
        return self.game.reset(), {}

    def step(self, action):
        picture, reward, done, info = self.game.step(int(action))
        died = info["discount"] == 0
        return picture, reward, died, done and not died, {}


def number(thing):
    return thing.__dict__.setdefault("number", len(thing.world._objects))


crafter.objects.Object.__hash__ = number
gym.register("Crafter-v0", Crafter)
