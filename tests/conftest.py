"""Tests run on the CPU, whatever the machine has; those marked gpu on its first GPU."""

import os

HERE = os.path.dirname(__file__)
paths = os.pathsep.join([os.path.dirname(HERE), HERE])  # for processes that tests start
os.environ["PYTHONPATH"] = paths


def pytest_configure(config):
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
