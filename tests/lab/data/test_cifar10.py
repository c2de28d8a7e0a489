"""CIFAR-10: small batches written by the tests, and the real data where available."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weightnorm.lab.data import cifar10, safe_pickle, zca
from weightnorm.lab.data.labelled import Labelled
from weightnorm.lab.errors import DataError

real = pytest.mark.skipif(
    not os.environ.get("WEIGHTNORM_DATA"), reason="WEIGHTNORM_DATA names no folder of real data"
)
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
PER_BATCH = 4


def batch(number: int) -> dict[bytes, Any]:
    pixels = np.random.RandomState(number).randint(256, size=(PER_BATCH, 3072)).astype(np.uint8)
    return {b"data": pixels, b"labels": [number, *range(PER_BATCH - 1)]}


def write(path: Path, content: object) -> None:
    path.write_bytes(pickle.dumps(content, 3))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six batches of four images, taken for verified."""
    for number, name in enumerate(BATCHES):
        write(tmp_path / name, batch(number))
    write(tmp_path / "batches.meta", {b"label_names": [b"cat", b"dog"]})
    paths = {name: tmp_path / name for name in (*BATCHES, "batches.meta")}
    monkeypatch.setattr(cifar10, "fetch", lambda name, root: paths)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_batches_are_concatenated_and_split_into_channels() -> None:
    data = cifar10.load()
    assert data.train.shape == (5 * PER_BATCH, 3, 32, 32)
    assert data.test.shape == (PER_BATCH, 3, 32, 32)
    assert data.train.dtype == data.test.dtype == torch.uint8
    for number, got in enumerate([*data.train.split(PER_BATCH), data.test]):
        rows = batch(number)[b"data"]
        assert got[2, 1, 5, 7] == rows[2, 1024 + 5 * 32 + 7]
        np.testing.assert_array_equal(got.flatten(1), rows)
    assert data.train_labels.tolist() == [x for i in range(5) for x in (i, 0, 1, 2)]
    assert data.test_labels.tolist() == [5, 0, 1, 2]
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64
    assert data.label_names == ("cat", "dog")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({b"data": np.zeros((4, 3071), np.uint8)}, r"not \(N, 3072\)"),
        ({b"data": np.zeros(3072, np.uint8)}, r"not \(N, 3072\)"),
        ({b"data": [0] * 3072}, r"not \(N, 3072\)"),
        ({b"labels": [1, 2, 3]}, "a label for each image"),
        ({b"labels": b"1234"}, "a label for each image"),
        ({b"labels": [1, 2, 3, 10]}, "not all 0 to 9"),
        ({b"labels": [1, 2, 3, -1]}, "not all 0 to 9"),
        ({b"labels": [1, 2, 3, 0.5]}, "not all 0 to 9"),
    ],
)
def test_batch_of_another_shape_is_refused(
    folder: Path, change: dict[bytes, Any], message: str
) -> None:
    write(folder / "data_batch_3", batch(2) | change)
    with pytest.raises(DataError, match=f"data_batch_3 is not a CIFAR-10 batch.*{message}"):
        cifar10.load()


@pytest.mark.parametrize("content", [{}, {b"label_names": [1, 2]}, {b"label_names": b"cat"}])
def test_meta_file_without_names_is_refused(folder: Path, content: object) -> None:
    write(folder / "batches.meta", content)
    with pytest.raises(DataError, match="no label names"):
        cifar10.load()


class Trap:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("name", ["data_batch_1", "test_batch", "batches.meta"])
def test_malicious_batch_is_not_executed(folder: Path, name: str) -> None:
    write(folder / name, batch(0) | {b"filenames": Trap(folder / "trace")})
    with pytest.raises(DataError, match=r"refused: it refers to posix\.mkdir"):
        cifar10.load()
    assert not (folder / "trace").exists()


def test_unverified_files_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Path] = []
    monkeypatch.setattr(safe_pickle, "read", parsed.append)
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in (*BATCHES, "batches.meta"):
        write(tmp_path / "cifar-10-batches-py" / name, batch(0))
    with pytest.raises(DataError, match="data_batch_1 is not the published file"):
        cifar10.load(tmp_path)
    assert parsed == []


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("limit", "test_limit"), [(None, None), (7, None), (1, 3), (10**6, 10**6)])
def test_limits_apply_after_fitting(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, test_limit: int | None
) -> None:
    plain = cifar10.load()
    fitted = zca.Zca(torch.full((3072,), 0.25), 2 * torch.eye(3072))

    def fit_once(images: torch.Tensor) -> zca.Zca:
        assert torch.equal(images, plain.train)
        return fitted

    monkeypatch.setattr(zca, "fit_once", fit_once)
    white = cifar10.load_whitened(limit=limit, test_limit=test_limit)
    for got, pixels, n in ((white.train, plain.train, limit), (white.test, plain.test, test_limit)):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, 2 * ((pixels[:n].float() - 127.5) / 128 - 0.25))
    assert torch.equal(white.train_labels, plain.train_labels[:limit])
    assert torch.equal(white.test_labels, plain.test_labels[:test_limit])
    assert white.label_names == plain.label_names


@pytest.mark.parametrize("limits", [{"limit": 0}, {"test_limit": -1}])
def test_invalid_limit_is_refused_first(tmp_path: Path, limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"limit=(0|-1): give a number from 1 up"):
        cifar10.load_whitened(tmp_path, **limits)


@pytest.fixture(scope="module")
def published() -> Labelled:
    return cifar10.load()


@real
def test_real_images(published: Labelled) -> None:
    assert published.train.shape == (50_000, 3, 32, 32)
    assert published.test.shape == (10_000, 3, 32, 32)
    assert published.train_labels.bincount().tolist() == [5000] * 10
    assert published.test_labels.bincount().tolist() == [1000] * 10
    assert published.label_names[0] == "airplane"
    assert published.label_names[9] == "truck"
    # The channel means everybody normalizes by.
    means = published.train.float().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-4, rtol=0)


@real
def test_real_corners_match_numpy(published: Labelled) -> None:
    corners = published.train[:, :, :6, :6]
    x = (corners.flatten(1).numpy().astype(np.float64) - 127.5) / 128
    x -= x.mean(0)
    s, u = np.linalg.eigh(x.T @ x / len(x))
    expected = x[:1000] @ (u / np.sqrt(s + 1e-5)) @ u.T
    got = zca.apply(zca.fit(corners), corners[:1000])
    np.testing.assert_allclose(got.flatten(1), expected, atol=1e-4)


@real
def test_real_images_from_the_cache_are_equal(
    published: Labelled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 4,000 images, since fitting takes seconds even so: W(C + ε)W = I, and once is enough."""
    n = 4000
    some = replace(published, train=published.train[:n], train_labels=published.train_labels[:n])
    monkeypatch.setattr(cifar10, "load", lambda data_dir: some)
    monkeypatch.setenv("WEIGHTNORM_CACHE", str(tmp_path))
    first = cifar10.load_whitened(test_limit=100)
    monkeypatch.setattr(zca, "fit", None)
    second = cifar10.load_whitened(limit=50, test_limit=100)
    assert torch.equal(first.test, second.test)
    # A product of another shape may be added up in another order.
    torch.testing.assert_close(first.train[:50], second.train, atol=1e-3, rtol=1e-3)

    x = (some.train.flatten(1).double() - 127.5) / 128
    x -= x.mean(0)
    probes = torch.randn(3072, 20, generator=torch.Generator().manual_seed(0)).double()
    w = zca.fit_once(some.train).matrix.double()
    once = w @ probes
    again = w @ (x.T @ (x @ once) / n + 1e-5 * once)
    torch.testing.assert_close(again, probes, atol=1e-3, rtol=0)
