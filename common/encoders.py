"""Encoders of images: the convolutions that turn an image into features, chosen by the image's size or by name.

A script puts its own hidden layer and its heads behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import torch
from torch import nn

Init = Callable[[nn.Conv2d, float], nn.Module]  # a layer and its gain -> the layer, initialised


def image_encoder(
    space: gym.spaces.Box, network: str = "auto", init: Init = lambda layer, gain: layer
) -> tuple[nn.Sequential, int, int]:
    """Layers (B, channels, height, width) -> (B, num_features), num_features, and the width of a hidden layer.

    `network`: "impala", or "auto": Nature's layers if images are large, MinAtar's if not.
    The width: of the layer that follows in the encoder's paper. `init`: by default as torch does.
    """
    channels = space.shape[0]
    gain = math.sqrt(2)
    layers: list[nn.Module] = []
    if network == "impala":  # arXiv:1802.01561 figure 3, at PPG's sizes
        for out_channels in (16, 32, 32):
            layers += [init(nn.Conv2d(channels, out_channels, 3, padding=1), 1.0), nn.MaxPool2d(3, 2, 1)]
            layers += [Residual(out_channels, init), Residual(out_channels, init)]
            channels = out_channels
        layers.append(nn.ReLU())
        width = 256
    elif is_large(space):  # the DQN paper's (Nature 518, 2015)
        for out_channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            layers += [init(nn.Conv2d(channels, out_channels, size, stride), gain), nn.ReLU()]
            channels = out_channels
        width = 512
    else:  # the MinAtar paper's (arXiv:1903.03176)
        layers += [init(nn.Conv2d(channels, 16, 3), gain), nn.ReLU()]
        width = 128
    encoder = nn.Sequential(*layers, nn.Flatten()).to(memory_format=torch.channels_last)
    with torch.no_grad():
        num_features = encoder(torch.zeros(1, *space.shape)).shape[1]
    return encoder, num_features, width


def is_large(space: gym.spaces.Box) -> bool:
    """True for images whose smaller side is at least 36, the least that Nature's convolutions can take."""
    return len(space.shape) == 3 and min(space.shape[1:]) >= 36


class Pixels(nn.Module):
    """Images (B, channels, height, width) in the space's dtype -> the same in torch's default dtype.

    Pixels of whole numbers are divided by the space's largest, where `scaled`.
    """

    def __init__(self, space: gym.spaces.Box, scaled: bool = True) -> None:
        super().__init__()
        whole = np.issubdtype(space.dtype, np.integer)
        self.scale = max(1.0, float(space.high.max())) if whole and scaled else 1.0

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        obs = obs.contiguous(memory_format=torch.channels_last).to(torch.get_default_dtype())
        return obs if self.scale == 1.0 else obs / self.scale


class Residual(nn.Module):
    """(B, channels, height, width) plus two convolutions of it.

    With this gain, what the six blocks add at the start is together about as large as their first input.
    """

    def __init__(self, channels: int, init: Init) -> None:
        super().__init__()
        first, second = (init(nn.Conv2d(channels, channels, 3, padding=1), 6**-0.25) for _ in range(2))
        self.layers = nn.Sequential(nn.ReLU(), first, nn.ReLU(), second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)
