"""An environment whose first step ends the process: what a script takes to get there is its start-up."""

import os

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv


class FirstStep(CartPoleEnv):
    def step(self, action: int) -> None:
        os._exit(0)


gym.register("FirstStep-v0", FirstStep)
