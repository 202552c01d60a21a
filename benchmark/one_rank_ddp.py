"""`ppo_ddp.py` at world size 1 with its loss wrapped in DDP, as it is at any other: the base of speed row 2."""

from torch.nn.parallel import DistributedDataParallel as DDP

import ppo_ddp

Loss = ppo_ddp.PPOLoss
ppo_ddp.PPOLoss = lambda *args: DDP(Loss(*args), gradient_as_bucket_view=True)
ppo_ddp.launch(ppo_ddp.main, ppo_ddp.Args)
