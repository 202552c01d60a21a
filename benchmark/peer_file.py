"""Another project's script as its file stands, under today's gymnasium; prints its steady-state steps per second.

    python -m benchmark.peer_file SCRIPT [its own flags]

Run by benchmark/speed.py on files of CleanRL and of LeanRL, which were written for gymnasium 0.29 and for gym. Nothing
of them is changed; what they import is: vector environments end and begin episodes in one step and tell it in the old
form, wrappers have their old names too, `gym` is gymnasium, EnvPool answers as gym did, and wandb and TensorBoard note
when rows come and write nothing.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import ale_py
import gymnasium
import gymnasium.wrappers
import numpy as np
import torch

CUSTOM_OP = torch.library.custom_op
rows: list[tuple[int, float]] = []  # transitions, and when they were told


def told(global_step: int) -> None:
    if not rows or global_step > rows[-1][0]:
        rows.append((int(global_step), time.perf_counter()))


class SummaryWriter:
    """TensorBoard's, of which one column is noted."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def add_scalar(self, name: str, _: Any, global_step: int) -> None:
        if name == "charts/SPS":
            told(global_step)

    def add_text(self, *_: Any) -> None: ...

    def close(self) -> None: ...


class SyncVectorEnv(gymnasium.vector.SyncVectorEnv):
    """gymnasium's, as 0.29 had it."""

    def __init__(self, env_fns: list) -> None:
        super().__init__(env_fns, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)

    def step(self, actions: np.ndarray) -> tuple:
        obs, rewards, terminations, truncations, infos = super().step(actions)
        if "final_info" in infos:
            ended, old = infos["_final_info"], infos["final_info"]
            infos["final_info"] = [taken(old, i) if ended[i] else None for i in range(self.num_envs)]
            infos["final_observation"] = infos["final_obs"]
        return obs, rewards, terminations, truncations, infos


def taken(infos: dict, i: int) -> dict:
    """Environment i's part of a vector environment's infos."""
    return {name: taken(x, i) if isinstance(x, dict) else x[i] for name, x in infos.items() if name[0] != "_"}


class Pool:
    """EnvPool's environments as `env_type="gym"` had them: a seed for all, four results of a step."""

    def __init__(self, task_id: str, **options: Any) -> None:
        self.pool = Pool.make(task_id, env_type="gymnasium", **options)
        self.action_space, self.observation_space = self.pool.action_space, self.pool.observation_space

    def reset(self) -> np.ndarray:
        return self.pool.reset()[0]

    def step(self, actions: np.ndarray) -> tuple:
        obs, rewards, terminations, truncations, infos = self.pool.step(actions)
        return obs, rewards, terminations | truncations, infos | {"terminated": terminations}

    def close(self) -> None:
        self.pool.close()


class Wrapper:
    """gym's: what is not its own is the environment's."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, **kwargs: Any) -> Any:
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self.env.step(action)


def custom_op(name: str, *args: Any, **options: Any) -> Any:
    """torch's; LeanRL's step of an environment, of which a newer torch wants a fake form, stays out of graphs."""
    return torch.compiler.disable if name == "mylib::step" else CUSTOM_OP(name, *args, **options)


def module(name: str, **contents: Any) -> None:
    sys.modules[name] = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))
    vars(sys.modules[name]).update(contents)


def main() -> None:
    gymnasium.register_envs(ale_py)
    gymnasium.vector.SyncVectorEnv = SyncVectorEnv
    gymnasium.wrappers.GrayScaleObservation = gymnasium.wrappers.GrayscaleObservation
    gymnasium.wrappers.FrameStack = gymnasium.wrappers.FrameStackObservation
    module("torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    torch.library.custom_op = custom_op
    module("wandb", init=lambda **_: None, log=lambda _, step: told(step))
    script, *sys.argv = [sys.argv[1], *sys.argv[1:]]
    if "\nimport gym\n" in Path(script).read_text():  # others ask only whether it is there
        module("gym", Wrapper=Wrapper, spaces=gymnasium.spaces)
    with contextlib.suppress(ImportError):
        import envpool

        Pool.make = envpool.make
        envpool.make = lambda task_id, env_type, **options: Pool(task_id, **options)
    folder = os.path.dirname(script)
    sys.path[:0] = [folder, os.path.dirname(folder)]  # some import cleanrl_utils, which lies beside their folder
    runpy.run_path(script, run_name="__main__")
    (s0, t0), (s1, t1) = rows[max(1, len(rows) // 8)], rows[-1]
    print(f"\nsps {(s1 - s0) / (t1 - t0):.1f}")


if __name__ == "__main__":
    main()
