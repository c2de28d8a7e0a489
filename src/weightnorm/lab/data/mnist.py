"""MNIST, its fixed binarization (Larochelle's), and random binarization."""

from __future__ import annotations

import gzip
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weightnorm.lab.data.fetch import DAMAGED_GZIP, fetch
from weightnorm.lab.data.labelled import Labelled
from weightnorm.lab.errors import DataError

SIDE = 28


@dataclass(frozen=True, eq=False)
class Binarized:
    """Binary images: uint8, (50000, 28, 28), (10000, 28, 28), (10000, 28, 28)."""

    train: Tensor
    valid: Tensor
    test: Tensor


def load(data_dir: Path | None = None) -> Labelled:
    """Load the published pixels: uint8, (60000, 28, 28) and (10000, 28, 28)."""
    paths = fetch("mnist", data_dir)
    train, train_labels, test, test_labels = (
        read_idx(paths[f"{split}-{kind}-ubyte.gz"], ndim)
        for split in ("train", "t10k")
        for kind, ndim in (("images-idx3", 3), ("labels-idx1", 1))
    )
    names = tuple("0123456789")
    return Labelled(train, train_labels.long(), test, test_labels.long(), names)


def load_binarized(data_dir: Path | None = None) -> Binarized:
    """Load the fixed binarization, the benchmark of density estimation."""
    paths = fetch("binarized-mnist", data_dir)
    return Binarized(
        *(read_amat(paths[f"binarized_mnist_{s}.amat"]) for s in ("train", "valid", "test"))
    )


def binarize(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Sample x ~ Bernoulli(pixel/255): uint8 in, float32 zeros and ones out."""
    if images.dtype != torch.uint8:
        raise ValueError(f"binarize takes pixels, uint8 from 0 to 255; got {images.dtype}")
    return torch.bernoulli(images.float() / 255, generator=generator)


def read_idx(path: Path, ndim: int) -> Tensor:
    """Read an idx.gz file of bytes: magic 0x08, `ndim`; the shape, big-endian; then the bytes."""
    content = _unpacked(path)
    head = 4 + 4 * ndim
    magic = 0x800 + ndim
    if len(content) < head or content[:4] != struct.pack(">i", magic):
        got = int.from_bytes(content[:4], "big")
        raise DataError(f"{path} is not an idx file of {ndim}-d bytes: magic {got}, not {magic}")
    shape = struct.unpack(f">{ndim}I", content[4:head])
    values = np.frombuffer(content, np.uint8, offset=head)
    if len(values) != math.prod(shape):
        raise DataError(f"{path} announces shape {shape}, but has {len(values)} bytes")
    return torch.from_numpy(values.reshape(shape).copy())


def read_amat(path: Path) -> Tensor:
    """Read lines of 784 zeros and ones separated by spaces, plain or gzipped: (N, 28, 28)."""
    content = _unpacked(path) if path.suffix == ".gz" else path.read_bytes()
    row = 2 * SIDE * SIDE
    lines = np.frombuffer(content[: len(content) // row * row], np.uint8).reshape(-1, row)
    pixels, between = lines[:, ::2] - ord("0"), lines[:, 1::2]
    breaks = np.frombuffer(b" " * (row // 2 - 1) + b"\n", np.uint8)
    if len(content) % row or (pixels > 1).any() or (between != breaks).any():
        raise DataError(f"{path} is not lines of {SIDE * SIDE} zeros and ones; delete it")
    return torch.from_numpy(pixels.reshape(-1, SIDE, SIDE))


def _unpacked(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except DAMAGED_GZIP as error:
        raise DataError(f"{path} cannot be unpacked: {error}; delete it") from error
