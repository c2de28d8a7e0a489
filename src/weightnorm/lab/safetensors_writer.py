"""Write a .safetensors file one tensor at a time, whole or not at all.

The format: the length of a header as 8 bytes, the header as JSON (name → type, shape, place of the
bytes), then the bytes. The library's own writer wants all tensors in memory at once.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Piece:
    """A tensor to be written: all that the header says of it, and how to make it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_safetensors(path: Path, pieces: Sequence[Piece], metadata: dict[str, str]) -> None:
    """Replace a file by these tensors, made and written one after the other."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    place = 0
    for piece in pieces:
        ends = place + piece.size
        shape = list(piece.shape)
        header[piece.key] = {"dtype": piece.dtype, "shape": shape, "data_offsets": [place, ends]}
        place = ends
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for piece in pieces:
                file.write(_bytes(piece))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _bytes(piece: Piece) -> Any:
    tensor = piece.make().detach().to(DTYPES[piece.dtype]).contiguous()
    assert tuple(tensor.shape) == piece.shape, piece.key
    return tensor.flatten().view(torch.uint8).numpy().data
