"""PettingZoo's tic-tac-toe: one learns, the other one plays legal moves at random. An illegal move loses."""

import gymnasium as gym
import numpy as np
from pettingzoo.classic import tictactoe_v3


class TicTacToe(gym.Env):
    observation_space = gym.spaces.Box(0, 1, (3, 3, 2), np.int8)
    action_space = gym.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game = tictactoe_v3.env()
        self.game.reset()
        return self.game.observe("player_1")["observation"], {}

    def step(self, action):
        self.game.step(int(action))
        if not any(self.game.terminations.values()):
            legal = self.game.observe("player_2")["action_mask"].nonzero()[0]
            self.game.step(int(self.np_random.choice(legal)))
        ended = any(self.game.terminations.values())
        return self.game.observe("player_1")["observation"], self.game.rewards["player_1"], ended, False, {}


gym.register("TicTacToe-v0", TicTacToe)
