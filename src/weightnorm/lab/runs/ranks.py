"""Data-parallel ranks: a single process, or those that torchrun started.

Note [import torch.distributed.nn early]
    A process group that still exists when the interpreter exits aborts the process from one of its
    threads, and `destroy_process_group` does not free a group that something else refers to. The
    functions of torch.distributed.nn take the group that exists when they are imported (by the
    first optimizer step, through torch._dynamo) as a default argument. Imported here, before any
    group exists, they refer to none.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # see Note [import torch.distributed.nn early]
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RankLost(RuntimeError):
    """Raised when a collective fails because another rank died, hangs or runs different code."""


def is_collective(error: BaseException | None) -> bool:
    """Return whether a collective of torch.distributed raised this error."""
    frames = traceback.walk_tb(error.__traceback__ if error else None)
    names = [frame.f_globals.get("__name__") for frame, _ in frames]
    return isinstance(error, RuntimeError) and dist.distributed_c10d.__name__ in names


@dataclass(frozen=True)
class Ranks:
    """Rank and world size of this process. Collectives raise RankLost if a rank is lost."""

    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls, device: torch.device, wait_seconds: float) -> Ranks:
        """Join torchrun's process group, if there is one; `wait_seconds` is its timeout."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            if device.index is None:  # one GPU per rank of a machine
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=wait_seconds))
        except dist.DistError as error:
            here = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
            raise RankLost(f"{here} found no others ({str(error).splitlines()[0]})") from error
        return cls(dist.get_rank(), dist.get_world_size())

    def leave(self) -> None:
        """Destroy the process group."""
        if self.world > 1 or dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Raise RankLost if a collective in this block fails; `what` names its result."""
        try:
            yield
        except RuntimeError as error:
            if not is_collective(error):
                raise
            raise self.lost(error, what) from error

    def lost(self, error: BaseException, what: str) -> RankLost:
        """Return the error for a collective that failed; `what` names its result."""
        return RankLost(
            f"rank {self.rank} of {self.world} failed waiting for {what} "
            f"({str(error).splitlines()[0]}): another rank died, hangs, or runs different code"
        )

    @property
    def first(self) -> bool:
        """Whether this rank writes the record."""
        return self.rank == 0

    @property
    def group(self) -> ProcessGroup | None:
        """The group for synchronized statistics; None in a single process."""
        return dist.group.WORLD if self.world > 1 else None

    def share(self, rows: Tensor) -> Tensor:
        """Return this rank's part of a global batch."""
        return rows.tensor_split(self.world)[self.rank] if self.world > 1 else rows

    def sum(self, x: Tensor, name: str = "a sum") -> Tensor:
        """Sum a tensor over ranks, in place. `name` is used in the error if a rank is lost."""
        if self.world > 1:
            with self.waiting_for(name):
                dist.all_reduce(x)
        return x

    def any(self, *flags: bool) -> list[bool]:
        """Return, for each flag, whether it is set on any rank. One collective."""
        if self.world == 1:
            return list(flags)
        counts = self.sum(torch.tensor(flags, dtype=torch.float32), "all to end a step")
        return [count > 0 for count in counts.tolist()]

    def gather(self, value: Any, name: str = "a barrier") -> list[Any]:
        """Return the values of all ranks, on every rank."""
        values: list[Any] = [value]
        if self.world > 1:
            values = [None] * self.world
            with self.waiting_for(name):
                dist.all_gather_object(values, value)
        return values

    def sum_gradients(self, model: nn.Module) -> None:
        """Sum every gradient over ranks, in one collective.

        Each rank's loss is its examples' share of the mean over the global batch, so the sum is
        the gradient of that mean even if ranks have batches of different sizes.
        """
        if self.world == 1:
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total = self.sum(torch.cat([grad.flatten() for grad in grads]), "the sum of gradients")
        parts = total.split([grad.numel() for grad in grads])
        for parameter, grad, part in zip(parameters, grads, parts, strict=True):
            parameter.grad = grad.copy_(part.view_as(grad))
