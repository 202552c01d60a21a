"""Meta-World, which draws the task of an episode before `reset` has seeded its generator."""

import gymnasium as gym
import metaworld


class Task(gym.Wrapper):
    def __init__(self, env_name="reach-v3", **kwargs):
        super().__init__(gym.make("Meta-World/MT1", env_name=env_name, seed=0, **kwargs))

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.unwrapped.seed(seed)
        return self.env.reset(seed=seed)


gym.register("Task-v0", Task)
gym.register_envs(metaworld)
