"""Means and variances over the ranks of a process group; without a group, over this process.

If a rank dies its connections close, and if it hangs the group's timeout expires
(``init_process_group(timeout=…)``). In both cases the collective fails on the other ranks, which
then raise RankLost with the name of the quantity they were reducing.
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
    """Raised when a collective fails because another rank died, hangs or runs different code."""


@contextmanager
def collective(what: str, group: Group = None) -> Iterator[None]:
    """Raise RankLost if a collective in this block fails; `what` names its result.

    Errors that do not come from the communication backend, such as running out of memory, are
    raised unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_communication_error(error):
            raise
        reason = re.sub(r"^\[[^\]]*\] ", "", str(error).strip().splitlines()[0])  # without the file
        here = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"
        raise RankLost(
            f"{here} failed waiting for {what} ({reason}): "
            "another rank died, hangs, or runs different code"
        ) from error


def _is_communication_error(error: RuntimeError) -> bool:
    """Whether the process group's backend raised this.

    NCCL, the store and sockets raise a DistError; gloo raises a plain RuntimeError whose message
    begins with a path in gloo's sources.
    """
    return isinstance(error, dist.DistError) or "/gloo/" in str(error).partition("]")[0]


class _SumOverRanks(torch.autograd.Function):
    """Σ over ranks; every rank's loss depends on it, so its gradient is a sum over ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str) -> Tensor:
        ctx.group, ctx.what = group, what
        x = x.clone()
        with collective(what, group):
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Differentiable again, for second derivatives.
        return sum_over_ranks(grad, ctx.group, f"the gradient of {ctx.what}"), None, None


def sum_over_ranks(x: Tensor, group: Group, what: str) -> Tensor:
    """Return Σ over ranks, differentiable. `what` names it in the error if a rank is lost."""
    return x if group is None else _SumOverRanks.apply(x, group, what)


def mean_over_ranks(total: Tensor, count: int, group: Group, what: str) -> Tensor:
    """Return the mean from each rank's sum and count. Batch sizes may differ, or be 0."""
    if group is None:
        return total / max(count, 1)
    both = sum_over_ranks(torch.cat([total, total.new_full((1,), count)]), group, what)
    return both[:-1] / both[-1].clamp_min(1)


def moments_over_ranks(
    mean: Tensor, variance: Tensor, count: int, group: Group, what: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return population mean and variance over the examples of all ranks, and their number.

    Two reductions, the mean first, so that nothing cancels: Σ n·(var + (mean − μ)²)/N. The number
    is a tensor on the device: reading it is left to the caller.
    """
    n = mean.new_full((1,), count)
    if group is None:
        return mean, variance, n
    if not count:
        mean, variance = torch.zeros_like(mean), torch.zeros_like(variance)
    first = sum_over_ranks(torch.cat([mean * n, n]), group, what)
    total = first[-1:].clamp_min(1)
    overall = first[:-1] / total
    within = sum_over_ranks(n * (variance + (mean - overall).square()), group, what) / total
    return overall, within, first[-1:]
