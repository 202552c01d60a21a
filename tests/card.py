"""A stand-in for a GPU: tensors that say they are on another device, the "card", and lie in this process's memory.

Its arithmetic is the CPU's. What it finds: operations that mix tensors of both devices, numbers that differ from those
of a run without it, and how often something crosses from one device to the other. Torch has no kernels for the device
"meta", whose name the card bears.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

CARD, CPU = torch.device("meta"), torch.device("cpu")
READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}  # their result is Python's


class OnCard(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), **layout, device=CARD)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} of a tensor on the card, which is gone")

    def data_ptr(self):
        return self.inner.data_ptr()

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self):
        raise TypeError("a tensor on the card has no array")

    def __deepcopy__(self, memo):
        return torch.nn.Parameter(OnCard(self.inner.clone()), self.requires_grad)

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):
        self.inner = other.inner


class Card(TorchDispatchMode):
    """Everything in this block is done here or on the card, as a GPU would.

    `crossings`: what went "up" or "down", in its order, with what else is appended to it.
    """

    def __init__(self):
        super().__init__()
        self.crossings = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name, dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        card = any(isinstance(x, OnCard) for x in given)
        here = [x for x in given if not isinstance(x, OnCard)]
        to_card = card
        if kwargs.get("device") is not None:
            to_card, kwargs["device"] = torch.device(kwargs["device"]) == CARD, CPU
        if name == "aten::copy_":
            to_card = isinstance(args[0], OnCard)
        kwargs.pop("pin_memory", None)
        moves = name in ("aten::_to_copy", "aten::copy_")
        if to_card and moves and here:
            self.crossings.append("up")
        elif card and (name in READS or (moves and not to_card)):
            self.crossings.append("down")
        elif card:  # a number's tensor is read by the processor, which costs nothing
            mixed = [tuple(x.shape) for x in here if x.dim() > 0]
            assert not mixed, f"{func} mixes the card's tensors with others, {mixed}"
        plain = [tree_map_only(OnCard, lambda x: x.inner, x) for x in (args, kwargs)]
        out = func(*plain[0], **plain[1])
        if not to_card or name in READS:
            return out
        out = tree_map_only(torch.Tensor, OnCard, out)
        return return_and_correct_aliasing(func, args, kwargs, out) if card else out
