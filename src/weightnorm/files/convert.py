"""Convert a checkpoint file between the formats of weight norm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from weightnorm.checkpoints import Conversion, Format, StateDictError, convert, matching_weights
from weightnorm.files.atomic import atomic_writer
from weightnorm.files.errors import file_error, naming, refuse_existing
from weightnorm.files.nested import State, join_path, nested_mappings, with_mappings
from weightnorm.files.pickles import load_pickle
from weightnorm.files.safetensors_files import (
    INDEX,
    WHOLE,
    Shard,
    read_shards,
    write_shards,
    write_whole,
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

    `weights` are names or patterns of plain weights to decompose, with or without the place of
    their state dict in the file, and `dim` their kept axis, as for ``convert_state_dict``.
    """
    kind = kind_of(source)
    if kind != kind_of(target):
        kinds = f"is a {kind_of(target)} file and {source.name} a {kind} one"
        raise file_error(target, f"{kinds}; conversion keeps the kind")
    refuse_existing(target)
    with naming(source):
        checkpoint, shards = load(source)
        states = list(nested_mappings(checkpoint))
        done = _convert(states, to, weights, dim)
        after = with_mappings(checkpoint, {key: one.state for key, one in done.items()})
    with naming(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind == "pickle":
            with atomic_writer(target) as file:
                torch.save(after, file)
        else:
            _write_safetensors(source, target, done[id(checkpoint)], shards)
    names = [join_path(place, name) for place, state in states for name in done[id(state)].names]
    return Converted(names, _untouched(checkpoint, done) if names else {})


def _convert(
    states: Sequence[tuple[str, State]], to: Format, weights: Sequence[str], dim: Dim
) -> dict[int, Conversion]:
    """Convert every state dict of a file; return the results by the ids of the old ones."""
    matching = [matching_weights(state, weights, place) for place, state in states]
    for pattern in weights:
        if not any(found[pattern] for found in matching):
            raise StateDictError(f"weights={pattern!r} matches no weight (a matrix or more)")
    done = {
        id(state): convert(state, to, set().union(*found.values()), dim)
        for (_, state), found in zip(states, matching, strict=True)
    }
    if to != "folded" and not any(conversion.names for conversion in done.values()):
        raise StateDictError(
            f"nothing to write as {to}: no weight is normalized, and no plain one was chosen; "
            "choose with --weights, such as --weights '*.weight'"
        )
    return done


def _write_safetensors(
    source: Path, target: Path, new: Conversion, shards: dict[str, Shard]
) -> None:
    """Write each tensor to the file, or the shard, of the one it replaces."""
    if kind_of(target) == "whole":
        write_whole(target, new.state, shards[source.name].metadata)
        return
    old = {key: name for name, shard in shards.items() for key in shard.tensors}
    shard_of = {str(key): old[str(replaced)] for key, replaced in new.sources.items()}
    write_shards(target, new.state, shard_of, shards, json.loads(source.read_bytes()))


def _untouched(checkpoint: State, done: dict[int, Conversion]) -> dict[str, int]:
    """Return the parts of a checkpoint without a converted weight, and their numbers of tensors."""
    found = {}
    for key, part in checkpoint.items():
        inside = [state for _, state in nested_mappings(part)]
        count = sum(len(tensors_of(state)) for state in inside)
        if count and not any(done[id(state)].names for state in inside):
            found[str(key)] = count
    return found


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


def load(path: Path) -> tuple[State, dict[str, Shard]]:
    """Load a checkpoint; also return the safetensors files that it is in, by name."""
    if kind_of(path) == "pickle":
        return load_pickle(path), {}
    shards = read_shards(path)
    return {key: x for shard in shards.values() for key, x in shard.tensors.items()}, shards


def tensors_of(state: State) -> list[Any]:
    """Return the keys of the tensors in a state dict."""
    return [key for key, value in state.items() if isinstance(value, Tensor)]
