"""What every forked rank needs, imported once."""

import contextlib

import ale_py
import gymnasium.envs.mujoco.mujoco_env
import minatar.gym  # three seconds: it imports all of a plotting library
import torch._dynamo  # DDP and optimisers import it when used

import dqn_ddp
import launcher
import ppg_ddp
import ppo_ddp
import sac_ddp

with contextlib.suppress(ImportError):
    import envpool  # noqa: F401

__all__ = ["ale_py", "gymnasium", "minatar", "torch", "dqn_ddp", "launcher", "ppg_ddp", "ppo_ddp", "sac_ddp"]
