"""Moments over the ranks of a process group. With no group, over this process alone.

A rank that dies closes its connections, and one that hangs runs into the group's own timeout
(``init_process_group(timeout=…)``): either way the others get a RankLost that says what they waited
for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group: TypeAlias = "ProcessGroup | None"


class RankLost(RuntimeError):
    """The other ranks could not be reached; the message says for what."""


@contextmanager
def waiting(what: str, group: Group = None) -> Iterator[None]:
    """Name what is waited for, should a rank never come."""
    try:
        yield
    except RuntimeError as error:
        here = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"
        reason = re.sub(r"^\[[^\]]*\] ", "", str(error).strip().splitlines()[0])  # torch's file
        raise RankLost(
            f"{here} waited for {what} in vain ({reason}): another rank died, hangs, or is at "
            "another point of the program"
        ) from error


class _SumOverRanks(torch.autograd.Function):
    """Σ over ranks; every rank's loss depends on it, so its gradient is a sum over ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str) -> Tensor:
        ctx.group, ctx.what = group, what
        x = x.clone()
        with waiting(what, group):
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.clone()
        with waiting(f"the gradient of {ctx.what}", ctx.group):
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


def sum_over_ranks(x: Tensor, group: Group, what: str) -> Tensor:
    """Σ over ranks, differentiable. `what` it is, for the error if a rank is lost."""
    return x if group is None else _SumOverRanks.apply(x, group, what)


def mean_over_ranks(total: Tensor, count: int, group: Group, what: str) -> Tensor:
    """Mean from each rank's sum and count. Batches may differ in size, or be empty."""
    if group is None:
        return total / max(count, 1)
    both = sum_over_ranks(torch.cat([total, total.new_full((1,), count)]), group, what)
    return both[:-1] / both[-1].clamp_min(1)


def moments_over_ranks(
    mean: Tensor, variance: Tensor, count: int, group: Group, what: str
) -> tuple[Tensor, Tensor, int]:
    """Population mean and variance of all ranks' examples together, and their number.

    Two passes, mean first, so that nothing cancels: Σn·(var + (mean − μ)²)/N.
    """
    if group is None:
        return mean, variance, count
    n = float(count)
    if not count:
        mean, variance = torch.zeros_like(mean), torch.zeros_like(variance)
    first = sum_over_ranks(torch.cat([mean * n, mean.new_tensor([n])]), group, what)
    total = first[-1].clamp_min(1)
    overall = first[:-1] / total
    spread = sum_over_ranks(n * (variance + (mean - overall).square()), group, what) / total
    return overall, spread, int(first[-1])
