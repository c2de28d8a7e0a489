"""Moments over the ranks of a process group. With no group, over this process alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group: TypeAlias = "ProcessGroup | None"


class _SumOverRanks(torch.autograd.Function):
    """Σ over ranks; every rank's loss depends on it, so its gradient is a sum over ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Σ over ranks, differentiable."""
    return x if group is None else _SumOverRanks.apply(x, group)


def mean_over_ranks(total: Tensor, count: int, group: Group) -> Tensor:
    """Mean from each rank's sum and count. Batches may differ in size, or be empty."""
    if group is None:
        return total / max(count, 1)
    both = sum_over_ranks(torch.cat([total, total.new_full((1,), count)]), group)
    return both[:-1] / both[-1].clamp_min(1)


def moments_over_ranks(
    mean: Tensor, variance: Tensor, count: int, group: Group
) -> tuple[Tensor, Tensor, int]:
    """Population mean and variance of all ranks' examples together, and their number.

    Two passes, mean first, so that nothing cancels: Σn·(var + (mean − μ)²)/N.
    """
    if group is None:
        return mean, variance, count
    n = float(count)
    if not count:
        mean, variance = torch.zeros_like(mean), torch.zeros_like(variance)
    first = sum_over_ranks(torch.cat([mean * n, mean.new_tensor([n])]), group)
    total = first[-1].clamp_min(1)
    overall = first[:-1] / total
    spread = sum_over_ranks(n * (variance + (mean - overall).square()), group) / total
    return overall, spread, int(first[-1])
