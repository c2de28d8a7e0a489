"""Read and write .safetensors one tensor at a time, whole or in shards with an index.

The format: the length of a header as 8 bytes, the header as JSON (name → type, shape, offsets of
the data), then the data. The safetensors library's own writer needs all tensors in memory at once.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from torch import Tensor

from weightnorm.checkpoints import PlannedTensor, StateDictError
from weightnorm.files.atomic import atomic_writer, write_atomically
from weightnorm.files.errors import check_regular, file_error, reading, refuse_existing

WHOLE, INDEX = ".safetensors", ".safetensors.index.json"
DTYPES = {
    "C64": torch.complex64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


# — reading —


class Shards(Mapping[str, Tensor]):
    """The tensors of one or more safetensors files, each read when it is accessed."""

    def __init__(
        self,
        folder: Path,
        files: dict[str, Any],
        shard_of: dict[str, str],
        index_metadata: dict[str, Any],
    ) -> None:
        self.folder, self.files, self.shard_of = folder, files, shard_of
        self.index_metadata = index_metadata

    def __getitem__(self, key: str) -> Tensor:
        name = self.shard_of[key]
        with reading(self.folder / name):
            tensor: Tensor = self.files[name].get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.shard_of)

    def __len__(self) -> int:
        return len(self.shard_of)

    def metadata(self, name: str) -> dict[str, str]:
        """Return the metadata of one file."""
        return self.files[name].metadata() or {}

    def outlines(self) -> dict[str, Tensor]:
        """Return meta tensors with the shapes and types of all tensors, without reading any."""
        return {key: self._outline(key) for key in self}

    def _outline(self, key: str) -> Tensor:
        name = self.shard_of[key]
        with reading(self.folder / name):
            view = self.files[name].get_slice(key)
            if view.get_dtype() not in DTYPES:
                known = ", ".join(DTYPES)
                raise StateDictError(f"{key} has type {view.get_dtype()}; supported are {known}")
            return torch.empty(view.get_shape(), dtype=DTYPES[view.get_dtype()], device="meta")


@contextmanager
def open_shards(path: Path) -> Iterator[Shards]:
    """Open a .safetensors file, or the files that an index lists."""
    listed: dict[str, str] | None = None
    metadata: dict[str, Any] = {}
    if path.name.endswith(INDEX):
        listed, metadata = _read_index(path)
    names = [path.name] if listed is None else sorted(set(listed.values()))
    shard_of: dict[str, str] = {}
    with ExitStack() as stack:
        files = {name: _open_file(stack, path.parent / name) for name in names}
        for name, file in files.items():
            for key in file.keys():  # noqa: SIM118
                if key in shard_of:
                    both = f"{shard_of[key]} and {name}"
                    raise file_error(path, f"{key!r} is in two shards, {both}")
                shard_of[key] = name
        if listed is not None and listed != shard_of:
            key = min(listed.items() ^ shard_of.items())[0]
            raise file_error(path, f"does not list what its shards contain: {key!r}")
        yield Shards(path.parent, files, shard_of, metadata)


def _open_file(stack: ExitStack, path: Path) -> Any:
    check_regular(path)
    with reading(path):
        return stack.enter_context(safe_open(str(path), "pt"))


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the weight map and the metadata of an index of shards."""
    check_regular(path)
    try:
        index = json.loads(path.read_bytes())
        weight_map, metadata = index["weight_map"], index.get("metadata") or {}
        valid = isinstance(weight_map, dict) and isinstance(metadata, dict)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise file_error(path, "is not an index of shards: expected JSON with a weight_map")
    for name in weight_map.values():
        if not (isinstance(name, str) and Path(name).name == name and name.endswith(WHOLE)):
            raise file_error(path, f"names {name!r}; expected {WHOLE} files beside it")
    if not weight_map:
        raise file_error(path, "lists no weights")
    return weight_map, metadata


# — writing —


def write_safetensors(
    path: Path, tensors: Sequence[PlannedTensor], state: Shards, metadata: dict[str, str]
) -> None:
    """Write a file, each tensor computed from `state` when it is written. Keys must be unique."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for planned in tensors:
        key, outline = str(planned.key), planned.outline
        if key in header or key == "__metadata__":
            raise ValueError(f"a safetensors file cannot have {key!r} twice")
        end = start + outline.nbytes
        header[key] = {
            "dtype": CODES[outline.dtype],
            "shape": list(outline.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with atomic_writer(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for planned in tensors:
            _write_data(file, planned, planned.compute(state))


def _write_data(file: IO[bytes], planned: PlannedTensor, value: Tensor) -> None:
    value, outline = value.detach().to(planned.outline.dtype).contiguous(), planned.outline
    if value.shape != outline.shape:
        shapes = f"{tuple(value.shape)}, planned {tuple(outline.shape)}"
        raise ValueError(f"{planned.key!r} has shape {shapes}")
    if outline.nbytes:  # by address: Tensor.numpy would need numpy
        file.write((ctypes.c_char * outline.nbytes).from_address(value.data_ptr()))


def write_shards(index: Path, tensors: Sequence[PlannedTensor], state: Shards) -> None:
    """Write shards, each tensor where the one it replaces was, and last the index that lists them.

    After an error nothing of them remains.
    """
    shards: dict[str, list[PlannedTensor]] = {}
    for planned in tensors:
        shards.setdefault(state.shard_of[str(planned.source)], []).append(planned)
    paths = [index.parent / name for name in shards]
    for path in paths:
        refuse_existing(path)
    total = sum(planned.outline.nbytes for planned in tensors)
    weight_map = {planned.key: name for name, part in shards.items() for planned in part}
    content = {"metadata": {**state.index_metadata, "total_size": total}, "weight_map": weight_map}
    try:
        for path, part in zip(paths, shards.values(), strict=True):
            write_safetensors(path, part, state, state.metadata(path.name))
        write_atomically(index, json.dumps(content, indent=2).encode())
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise
