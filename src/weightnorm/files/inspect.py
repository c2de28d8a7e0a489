"""Summarize the normalized weights of a checkpoint file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weightnorm import functional
from weightnorm.checkpoints import Format, StateDictError, StoredWeight, stored_weights, units_of
from weightnorm.files.convert import load, tensors_of
from weightnorm.files.errors import naming
from weightnorm.files.nested import join_path, nested_mappings


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
    with naming(path):
        for place, state in nested_mappings(load(path)[0]):
            weights = stored_weights(state)
            rows += [_summary(join_path(place, weight.path), weight) for weight in weights]
            others += len({*tensors_of(state)} - {key for w in weights for key in w.keys})
    return Contents(rows, others)


def _summary(name: str, weight: StoredWeight) -> WeightSummary:
    v, g = weight.v.double(), weight.g.double().flatten()
    g = g.exp() if weight.is_log else g
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
