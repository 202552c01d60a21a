"""mo-gymnasium: a reward is a vector, of which the run learns the sum."""

import gymnasium as gym
import mo_gymnasium
import numpy as np


def summed(task="deep-sea-treasure-v0", weights=(1.0, 1.0), **kwargs):
    env = mo_gymnasium.make(task, **kwargs)
    return mo_gymnasium.wrappers.LinearReward(env, weight=np.array(weights))


gym.register("Summed-v0", summed)
