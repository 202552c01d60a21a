"""Tests run on the CPU, whatever the machine has, one thread a process; those marked gpu on its first GPU."""

import os

HERE = os.path.dirname(__file__)
paths = os.pathsep.join([os.path.dirname(HERE), HERE])  # for processes that tests start
os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def pytest_configure(config):
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
