"""A byte-level transformer decoder: rotary positions, RMS norm before each branch, no biases.

Every weight matrix is an ``nn.Linear``, so that optimizers and weight norm find it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


class SelfAttention(nn.Module):
    """Causal self-attention with rotary positions (Su et al. 2021)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, T, D)
            for project in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, is_causal=True
        )
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = SelfAttention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        down: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + down


class Transformer(nn.Module):
    """Predict each byte of a text from the bytes before it.

    Args:
        width: units of the residual stream.
        depth: blocks.
        heads: attention heads; they divide `width` into heads of an even size.
        context: longest text.

    Weights start at N(0, 1/fan_in); those that end a residual branch are divided by √(2·depth).
    """

    rotation: Tensor

    def __init__(
        self, width: int = 192, depth: int = 4, heads: int = 6, context: int = 256
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.register_buffer("rotation", rotations(context, width // heads), persistent=False)
        nn.init.normal_(self.embedding.weight)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                if name.endswith(("out", "down")):
                    std *= (2 * depth) ** -0.5
                nn.init.normal_(module.weight, std=std)

    def forward(self, text: Tensor) -> Tensor:
        """(B, T) bytes → logits of the bytes that follow, (B, T, 256)."""
        x = self.embedding(text.long())  # (B, T, width)
        rotation = self.rotation[: text.shape[1]]
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotations(context: int, size: int, base: float = 10_000.0) -> Tensor:
    """Angles of rotary positions as (cos, sin): (context, size / 2, 2)."""
    frequency = base ** (-torch.arange(0, size, 2) / size)
    angle = torch.arange(context)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], -1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs (xᵢ, xᵢ₊ₙ) of (…, T, 2n) by the angles of their positions.

    The product of two rotated vectors depends on the difference of their positions alone.
    """
    a, b = x.chunk(2, -1)
    cos, sin = rotation.unbind(-1)  # (T, n)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
