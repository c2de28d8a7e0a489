"""Write a .safetensors file one tensor at a time, whole or not at all.

The format: the length of a header as 8 bytes, the header as JSON (name → type, shape, offsets of
the data), then the data. The safetensors library's own writer needs all tensors in memory at once.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from weightnorm.lab.files import atomic_writer

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


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor's entry in the header, and the function that computes it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    compute: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path, tensors: Sequence[TensorToWrite], metadata: dict[str, str]
) -> None:
    """Replace a file by these tensors, each computed when it is written. Keys must be unique."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for tensor in tensors:
        if tensor.key in header or tensor.key == "__metadata__":
            raise ValueError(f"a safetensors file cannot have {tensor.key!r} twice")
        end = start + tensor.size
        header[tensor.key] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with atomic_writer(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            _write_data(file, tensor)


def _write_data(file: IO[bytes], tensor: TensorToWrite) -> None:
    value = tensor.compute().detach().to(tensor.dtype).contiguous()
    if tuple(value.shape) != tensor.shape:
        raise ValueError(f"{tensor.key!r} has shape {tuple(value.shape)}, planned {tensor.shape}")
    if tensor.size:  # by address: Tensor.numpy would need numpy
        file.write((ctypes.c_char * tensor.size).from_address(value.data_ptr()))
