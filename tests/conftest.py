"""Tests run on the CPU, whatever the machine has, except those marked gpu."""

import gc
import os

import pytest

HERE = os.path.dirname(__file__)
os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(HERE), HERE])  # for processes that tests start


def pytest_configure(config):
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for a GPU leaves it usable in processes forked later


def pytest_collection_finish():
    gc.freeze()  # what imports made stays; each run ends with a collection of all else


@pytest.fixture
def float64():
    import torch  # here: after `CUDA_VISIBLE_DEVICES` is set

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def watch(monkeypatch):
    """`watch(owner, name)`: a list of the inputs and the result of each call from now on."""

    def begin(owner, name):
        function, calls = getattr(owner, name), []

        def watched(*inputs):
            calls.append((inputs, function(*inputs)))
            return calls[-1][1]

        monkeypatch.setattr(owner, name, watched)
        return calls

    return begin
