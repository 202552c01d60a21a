"""MetaDrive: the seed of an episode chooses its scenario, and `reset` has no options."""

import gymnasium as gym
import numpy as np


class Drive(gym.Wrapper):
    def __init__(self, num_scenarios=20, start_seed=0, **config):
        from metadrive import MetaDriveEnv

        config |= {"num_scenarios": num_scenarios, "start_seed": start_seed, "log_level": 50}
        super().__init__(MetaDriveEnv(config))
        self.num_scenarios = num_scenarios
        self.start_seed = start_seed

    def reset(self, *, seed=None, options=None):
        scenario = np.random.default_rng(seed).integers(self.num_scenarios)
        return self.env.reset(seed=self.start_seed + int(scenario))


gym.register("Drive-v0", Drive)
