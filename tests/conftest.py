"""Tests run on the CPU, whatever the machine has, one thread a process."""

import os

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
