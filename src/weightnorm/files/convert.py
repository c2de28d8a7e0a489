"""Convert a checkpoint file between the formats of weight norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from weightnorm.checkpoints import Format, StateDictError, plan_conversion, stored_weights
from weightnorm.files.atomic import atomic_writer
from weightnorm.files.errors import file_error, reading, refuse_existing, writing
from weightnorm.files.nested import State, convert_nested, join_path, nested_mappings, untouched
from weightnorm.files.pickles import load_pickle
from weightnorm.files.safetensors_files import (
    INDEX,
    WHOLE,
    Shards,
    open_shards,
    write_safetensors,
    write_shards,
)

Dim = int | Literal["infer"] | None
Kind = Literal["pickle", "whole", "sharded"]
PICKLES = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Converted:
    """What a conversion did."""

    names: list[str]
    """The weights that were folded, renamed or decomposed."""
    untouched: dict[str, int]
    """Parts of the checkpoint in which nothing was converted, and how many tensors they have: an
    optimizer's state, say, which does not fit the converted weights."""


def convert_file(
    source: Path, target: Path, to: Format, weights: Sequence[str] = (), dim: Dim = "infer"
) -> Converted:
    """Write `source` in another format to `target`, whole or not at all. No file is overwritten.

    `weights` are names or patterns of plain weights to decompose, and `dim` their kept axis, as for
    ``convert_state_dict``.
    """
    kind = kind_of(source)
    if kind != kind_of(target):
        kinds = f"is a {kind_of(target)} file and {source.name} a {kind} one"
        raise file_error(target, f"{kinds}; conversion keeps the kind")
    refuse_existing(target)
    with reading(source), opened(source) as states:
        selected = _select(states, weights)
        plans = [
            plan_conversion(outline(state), to, partial(_is_in, names), dim)
            for (_, state), names in zip(states, selected, strict=True)
        ]
        parts = list(zip(states, plans, strict=True))
        names = [join_path(place, name) for (place, _), plan in parts for name in plan.names]
        if not names and to != "folded":
            raise StateDictError(
                f"nothing to write as {to}: no weight is normalized, and no plain one was chosen; "
                "choose with --weights, such as --weights '*.weight'"
            )
        (_, whole), *_ = states
        if isinstance(whole, Shards):
            with writing(target):
                if kind == "sharded":
                    write_shards(target, plans[0].tensors, whole)
                else:
                    metadata = whole.metadata(source.name)
                    write_safetensors(target, plans[0].tensors, whole, metadata)
        else:
            planned = {id(state): plan.tensors for (_, state), plan in parts}
            after = convert_nested(
                whole, lambda state: {x.key: x.compute(state) for x in planned[id(state)]}
            )
            with writing(target), atomic_writer(target) as file:
                torch.save(after, file)
        tensors = [(place, len(tensor_keys(state))) for place, state in states]
    touched = [place for (place, _), plan in parts if plan.names]
    return Converted(names, untouched(tensors, touched) if names else {})


# — files of every kind —


def kind_of(path: Path) -> Kind:
    """Return the kind of a file by its name."""
    if path.name.endswith(INDEX):
        return "sharded"
    if path.name.endswith(WHOLE):
        return "whole"
    if path.suffix in PICKLES:
        return "pickle"
    raise file_error(path, f"expected one of {', '.join((*PICKLES, WHOLE, INDEX))}")


@contextmanager
def opened(path: Path) -> Iterator[list[tuple[str, State]]]:
    """Open the state dicts of a file, each with its place in the file, the outermost first."""
    if kind_of(path) == "pickle":
        yield nested_mappings(load_pickle(path))
    else:
        with open_shards(path) as shards:
            yield [("", shards)]


def outline(state: State) -> State:
    """Return a state dict whose tensors need not be read to know their shapes."""
    return state.outlines() if isinstance(state, Shards) else state


def tensor_keys(state: State) -> list[Any]:
    """Return the keys of the tensors in a state dict."""
    return [key for key, value in outline(state).items() if isinstance(value, Tensor)]


# — selection of plain weights —


def _select(states: Sequence[tuple[str, State]], patterns: Sequence[str]) -> list[set[str]]:
    """Return the names in each state dict that a pattern selects, with or without its place.

    Raises for a pattern that matches no weight, plain or normalized.
    """
    selected: list[set[str]] = [set() for _ in states]
    unmatched = set(patterns)
    for (place, state), names in zip(states, selected, strict=True) if patterns else ():
        items = outline(state)
        weights = [weight.path for weight in stored_weights(items)]
        weights += [key for key, value in items.items() if _is_weight(key, value)]
        for name in weights:
            full = join_path(place, name)
            fitting = {p for p in patterns if p in (name, full) or fnmatchcase(name, p)
                       or fnmatchcase(full, p)}  # fmt: skip
            unmatched -= fitting
            if fitting:
                names.add(name)
    for pattern in sorted(unmatched):
        raise StateDictError(f"weights={pattern!r} matches no weight (a matrix or more)")
    return selected


def _is_weight(key: Any, value: Any) -> bool:
    dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
    return isinstance(key, str) and dense and value.is_floating_point() and value.ndim > 1


def _is_in(names: set[str], name: str, _: Tensor) -> bool:
    return name in names
