"""Tests run on the CPU, whatever the machine has, one thread a process."""

import os

HERE = os.path.dirname(__file__)
paths = os.pathsep.join([os.path.dirname(HERE), HERE])  # for processes that tests start
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
