"""Batch norm over ranks that sends the same as torch's SyncBatchNorm, on any device.

torch's own does not support CPU tensors. In the forward pass, mean, variance and count of every
rank are gathered: 2C + 1 numbers. In the backward pass, two sums per feature are reduced: 2C.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Whitened(torch.autograd.Function):
    """(t − μ)/σ with μ and σ over the batches of all ranks."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, eps: float) -> Tensor:
        axes = [d for d in range(t.ndim) if d != 1]
        shape = (1, -1, *[1] * (t.ndim - 2))
        variance, mean = torch.var_mean(t, axes, correction=0)
        local = torch.cat([mean, variance, t.new_tensor([t.numel() // t.shape[1]])])
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, local)
        means, variances, counts = torch.stack(gathered).split([len(mean), len(mean), 1], dim=1)
        share = counts / counts.sum()
        overall = (share * means).sum(0)
        spread = (share * (variances + (means - overall).square())).sum(0)
        scale = (spread + eps).rsqrt().view(shape)
        white: Tensor = (t - overall.view(shape)) * scale
        ctx.save_for_backward(white, scale)
        ctx.total = counts.sum()
        return white

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        white, scale = ctx.saved_tensors
        axes = [d for d in range(grad.ndim) if d != 1]
        sums = torch.stack([grad.sum(axes), (grad * white).sum(axes)])
        dist.all_reduce(sums)
        along_1, along_white = (sums / ctx.total).view(2, *scale.shape)
        return (grad - along_1 - white * along_white) * scale, None


class SyncedBatchNorm(nn.Module):
    """γ·(t − μ)/σ + β, in training mode."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, t: Tensor) -> Tensor:
        shape = (-1, *[1] * (t.ndim - 2))
        white: Tensor = _Whitened.apply(t, self.eps)
        return self.weight.view(shape) * white + self.bias.view(shape)
