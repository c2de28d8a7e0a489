"""Helpers for DTensors: parameters sharded over ranks, as by FSDP2 or tensor parallelism.

Inside a forward pass FSDP2 has gathered every parameter, so only code that reads a model between
passes sees shards. Importing torch.distributed.tensor takes a second, so it is not imported here:
as long as nothing else has imported it, no tensor is a DTensor.
"""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

from torch import Tensor, nn


def is_sharded(x: object) -> TypeGuard[Any]:
    """Return whether this is a DTensor (sharded or replicated over ranks)."""
    if type(x) in (Tensor, nn.Parameter):
        return False
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(x, tensor.DTensor)


def local(x: Tensor) -> Tensor:
    """Return this rank's shard, sharing memory. It may be empty."""
    return x.to_local() if is_sharded(x) else x


def gathered(x: Tensor) -> Tensor:
    """Return the full tensor on every rank, as a replicated DTensor."""
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import Replicate

    moved: Tensor = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    return moved


def whole(x: Tensor) -> Tensor:
    """Return the full tensor on every rank, as a plain tensor."""
    return local(gathered(x))


def any_true(x: Tensor) -> bool:
    """Return whether a number is true on any rank, so that all of them decide alike."""
    return bool(whole(x).any())


def resolve_partial(x: Tensor) -> Tensor:
    """Reduce pending Partial placements, so that every rank has final values."""
    return gathered(x) if is_sharded(x) and any(p.is_partial() for p in x.placements) else x


def placed_like(x: Tensor, other: Tensor) -> Tensor:
    """Redistribute `x` to the placements of `other`."""
    if not (is_sharded(x) and is_sharded(other)) or x.placements == other.placements:
        return x
    moved: Tensor = x.redistribute(placements=other.placements)
    return moved


def on_mesh_of(x: Tensor, other: Tensor) -> Tensor:
    """Wrap a tensor that every rank has as a replicated DTensor on the mesh of `other`."""
    if is_sharded(x) or not is_sharded(other):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, other.device_mesh, [Replicate()] * other.device_mesh.ndim)


def refuse_sharded(model: nn.Module, instead: str) -> None:
    """Raise ValueError if FSDP or tensor parallelism has sharded the model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
    if any(isinstance(m, kinds) for m in model.modules()) or any(
        is_sharded(p) for p in model.parameters()
    ):
        raise ValueError(f"{type(model).__name__} is sharded over ranks: {instead}")


def refuse_flattened(model: nn.Module) -> None:
    """Raise ValueError if FSDP1 has flattened the weights, or what it leaves of them on a rank."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        raise ValueError(
            "FullyShardedDataParallel flattens weights, so that this rank has no whole unit; shard "
            "the model with torch.distributed.fsdp.fully_shard instead"
        )
