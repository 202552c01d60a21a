"""What every forked rank needs, imported once."""

import torch._dynamo  # DDP and optimisers import it when used

import dqn_ddp
import launcher
import ppg_ddp
import ppo_ddp
import sac_ddp

__all__ = ["torch", "dqn_ddp", "launcher", "ppg_ddp", "ppo_ddp", "sac_ddp"]
