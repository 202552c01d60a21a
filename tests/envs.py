"""Environments of the tests' own, made by `tests.envs:NAME`, as a user's are."""

import multiprocessing
import os
import random
import resource
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv


class NotedCartPole(CartPoleEnv):
    """Notes in the folder LOCKSTEP_NOTES which rank stepped the environment of which seed, how often."""

    steps, first_seed = 0, None

    def reset(self, *, seed=None, options=None):
        self.first_seed = seed if self.first_seed is None else self.first_seed
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.steps += 1
        return super().step(action)

    def close(self):
        if self.steps and "LOCKSTEP_NOTES" in os.environ:
            name = f"{os.environ.get('RANK', 0)}-{os.getpid()}-{id(self)}"
            with open(os.path.join(os.environ["LOCKSTEP_NOTES"], name), "w") as file:
                file.write(f"{os.environ.get('RANK', 0)} {self.first_seed} {self.steps}")
        self.steps = 0
        super().close()


class HelpedCartPole(CartPoleEnv):
    """Forks a process when it is made, and ends it when it is closed."""

    def __init__(self):
        super().__init__()
        self.helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)
        self.helper.start()

    def close(self):
        self.helper.terminate()
        self.helper.join()
        super().close()


class Noisy:
    """Rewards are normal draws: a TD error that is nearly zero would magnify rounding."""

    def step(self, action):
        obs, _, *ends = super().step(action)
        return obs, float(self.np_random.normal()), *ends


class NoisyCartPole(Noisy, CartPoleEnv):
    pass


class NoisyPendulum(Noisy, PendulumEnv):
    pass


class LibraryCartPole(CartPoleEnv):
    """Rewards are drawn from Python's and numpy's global generators, not from its own."""

    def step(self, action):
        obs, _, *ends = super().step(action)
        return obs, random.random() + np.random.random(), *ends


class Counting(gym.Env):
    """Observes the steps of all its episodes so far, which end in each way in turn, from one that its seed chooses."""

    observation_space, action_space = gym.spaces.Box(0, np.inf, (1,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.time = (int(self.np_random.integers(3)), 0) if seed is not None else (self.episode + 1, 0)
        self.steps = 100.0 * self.episode
        return np.array([self.steps], np.float32), {}

    def step(self, action):
        self.time += 1
        self.steps += 1
        over, way = self.time == 2 + self.episode % 4, self.episode % 3
        return np.array([self.steps], np.float32), 1.0, over and way != 0, over and way != 1, {}


class Dots(gym.Env):
    """A 10 x 10 x 2 boolean image, one half lit; acting on that side gives 1. 20 steps long."""

    observation_space, action_space = gym.spaces.Box(0, 1, (10, 10, 2), np.bool_), gym.spaces.Discrete(2)

    def draw(self):
        self.side, obs = int(self.np_random.integers(2)), np.zeros((10, 10, 2), np.bool_)
        obs[:, 5 * self.side : 5 * (self.side + 1)] = True
        return obs

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.draw(), {}

    def step(self, action):
        reward, self.time = float(action == self.side), self.time + 1
        return self.draw(), reward, False, self.time == 20, {}


class Drawn(gym.Env):
    """An environment of any spaces; its state follows from its seed and all actions, so that no rounding is lost.

    `actions`: a number and a start of `Discrete`, the shape of a `Box` of `action_dtype`, or, with "parts" for it, the
    numbers of a `MultiDiscrete`, with "bits" the size of a `MultiBinary`. Each step may terminate with `end`, truncate
    with `cut`, or do both. If it `remembers`, an episode depends on how many were before.

    `quirks` must not change a number: "infos" of others' names, at two of three steps and at resets; observations in
    one "buffer" or as "lists"; a `Discrete` of "int32" or "int8"; a `Box` in "units" that are 1,024 times smaller; a
    "chdir" at each reset; one rank that is "slow". With `spaces` rewards are drawn from the spaces' generators too.
    """

    def __init__(
        self, shape, dtype, actions, action_dtype=None, end=0.05, cut=0.05, remembers=False, spaces=False, quirks=()
    ):
        low, high = {"uint8": (0, 255), "bool": (0, 1)}.get(dtype, (-np.inf, np.inf))
        self.observation_space = gym.spaces.Box(low, high, tuple(shape), dtype)
        self.unit = 1024.0 if "units" in quirks and action_dtype else 1.0
        self.spaces = spaces
        if action_dtype == "parts":
            self.action_space = gym.spaces.MultiDiscrete(actions, start=[2] * len(actions))
        elif action_dtype == "bits":
            self.action_space = gym.spaces.MultiBinary(actions[0])
        elif action_dtype is None:
            integers = next((name for name in quirks if name.startswith("int")), "int64")
            self.action_space = gym.spaces.Discrete(actions[0], start=actions[1], dtype=integers)
        else:
            low = -1.0 - np.arange(np.prod(actions)).reshape(actions)
            low, high = (self.unit * x.astype(action_dtype) for x in (low, 0.5 - low))
            self.action_space = gym.spaces.Box(low, high, dtype=action_dtype)
        self.end, self.cut, self.weights = end, cut, np.cos(np.arange(np.prod(shape)))
        self.remembers, self.quirks = remembers, quirks
        self.buffer, self.resets, self.time = np.zeros(shape, dtype), 0, 0

    def observe(self):
        obs = self.state.reshape(self.observation_space.shape)
        if self.observation_space.dtype == "uint8":
            obs = (128 + 60 * obs).clip(0, 255)
        elif self.observation_space.dtype == "bool":
            obs = obs > 0
        obs = obs.astype(self.observation_space.dtype)
        if "lists" in self.quirks:
            return list(obs)
        if "buffer" in self.quirks:
            self.buffer[:] = obs
            return self.buffer
        return obs

    def info(self, shown):
        """What others' simulators tell; here it says nothing."""
        numbers = {"game_over": self.time % 7 == 3, "episode_frame_number": self.time % 5, "lives": self.time % 4}
        texts = {"name": f"step {self.time}", "episode": {"r": 1.0, "l": self.time, "more": {"t": 0.5}}}
        more = {"array": np.arange(3.0), "episode_ended": True, "final_obs": 3.0, "reward": 5.0}
        more["any"] = (None, "text", 3, np.zeros(self.time % 5), {"a": 1})[self.time % 5]
        return numbers | texts | more if shown and "infos" in self.quirks else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = self.np_random.normal(size=len(self.weights))
        self.resets += 1
        if "chdir" in self.quirks:
            os.chdir(Path(os.__file__).parent)
        if self.remembers:
            self.state += 0.1 * self.resets
        return self.observe(), self.info(True)

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.time += 1
        if "slow" in self.quirks and os.environ.get("RANK") == "1":
            time.sleep(0.002)
        pushed = np.resize(np.asarray(action, float) / self.unit, len(self.state))
        self.state = np.tanh(0.9 * np.roll(self.state, 1) + 0.3 * pushed * self.weights)
        self.state += 0.1 * self.np_random.normal(size=len(self.state))
        reward = float((self.state * self.weights).mean() - 0.1 * (pushed**2).mean())
        if self.spaces:
            reward += self.action_space.np_random.random()  # a sample depends on its type
        terminated, truncated = self.np_random.random(2) < (self.end, self.cut)
        return self.observe(), reward, bool(terminated), bool(truncated), self.info(self.time % 3)


class Plain(gym.Env):
    """3 numbers, episodes of 10 steps. `how`: what it does that others do not. In other spaces none is started."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, how="", scale=0.0, shift=0.0, obs=None, actions=None):
        self.how = how
        self.scale = scale
        self.shift = shift
        self.steps = 0
        self.action_space = gym.spaces.Discrete(2) if actions is None else actions
        if obs is not None:
            self.observation_space = obs
        if scale:
            self.action_space = gym.spaces.Box(shift - scale, shift + scale, (1,), np.float64)
        if how == "bytes":
            self.observation_space = gym.spaces.Box(0, 255, (3,), np.uint8)
        if how == "spaces":
            self.observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        if how == "exit_made":
            sys.exit(0)
        if how == "slow_made":
            Path("begun").touch()
            time.sleep(1000)
        if how == "files":  # no more can be opened
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    def observation(self):
        obs = self.np_random.random(3)
        if self.how == "unseeded" and self.time == 0:
            return np.frombuffer(os.urandom(3), np.uint8).astype(np.float32)
        if self.how == "spaces":
            return self.observation_space.sample()
        if self.how == "shape" and self.steps == 15:
            return np.zeros(4, np.float32)
        if self.how == "huge_observation":
            return obs.astype(np.float32) if self.steps < 15 else obs * 1e39
        return obs if self.how == "bytes" else obs.astype(np.float32)

    def reset(self, *, seed=None, options=None):
        # panda-gym seeds itself anew where it is given no seed
        own = int.from_bytes(os.urandom(4), "big") if self.how == "seeds_itself" and seed is None else seed
        super().reset(seed=own)
        if self.how == "exit_reset" and self.steps:
            sys.exit(0)
        self.time = 0
        return self.observation(), {}

    def step(self, action):
        self.time += 1
        self.steps += 1
        reward = float(self.np_random.normal())
        if self.scale:
            reward = -float(((action[0] - self.shift) / self.scale - 0.4) ** 2)
        if self.how == "spaces":
            reward = float(self.action_space.sample() == action)
        if self.how == "huge_reward" and self.steps == 15:
            reward = 1e39
        if self.how == "two_rewards" and self.steps == 15:
            reward = np.zeros(2)
        if self.how == "array_of_one":
            reward = np.array([reward])
        if self.how == "nan" and self.steps == 7:
            reward = np.nan
        if self.how == "exit_step" and self.steps == 7:
            sys.exit(3)
        if self.how == "raise" and self.steps == 15:
            raise ZeroDivisionError("lidar lost")
        if self.how == "remove" and self.steps == 40:
            (Path(os.environ["LOCKSTEP_RUN"]) / "metrics.csv").unlink(missing_ok=True)
        if self.how == "chdir" and self.steps == 40:
            os.chdir("/")
        if self.how == "slow" and os.environ.get("RANK") == "0":
            time.sleep(0.045)
        return self.observation(), reward, False, self.time >= (100 if self.how == "slow" else 10), {}

    def close(self):
        if self.how == "exit_close":
            sys.exit(0)
        if self.how == "close":
            raise ZeroDivisionError("closed already")


def turned(**kwargs):
    """`Drawn` whose images (height, width, channels) are given as (channels, height, width)."""
    env = Drawn(**kwargs)
    low, high = (np.moveaxis(x, -1, 0) for x in (env.observation_space.low, env.observation_space.high))
    space = gym.spaces.Box(low, high, dtype=env.observation_space.dtype)
    return gym.wrappers.TransformObservation(env, lambda obs: np.moveaxis(obs, -1, 0).copy(), space)


gym.register("ShortCartPole-v0", NotedCartPole, max_episode_steps=30)
gym.register("HelpedCartPole-v0", HelpedCartPole, max_episode_steps=30)
gym.register("LibraryCartPole-v0", LibraryCartPole, max_episode_steps=50)
gym.register("TurnedDrawn-v0", turned)
for made in (NoisyCartPole, NoisyPendulum):
    gym.register(f"{made.__name__}-v0", made, max_episode_steps=10)
for made in (Counting, Drawn, Dots, Plain):
    gym.register(f"{made.__name__}-v0", made)
