"""Read and write .safetensors, whole or in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from weightnorm.files.atomic import atomic_writer, write_atomically
from weightnorm.files.errors import file_error, naming, refuse_existing

WHOLE, INDEX = ".safetensors", ".safetensors.index.json"


@dataclass(frozen=True)
class Shard:
    """A .safetensors file. Its tensors are mapped into memory: one is read when it is used."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str] | None


def read_shards(path: Path) -> dict[str, Shard]:
    """Open a .safetensors file, or those that an index lists; return them by their names."""
    listed = _weight_map(path) if path.name.endswith(INDEX) else None
    names = [path.name] if listed is None else sorted(set(listed.values()))
    shards = {name: _read_shard(path.with_name(name)) for name in names}
    shard_of: dict[str, str] = {}
    for name, shard in shards.items():
        for key in shard.tensors:
            if key in shard_of:
                both = f"{shard_of[key]} and {name}"
                raise file_error(path, f"{key!r} is in two shards, {both}")
            shard_of[key] = name
    if listed is not None and listed != shard_of:
        key = min(listed.items() ^ shard_of.items())[0]
        raise file_error(path, f"does not list what its shards contain: {key!r}")
    return shards


def _read_shard(path: Path) -> Shard:
    with naming(path), safe_open(str(path), "pt") as file:
        return Shard({key: file.get_tensor(key) for key in file.keys()}, file.metadata())  # noqa: SIM118


def _weight_map(path: Path) -> dict[str, str]:
    """Return the name of the shard of each tensor that an index lists."""
    try:
        weight_map = dict(json.loads(path.read_bytes())["weight_map"])
        names = {*weight_map.values()}
        valid = names and all(Path(x).name == x and x.endswith(WHOLE) for x in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid:
        reason = f"is not an index of shards: expected a weight_map of {WHOLE} files beside it"
        raise file_error(path, reason)
    return weight_map


def write_whole(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> None:
    """Write a .safetensors file, whole or not at all."""
    with atomic_writer(path) as file:
        save_file({key: x.contiguous() for key, x in tensors.items()}, file.name, metadata)


def write_shards(
    path: Path,
    tensors: Mapping[str, Tensor],
    shard_of: Mapping[str, str],
    like: Mapping[str, Shard],
    index: Mapping[str, Any],
) -> None:
    """Write shards with the metadata of those they are `like`, and last the index that lists them.

    After an error nothing of them remains.
    """
    paths = [path.with_name(name) for name in like]
    for shard in paths:
        refuse_existing(shard)
    size = {"total_size": sum(x.nbytes for x in tensors.values())}
    metadata = {**(index.get("metadata") or {}), **size}
    content = {**index, "metadata": metadata, "weight_map": dict(shard_of)}
    try:
        for shard, (name, old) in zip(paths, like.items(), strict=True):
            part = {key: x for key, x in tensors.items() if shard_of[key] == name}
            write_whole(shard, part, old.metadata)
        write_atomically(path, json.dumps(content, indent=2).encode())
    except BaseException:
        for shard in paths:
            shard.unlink(missing_ok=True)
        raise
