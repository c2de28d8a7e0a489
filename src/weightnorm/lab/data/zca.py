"""ZCA whitening: x ← U·diag(1/√(S + ε))·Uᵀ (x − μ), with U·S·Uᵀ the covariance of the images.

x = (pixel − 127.5)/128, as in the authors' code. The map is fitted once and cached on disk.

Note [exact covariance]
    pixel − 128 is a signed integer of 7 bits, so a product has at most 14 bits and a sum of 1024
    products at most 24, which float32 represents exactly in any order of summation. Blocks of 1024
    images are multiplied in float32, which is fast, and summed in float64, so nothing is rounded.
    CIFAR-10's smallest eigenvalues are below ε and its largest above 200: a float32 `eigh` loses
    the small ones, so it is computed in float64.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import pooch  # type: ignore[import-untyped]
import torch
from torch import Tensor

from weightnorm.files.atomic import write_atomically

EPS = 1e-5
_EXACT_ROWS = 1024
_BLOCK = 384
"""Columns of the covariance computed at a time: only those on or right of the diagonal."""


@dataclass(frozen=True, eq=False)
class Zca:
    """The map x ↦ (x − mean)·matrix on flattened images; float32."""

    mean: Tensor
    matrix: Tensor


def fit(images: Tensor) -> Zca:
    """Fit the ZCA map of images, (N, …) of uint8.

    >>> generator = torch.Generator().manual_seed(0)
    >>> images = torch.randint(256, (1000, 2), generator=generator, dtype=torch.uint8)
    >>> covariance = torch.cov(apply(fit(images), images).T, correction=0)
    >>> torch.allclose(covariance, torch.eye(2), atol=1e-3)
    True
    """
    pixels = _flat(images)
    if not len(pixels):
        raise ValueError("ZCA needs at least one image to fit; got none")
    mean, covariance = _moments(pixels)
    s, u = torch.linalg.eigh(covariance, UPLO="U")
    matrix = (u * (s.clamp_min(0) + EPS).rsqrt()) @ u.T
    return Zca(mean.float(), matrix.float())


def apply(zca: Zca, images: Tensor) -> Tensor:
    """Whiten images: uint8 in, float32 of the same shape out."""
    pixels = _flat(images)
    if pixels.shape[1] != len(zca.mean):
        raise ValueError(
            f"images of shape {tuple(images.shape)} have {pixels.shape[1]} values each, but the "
            f"ZCA map was fitted on {len(zca.mean)}; fit it on images of this size"
        )
    white = torch.empty(pixels.shape, dtype=torch.float32)
    for rows, out in zip(pixels.split(4096), white.split(4096), strict=True):
        torch.mm((rows.float() - 127.5) / 128 - zca.mean, zca.matrix, out=out)
    return white.view(images.shape)


def fit_once(images: Tensor) -> Zca:
    """Fit the ZCA map, or load it from the cache if these images were fitted before.

    The cache is ``$WEIGHTNORM_CACHE`` or the user's cache folder. A damaged file is replaced; a
    folder that cannot be written is a warning.
    """
    folder = Path(os.environ.get("WEIGHTNORM_CACHE") or pooch.os_cache("weightnorm")).expanduser()
    key = _checksum(f"zca {EPS} {tuple(images.shape)}", images)
    path = folder / f"zca-{key[:32]}.pt"
    zca = _load(path)
    if zca is None:
        zca = fit(images)
        try:
            _save(zca, path)
        except OSError as error:
            warnings.warn(
                f"the ZCA map is fitted but cannot be cached in {folder} ({error}); it will be "
                "fitted again next time, unless $WEIGHTNORM_CACHE names a writable folder",
                stacklevel=2,
            )
    return zca


def _moments(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and upper triangle of the covariance of (pixel − 127.5)/128 in float64."""
    n, d = pixels.shape
    total = torch.zeros(d, dtype=torch.float64)
    products = torch.zeros(d, d, dtype=torch.float64)
    for rows in pixels.split(_EXACT_ROWS):
        x = rows.float() - 128
        total += x.sum(0)
        for i in range(0, d, _BLOCK):
            products[i : i + _BLOCK, i:] += x[:, i : i + _BLOCK].T @ x[:, i:]
    mean = total / n
    return (mean + 0.5) / 128, (products / n - mean.outer(mean)) / 128**2


def _flat(images: Tensor) -> Tensor:
    if images.dtype != torch.uint8 or images.ndim < 2:
        raise ValueError(
            f"ZCA takes pixels, uint8 of shape (N, …); got {images.dtype} of shape "
            f"{tuple(images.shape)}"
        )
    return images.flatten(1)


def _checksum(head: str, *tensors: Tensor) -> str:
    digest = hashlib.sha256(head.encode())
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def _load(path: Path) -> Zca | None:
    """Load a cached map; None if there is none or its checksum differs."""
    try:
        cached = torch.load(path, weights_only=True)
        zca = Zca(cached["mean"], cached["matrix"])
        intact = cached["checksum"] == _checksum(path.name, zca.mean, zca.matrix)
    except Exception:  # A damaged file is fitted again.
        return None
    return zca if intact else None


def _save(zca: Zca, path: Path) -> None:
    checksum = _checksum(path.name, zca.mean, zca.matrix)
    content = io.BytesIO()  # On a full disk, torch.save raises other errors than OSError.
    torch.save({"mean": zca.mean, "matrix": zca.matrix, "checksum": checksum}, content)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())
