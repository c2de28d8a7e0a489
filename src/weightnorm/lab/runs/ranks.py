"""The ranks a run is spread over: one process, or those that torchrun started.

Note [a group must end]
    The threads of a process group that is still there when the interpreter ends abort the process.
    `destroy_process_group` only forgets it; whoever else holds the group keeps it. So do the
    functions of torch.distributed.nn: the group they find when imported (by the first optimizer
    step, through torch._dynamo) is their default. Imported here, they find none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # see Note [a group must end]
from torch import Tensor, nn

from weightnorm.distributed import RankLost, collective

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks. Where one of them is lost, the others get RankLost."""

    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls, device: torch.device, wait_seconds: float) -> Ranks:
        """Join the group torchrun set up, if it did; no wait for another rank is ever longer."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        backend = "gloo"
        if device.type == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            if device.index is None:  # each rank of a machine has a GPU of its own
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=wait_seconds))
        except RuntimeError as error:
            here = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
            raise RankLost(f"{here} found no others ({str(error).splitlines()[0]})") from error
        return cls(dist.get_rank(), dist.get_world_size())

    def leave(self) -> None:
        if self.world > 1 or dist.is_initialized():
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this rank writes the record."""
        return self.rank == 0

    @property
    def group(self) -> ProcessGroup | None:
        """For synchronized statistics; None in a single process."""
        return dist.group.WORLD if self.world > 1 else None

    def share(self, rows: Tensor) -> Tensor:
        """This rank's part of a global batch."""
        return rows.tensor_split(self.world)[self.rank] if self.world > 1 else rows

    def sum(self, x: Tensor, what: str = "a sum") -> Tensor:
        """Σ over ranks. `what` it is, for the error if a rank is lost."""
        if self.world > 1:
            with collective(what):
                dist.all_reduce(x)
        return x

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether any rank says so; in one message."""
        if self.world == 1:
            return list(flags)
        counts = self.sum(torch.tensor(flags, dtype=torch.float32), "all to end a step")
        return [count > 0 for count in counts.tolist()]

    def gather(self, thing: Any, what: str = "a meeting") -> list[Any]:
        """Every rank's thing, on every rank."""
        things: list[Any] = [thing]
        if self.world > 1:
            things = [None] * self.world
            with collective(what):
                dist.all_gather_object(things, thing)
        return things

    def sum_gradients(self, model: nn.Module) -> None:
        """Σ over ranks of every gradient, in one message.

        A rank's loss is its part of the mean over the global batch, so the sum is the gradient of
        that mean, also where ranks have batches of different size.
        """
        if self.world == 1:
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total = self.sum(torch.cat([grad.flatten() for grad in grads]), "the sum of gradients")
        parts = total.split([grad.numel() for grad in grads])
        for parameter, grad, part in zip(parameters, grads, parts, strict=True):
            parameter.grad = grad.copy_(part.view_as(grad))
