"""The Q-network of DQN (Mnih et al., 2015): four frames → the value of each action."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from weightnorm import init_

Wrap = Callable[[nn.Module], nn.Module]
KERNELS, STRIDES = (8, 4, 3), (4, 2, 1)


class Pixels(nn.Module):
    """Scales uint8 pixels to [0, 1], in channels-last layout, where convolutions are fastest."""

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.to(torch.float32, copy=True, memory_format=torch.channels_last)
        return scaled.mul_(1 / 255)


class QNetwork(nn.Sequential):
    """Three convolutions, a layer of 512 units, a value for each action; ReLU between.

    Args:
        wrap: applied to each layer with weights, such as ``parameterize``.
        output: applied to the last of them instead.
        actions: output units.
        shape: height and width of a frame.
        frames: frames in a state.
        width: multiplier of the 32, 64 and 64 channels and the 512 units.
    """

    def __init__(
        self,
        wrap: Wrap,
        actions: int,
        *,
        output: Wrap | None = None,
        shape: tuple[int, int] = (84, 84),
        frames: int = 4,
        width: float = 1.0,
    ) -> None:
        first, second, third, hidden = (round(n * width) for n in (32, 64, 64, 512))

        def layer(plain: nn.Module, wrap: Wrap = wrap) -> nn.Module:
            return wrap(init_(plain, partial(nn.init.normal_, std=0.05)))  # section 3

        def convolution(i: int, inputs: int, outputs: int) -> list[nn.Module]:
            return [layer(nn.Conv2d(inputs, outputs, KERNELS[i], STRIDES[i])), nn.ReLU(True)]

        super().__init__(
            Pixels(),  # (B, 4, 84, 84)
            *convolution(0, frames, first),  # (B, 32, 20, 20)
            *convolution(1, first, second),  # (B, 64, 9, 9)
            *convolution(2, second, third),  # (B, 64, 7, 7)
            nn.Flatten(),
            layer(nn.Linear(third * prod(map(_output_size, shape)), hidden)),
            nn.ReLU(True),
            layer(nn.Linear(hidden, actions), output or wrap),
        )
        self.to(memory_format=torch.channels_last)  # type: ignore


def _output_size(side: int) -> int:
    """Return the output height (or width) of the convolutions.

    >>> _output_size(84)
    7
    """
    for kernel, stride in zip(KERNELS, STRIDES, strict=True):
        side = (side - kernel) // stride + 1
    return side
