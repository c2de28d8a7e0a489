"""DRAW's selective attention: an N×N grid of Gaussian filters over a square image.

Five parameters place the grid, (p_y, p_x, log δ, log σ², log γ):

- its centre is (p + 1)/2 · side, in pixels, and its stride δ · (side − 1)/(N − 1);
- filter i of an axis has mean centre + (i − N/2 + ½) · stride and variance σ²; its weights on the
  pixels are divided by their sum + 10⁻⁴;
- a patch that is read is multiplied by γ, one that is written is divided by it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

WINDOW_PARAMETERS = 5
TOLERANCE = 1e-4
"""Added to the sum of a filter's weights, so that a filter outside of the image reads 0."""


class Window(NamedTuple):
    """Position, scale and intensity of the filter grids of a batch, in pixels."""

    centre: Tensor  # (B, 2): y, x
    stride: Tensor  # (B, 1)
    precision: Tensor  # (B, 1): 1/σ²
    gamma: Tensor  # (B, 1)


class Attention(nn.Module):
    """Reads from and writes to images of `side` × `side` pixels with `size` × `size` filters."""

    offsets: Tensor
    pixels: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, size: int, side: int) -> None:
        super().__init__()
        self.size, self.side = size, side
        constants = {
            "offsets": torch.arange(size).unsqueeze(1) - size / 2 + 0.5,  # (N, 1), in strides
            "pixels": torch.arange(float(side)),
            # parameters · scale + shift = (centre y, x, log δ, log 1/σ², log γ)
            "scale": torch.tensor([side / 2, side / 2, 1, -1, 1]),
            "shift": torch.tensor([side / 2, side / 2, 0, 0, 0]),
        }
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def window(self, parameters: Tensor) -> Window:
        """Return the windows that the parameters (B, 5) describe."""
        centre, logs = torch.addcmul(self.shift, parameters, self.scale).split([2, 3], 1)
        delta, precision, gamma = logs.exp().split(1, 1)
        return Window(centre, delta * ((self.side - 1) / (self.size - 1)), precision, gamma)

    def filters(self, window: Window) -> tuple[Tensor, Tensor]:
        """Return the filterbanks F_y and F_x, (B, N, side) each."""
        stride, precision = (t.view(-1, 1, 1, 1) for t in (window.stride, window.precision))
        mean = window.centre[:, :, None, None] + stride * self.offsets  # (B, 2, N, 1)
        weights = (-0.5 * precision * (self.pixels - mean).square()).exp()  # (B, 2, N, side)
        y, x = (weights / (weights.sum(-1, keepdim=True) + TOLERANCE)).unbind(1)
        return y, x

    def read(self, images: tuple[Tensor, ...], window: Window) -> Tensor:
        """Return the patches γ · F_y image F_xᵀ, concatenated: k images (B, side²) → (B, k·N²)."""
        y, x = self.filters(window)
        patches = [(y @ image.view(-1, self.side, self.side) @ x.mT).flatten(1) for image in images]
        return torch.cat(patches, 1) * window.gamma

    def write(self, patch: Tensor, window: Window) -> Tensor:
        """Return F_yᵀ patch F_x / γ: (B, N²) → (B, side²)."""
        y, x = self.filters(window)
        patch = (patch / window.gamma).view(-1, self.size, self.size)
        return (y.mT @ (patch @ x)).flatten(1)
