"""What every forked rank needs, imported once."""
# ruff: noqa: F401

import contextlib
import gc

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
    import envpool

gc.freeze()  # a rank's collections leave all this alone: a third of a second each
