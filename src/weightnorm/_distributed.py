"""Means and variances over the ranks of a process group; without a group, over this process.

If a rank dies its connections close, and if it hangs the group's timeout expires
(``init_process_group(timeout=…)``). In both cases the collective fails on the other ranks, and
torch's error is raised.
"""

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
        return sum_over_ranks(grad, ctx.group), None  # differentiable again


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Return Σ over ranks, differentiable."""
    return x if group is None else _SumOverRanks.apply(x, group)


def mean_over_ranks(total: Tensor, count: int, group: Group) -> Tensor:
    """Return the mean from each rank's sum and count. Batch sizes may differ, or be 0."""
    if group is None:
        return total / max(count, 1)
    both = sum_over_ranks(torch.cat([total, total.new_full((1,), count)]), group)
    return both[:-1] / both[-1].clamp_min(1)


def moments_over_ranks(
    mean: Tensor, variance: Tensor, count: int, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Return population mean and variance over the examples of all ranks, and their number.

    Two reductions, the mean first, so that nothing cancels: Σ n·(var + (mean − μ)²)/N. The number
    is a tensor on the device: reading it is left to the caller.
    """
    n = mean.new_full((1,), count)
    if group is None:
        return mean, variance, n
    first = sum_over_ranks(torch.cat([mean * n, n]), group)
    total = first[-1:].clamp_min(1)
    overall = first[:-1] / total
    within = sum_over_ranks(n * (variance + (mean - overall).square()), group) / total
    return overall, within, first[-1:]
