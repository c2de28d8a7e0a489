"""MNIST: the idx and amat readers on files written by the tests, and real data where available."""

from __future__ import annotations

import gzip
import math
import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from weightnorm.lab.data import mnist
from weightnorm.lab.errors import DataError

real = pytest.mark.skipif(
    not os.environ.get("WEIGHTNORM_DATA"), reason="WEIGHTNORM_DATA names no folder of real data"
)


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return gzip.compress(head + array.tobytes(), 1)


def amat(images: np.ndarray) -> bytes:
    rows = images.reshape(-1, 784)
    return b"".join(b" ".join(b"%d" % x for x in row) + b"\n" for row in rows)


def bits(n: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randint(2, size=(n, 28, 28)).astype(np.uint8)


# idx


@given(npst.arrays(np.uint8, npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=9)))
def test_idx_round_trip(array: np.ndarray) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "x.gz")
        path.write_bytes(idx(array))
        got = mnist.read_idx(path, array.ndim)
    assert got.dtype == torch.uint8
    np.testing.assert_array_equal(got, array)


IDX = gzip.decompress(idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"\0\0\x0d\x03" + IDX[4:]), "magic 3331, not 2051"),
        (gzip.compress(b"\0\0\x08\x01" + IDX[4:]), "magic 2049, not 2051"),
        (gzip.compress(b"PK" + IDX[2:]), "not an idx file"),
        (gzip.compress(IDX[:9]), "not an idx file"),
        (gzip.compress(b""), "not an idx file"),
        (gzip.compress(IDX[:-1]), r"shape \(2, 3, 4\), but has 23 bytes"),
        (gzip.compress(IDX + b"\0"), r"shape \(2, 3, 4\), but has 25 bytes"),
        (gzip.compress(IDX[:4] + b"\xff" * 12 + IDX[16:]), "but has 24 bytes"),
        (gzip.compress(IDX)[:-10], "cannot be unpacked"),
        (IDX, "cannot be unpacked"),
    ],
    ids=["type", "ndim", "zip", "head", "empty", "short", "long", "vast", "truncated", "not gzip"],
)
def test_damaged_idx_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"x-idx3-ubyte.gz .*{message}"):
        mnist.read_idx(path, 3)


def test_images_and_labels_come_from_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"train-images-idx3": (5, 28, 28), "train-labels-idx1": (5,)}
    parts |= {"t10k-images-idx3": (2, 28, 28), "t10k-labels-idx1": (2,)}
    arrays = {
        f"{name}-ubyte.gz": (np.arange(math.prod(shape)) % (7 + i)).astype(np.uint8).reshape(shape)
        for i, (name, shape) in enumerate(parts.items())
    }
    for name, array in arrays.items():
        (tmp_path / name).write_bytes(idx(array))
    monkeypatch.setattr(mnist, "fetch", lambda name, root: {n: tmp_path / n for n in arrays})
    data = mnist.load()
    got = (data.train, data.train_labels, data.test, data.test_labels)
    for tensor, array in zip(got, arrays.values(), strict=True):
        np.testing.assert_array_equal(tensor, array)
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64


# amat


@given(seed=st.integers(0, 1000), n=st.integers(0, 4), packed=st.booleans())
def test_amat_round_trip(seed: int, n: int, packed: bool) -> None:
    images = bits(n, seed)
    with TemporaryDirectory() as folder:
        path = Path(folder, "x.amat.gz" if packed else "x.amat")
        path.write_bytes(gzip.compress(amat(images), 1) if packed else amat(images))
        got = mnist.read_amat(path)
    assert got.dtype == torch.uint8
    np.testing.assert_array_equal(got, images)


AMAT = amat(bits(3))


@pytest.mark.parametrize(
    "content",
    [
        AMAT[:-1],
        AMAT[:-2],
        AMAT + b"0",
        b"2" + AMAT[1:],
        b"/" + AMAT[1:],
        AMAT[:1] + b"," + AMAT[2:],
        AMAT.replace(b"\n", b" "),
        AMAT[2:] + AMAT[:2],
    ],
    ids=["no end", "short", "long", "two", "below zero", "comma", "one line", "shifted"],
)
def test_damaged_amat_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.amat").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.amat is not lines of 784 zeros and ones"):
        mnist.read_amat(tmp_path / "x.amat")


def test_binarized_splits_come_from_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {}
    for i, split in enumerate(("train", "valid", "test")):
        name = f"binarized_mnist_{split}.amat"
        paths[name] = tmp_path / f"{name}.gz"
        paths[name].write_bytes(gzip.compress(amat(bits(i + 1, seed=i))))
    monkeypatch.setattr(mnist, "fetch", lambda name, root: paths)
    data = mnist.load_binarized()
    for i, got in enumerate((data.train, data.valid, data.test)):
        np.testing.assert_array_equal(got, bits(i + 1, seed=i))


@pytest.mark.parametrize(
    ("load", "folder", "name"),
    [
        (mnist.load, "mnist", "train-labels-idx1-ubyte.gz"),
        (mnist.load_binarized, "binarized-mnist", "binarized_mnist_valid.amat.gz"),
    ],
)
def test_unverified_files_are_not_parsed(
    tmp_path: Path, load: object, folder: str, name: str
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / name).write_bytes(gzip.compress(IDX))
    assert callable(load)
    with pytest.raises(DataError, match=f"{name} is not the published file"):
        load(tmp_path)


# Binarization


def test_binarize_frequencies() -> None:
    images = torch.arange(256, dtype=torch.uint8).expand(4000, 256)
    drawn = mnist.binarize(images, torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.float32
    assert drawn.shape == images.shape
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert drawn[:, 0].sum() == 0
    assert drawn[:, 255].sum() == 4000
    p = images[0] / 255
    sigma = (p * (1 - p) / 4000).sqrt()
    assert ((drawn.mean(0) - p).abs() <= 4.5 * sigma + 1e-9).all()


def test_binarize_uses_the_generator() -> None:
    images = torch.full((1000,), 128, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    first, second = mnist.binarize(images, generator), mnist.binarize(images, generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, mnist.binarize(images, torch.Generator().manual_seed(1)))


def test_binarize_refuses_other_types() -> None:
    with pytest.raises(ValueError, match=r"uint8 from 0 to 255; got torch\.float32"):
        mnist.binarize(torch.rand(3, 28, 28))


# The real files


@real
def test_real_mnist() -> None:
    data = mnist.load()
    assert data.train.shape == (60_000, 28, 28)
    assert data.test.shape == (10_000, 28, 28)
    assert data.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.train_labels.bincount()[[0, 9]].tolist() == [5923, 5949]
    assert data.test_labels.bincount()[[0, 9]].tolist() == [980, 1009]
    # Mean and deviation that everybody normalizes by.
    pixels = data.train.float() / 255
    assert pixels.mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert pixels.std().item() == pytest.approx(0.3081, abs=1e-4)


@real
def test_real_binarized_mnist_matches_mnist() -> None:
    fixed, gray = mnist.load_binarized(), mnist.load()
    shapes = [len(split) for split in (fixed.train, fixed.valid, fixed.test)]
    assert shapes == [50_000, 10_000, 10_000]
    # They come in another order than MNIST's, training images dealt out anew to train and valid.
    pool = torch.cat([fixed.train, fixed.valid]).float().mean(0)
    assert (pool - gray.train.float().mean(0) / 255).abs().max() < 0.01
    drawn, pixels = fixed.test[:20].flatten(1).float(), gray.test.flatten(1)
    black, white = (pixels == 0).float(), (pixels == 255).float()
    impossible = drawn @ black.T + (1 - drawn) @ white.T  # (20, 10000) pixels, drawn against gray
    assert impossible.min(1).values.tolist() == [0] * 20
