"""The layers the generative models are built from."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import init_, weight_norm

L = TypeVar("L", bound=nn.Module)
RESIDUAL = 0.1
"""Factor on what a residual block adds."""


def fresh(layer: L, normalize: bool) -> L:
    """A layer as section 3 starts it: v ~ N(0, 0.05²), b = 0. What is not normalized has w = v.

    A mask that the layer has is applied before the norm is taken.
    """
    init_(layer, partial(nn.init.normal_, std=0.05))
    init_(layer, nn.init.zeros_, "bias")
    return weight_norm(layer, mask=getattr(layer, "mask", None)) if normalize else layer


class ResidualBlock(nn.Module):
    """x + 0.1·conv(ELU(conv(x)))."""

    def __init__(self, maps: int, normalize: bool) -> None:
        super().__init__()
        self.conv1 = fresh(nn.Conv2d(maps, maps, 3, padding=1), normalize)
        self.conv2 = fresh(nn.Conv2d(maps, maps, 3, padding=1), normalize)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.conv2(F.elu(self.conv1(x)))
        return x + RESIDUAL * h
