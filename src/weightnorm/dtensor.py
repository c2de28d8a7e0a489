"""Tensors whose parts lie on different ranks: torch's DTensor, as FSDP2 keeps parameters.

Inside a forward pass FSDP2 has put every parameter together, so only code that looks at a model
from outside meets shards. DTensor takes a second to import, and is not imported here: where nobody
has done so, there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn


def is_sharded(x: object) -> TypeGuard[Any]:
    """Whether this tensor is spread over ranks."""
    if type(x) in (Tensor, nn.Parameter):
        return False
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(x, tensor.DTensor)


def has_whole_rows(x: Tensor) -> bool:
    """Whether each index along axis 0 lies on a rank with all that belongs to it."""
    return not is_sharded(x) or all(p.is_replicate() or p.is_shard(0) for p in x.placements)


def local(x: Tensor) -> Tensor:
    """This rank's part, in the same memory. It may be empty."""
    return x.to_local() if is_sharded(x) else x


def spread_like(part: Tensor, other: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor of this shape of which every rank has its part, along the axes of `other`."""
    if not is_sharded(other):
        return part
    strides = torch.empty(tuple(shape), device="meta").stride()
    joined: Tensor = type(other).from_local(
        part, other.device_mesh, other.placements, run_check=False, shape=shape, stride=strides
    )
    return joined


def gathered(x: Tensor) -> Tensor:
    """The whole on every rank, still as a DTensor."""
    if not is_sharded(x):
        return x
    from torch.distributed.tensor import Replicate

    moved: Tensor = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    return moved


def whole(x: Tensor) -> Tensor:
    """The whole on every rank, as a plain tensor."""
    return local(gathered(x))


def settled(x: Tensor) -> Tensor:
    """No sum over ranks left to take: DTensor puts them off."""
    return gathered(x) if is_sharded(x) and any(p.is_partial() for p in x.placements) else x


def placed_like(x: Tensor, other: Tensor) -> Tensor:
    """The same values, on the ranks where `other` has them."""
    if not is_sharded(x) or x.placements == other.placements:  # type: ignore[attr-defined]
        return x
    moved: Tensor = x.redistribute(placements=other.placements)  # type: ignore[attr-defined]
    return moved


def on_mesh_of(x: Tensor, other: Tensor) -> Tensor:
    """A tensor that every rank has, as one that goes together with `other`."""
    if is_sharded(x) or not is_sharded(other):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, other.device_mesh, [Replicate()] * other.device_mesh.ndim)


def refuse_sharded(model: nn.Module, instead: str) -> None:
    """Stop before anything is done to a model that FSDP has taken charge of."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
    if any(isinstance(m, kinds) for m in model.modules()) or any(
        is_sharded(p) for p in model.parameters()
    ):
        raise ValueError(f"{type(model).__name__} is sharded over ranks: {instead}")


def refuse_partitioned(weight: Tensor, name: str) -> None:
    """Stop before a weight is taken apart that DeepSpeed's ZeRO-3 has emptied on this rank."""
    if hasattr(weight, "ds_id") and not weight.numel():
        raise ValueError(
            f"{name} is empty here: DeepSpeed has partitioned it. Normalize it inside "
            "deepspeed.zero.GatheredParameters(weight, modifier_rank=0)"
        )
