"""Summarize the normalized weights of a checkpoint file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weightnorm import functional
from weightnorm.checkpoints import Format, StateDictError, StoredWeight, stored_weights, units_of
from weightnorm.files.convert import opened, outline, tensor_keys
from weightnorm.files.errors import reading
from weightnorm.files.nested import State, join_path


@dataclass(frozen=True)
class WeightSummary:
    """One normalized weight of a file."""

    name: str
    format: Format
    shape: tuple[int, ...]
    dim: int | tuple[int, ...] | Literal["ambiguous"] | None
    """The kept axis or axes; ambiguous for a flat g beside a square v."""
    units: int
    v_norm: float
    """Mean ‖v‖ over the units; NaN if the axis is ambiguous."""
    g: float
    """Mean |g| over the units."""
    dead: int
    """Units with g = 0 or v = 0, whose weights are 0."""


@dataclass(frozen=True)
class Contents:
    """What a checkpoint file contains."""

    weights: list[WeightSummary]
    others: int
    """Tensors that no normalized weight is made of."""


def inspect_file(path: Path) -> Contents:
    """Summarize the normalized weights of a checkpoint file."""
    rows, others = [], 0
    with reading(path), opened(path) as states:
        for place, state in states:
            weights = stored_weights(outline(state))
            rows += [_summary(join_path(place, w.path), _loaded(state, w)) for w in weights]
            others += len({*tensor_keys(state)} - {key for w in weights for key in w.keys})
    return Contents(rows, others)


def _loaded(state: State, weight: StoredWeight) -> StoredWeight:
    g_key, v_key, *_ = weight.keys
    return StoredWeight(
        weight.path, weight.format, v=state[v_key], g=state[g_key], is_log=weight.is_log
    )


def _summary(name: str, weight: StoredWeight) -> WeightSummary:
    v, g = weight.v, weight.parts.g.float().flatten()
    v = v.float() if v.dtype.itemsize == 1 else v
    dead, v_norm = g == 0, float("nan")
    dim: int | tuple[int, ...] | Literal["ambiguous"] | None
    try:
        units = units_of(weight)
    except StateDictError:
        dim = "ambiguous"
    else:
        dim = units.dim
        norm = functional.norm(v, units).flatten()
        dead, v_norm = dead | (norm == 0), norm.mean().item()
    return WeightSummary(
        name=name,
        format=weight.format,
        shape=tuple(v.shape),
        dim=dim,
        units=g.numel(),
        v_norm=v_norm,
        g=g.abs().mean().item(),
        dead=int(dead.sum()),
    )
