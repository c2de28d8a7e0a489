"""Layers shared by the variational auto-encoders."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import init_, weight_norm

L = TypeVar("L", bound=nn.Module)
RESIDUAL = 0.1
"""Scale of a residual branch."""


def initialized(layer: L, normalize: bool) -> L:
    """Initialize a layer as in section 3: v ~ N(0, 0.05²) and b = 0.

    With `normalize`, weight norm is applied; otherwise w = v. If the layer has a mask, the norm is
    that of the masked v.
    """
    init_(layer, partial(nn.init.normal_, std=0.05))
    init_(layer, nn.init.zeros_, "bias")
    return weight_norm(layer, mask=getattr(layer, "mask", None)) if normalize else layer


class ResidualBlock(nn.Module):
    """Residual block: x + 0.1·conv(ELU(conv(x)))."""

    def __init__(self, channels: int, normalize: bool) -> None:
        super().__init__()
        self.conv1 = initialized(nn.Conv2d(channels, channels, 3, padding=1), normalize)
        self.conv2 = initialized(nn.Conv2d(channels, channels, 3, padding=1), normalize)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.conv2(F.elu(self.conv1(x)))
        return x + RESIDUAL * h
