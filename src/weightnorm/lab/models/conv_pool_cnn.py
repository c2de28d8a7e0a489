"""ConvPool-CNN-C as modified by the paper (appendix A), for CIFAR-10."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from weightnorm import init_

Wrap = Callable[[nn.Module], nn.Module]


class GaussianNoise(nn.Module):
    """Adds Gaussian noise in training: x + σ·ε."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def forward(self, x: Tensor) -> Tensor:
        return x + self.std * torch.randn_like(x) if self.training and self.std else x

    def extra_repr(self) -> str:
        return f"{self.std:g}"


class ConvPoolCNN(nn.Sequential):
    """Noise; 3 convolutions, pool, dropout; 3 more, pool, dropout; 3×3 unpadded, two 1×1; average.

    Args:
        wrap: applied to each layer with weights, such as ``parameterize``.
        width: multiplier of the paper's 96 and 192 channels.
        channels: input channels.
        classes: output units.
        noise: standard deviation of the noise added to the input.
        dropout: dropout probability after each pooling layer.
    """

    def __init__(
        self,
        wrap: Wrap,
        *,
        width: float = 1.0,
        channels: int = 3,
        classes: int = 10,
        noise: float = 0.15,
        dropout: float = 0.5,
    ) -> None:
        narrow, wide = round(96 * width), round(192 * width)

        def layer(plain: nn.Module) -> nn.Module:
            return wrap(init_(plain, partial(nn.init.normal_, std=0.05)))  # section 3

        def conv(inputs: int, outputs: int, size: int = 3, padding: int = 1) -> list[nn.Module]:
            return [layer(nn.Conv2d(inputs, outputs, size, padding=padding)), nn.LeakyReLU(0.1)]

        def block(inputs: int, outputs: int) -> list[nn.Module]:
            convs = [*conv(inputs, outputs), *conv(outputs, outputs), *conv(outputs, outputs)]
            return [*convs, nn.MaxPool2d(2), nn.Dropout(dropout)]

        super().__init__(
            GaussianNoise(noise),  # (B, C, 32, 32)
            *block(channels, narrow),  # (B, 96, 16, 16)
            *block(narrow, wide),  # (B, 192, 8, 8)
            *conv(wide, wide, padding=0),  # (B, 192, 6, 6)
            *conv(wide, wide, size=1, padding=0),
            *conv(wide, wide, size=1, padding=0),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),  # (B, 192)
            layer(nn.Linear(wide, classes)),
        )
