"""ZCA against numpy in float64, and its cache against damaged files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightnorm.lab.data import zca
from weightnorm.lab.data.zca import Zca


def random_images(seed: int, *shape: int, levels: int = 256) -> Tensor:
    """Correlated pixels: a random walk along the last axis, wrapped into the range."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-20, 21, shape, generator=generator).cumsum(-1)
    return ((steps + 128) % levels).to(torch.uint8)


def oracle(images: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Mean and matrix by the formula, slowly, in float64."""
    x = (images.numpy().reshape(len(images), -1).astype(np.float64) - 127.5) / 128
    mean = x.mean(0)
    u, s, _ = np.linalg.svd((x - mean).T @ (x - mean) / len(x))
    return mean, u @ np.diag(1 / np.sqrt(s + 1e-5)) @ u.T


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(2, 60),
    shape=st.sampled_from([(1,), (7,), (1, 4, 4), (3, 4, 4)]),
    levels=st.sampled_from([2, 256]),
)
def test_fit_and_apply_match_numpy(seed: int, n: int, shape: tuple[int, ...], levels: int) -> None:
    images, others = random_images(seed, 2, max(n, 5), *shape, levels=levels)
    images = images[:n]
    mean, matrix = oracle(images)
    fitted = zca.fit(images)
    scale = np.abs(matrix).max()
    np.testing.assert_allclose(fitted.mean, mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(fitted.matrix, matrix, rtol=1e-5, atol=1e-6 * scale)
    x = (others.numpy().reshape(len(others), -1) - 127.5) / 128 - mean
    white = zca.apply(fitted, others)
    assert white.shape == others.shape
    assert white.dtype == torch.float32
    np.testing.assert_allclose(white.flatten(1), x @ matrix, rtol=1e-4, atol=1e-4 * scale)


def test_many_rows_and_columns_match_numpy() -> None:
    """More rows than are added up exactly at once, more columns than one block."""
    images = random_images(0, 2 * zca._EXACT_ROWS + 99, 3, 13, 13)
    assert images[0].numel() > zca._BLOCK
    mean, matrix = oracle(images)
    fitted = zca.fit(images)
    np.testing.assert_allclose(fitted.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(fitted.matrix, matrix, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("pixel", [1, 255])
def test_products_are_exact(pixel: int) -> None:
    """Against integers, where the sums are largest: most pixels at an end of the range."""
    pixels = random_images(5, 3 * zca._EXACT_ROWS + 1, zca._BLOCK + 9)
    pixels[:, 5:] = pixel
    integers = pixels.double() - 128  # Far below 2⁵³.
    n, mean = len(pixels), integers.sum(0) / len(pixels)
    expected = (integers.T @ integers / n - mean.outer(mean)) / 128**2
    assert torch.equal(zca._moments(pixels)[1].triu(), expected.triu())


def test_whitened_images_have_mean_zero_and_covariance_identity() -> None:
    images = random_images(1, 3000, 3, 8, 8)
    white = zca.apply(zca.fit(images), images).flatten(1).double()
    torch.testing.assert_close(white.mean(0), torch.zeros(192).double(), atol=1e-4, rtol=0)
    covariance = torch.cov(white.T, correction=0)
    torch.testing.assert_close(covariance, torch.eye(192).double(), atol=1e-2, rtol=0)


def test_map_is_symmetric() -> None:
    """ZCA, not PCA: W = Wᵀ, positive definite."""
    matrix = zca.fit(random_images(2, 500, 1, 6, 6)).matrix
    torch.testing.assert_close(matrix, matrix.T)
    assert torch.linalg.eigvalsh(matrix.double()).min() > 0


def test_constant_pixel_is_zero_after_whitening() -> None:
    images = random_images(3, 200, 1, 4, 4)
    images[:, 0, 0, 0] = 9
    white = zca.apply(zca.fit(images), images)
    assert white.isfinite().all()
    assert white[:, 0, 0, 0].abs().max() < 1e-3


@pytest.mark.parametrize("images", [torch.rand(5, 3), torch.zeros(5, dtype=torch.uint8)])
def test_other_types_are_refused(images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"takes pixels, uint8 of shape \(N, …\); got torch"):
        zca.fit(images)


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one image"):
        zca.fit(torch.zeros(0, 3, 4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\(2, 1, 5, 5\) have 25 values each.*fitted on 16"):
        zca.apply(zca.fit(random_images(0, 9, 1, 4, 4)), random_images(0, 2, 1, 5, 5))


# The cache

IMAGES = random_images(4, 100, 1, 5, 5)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHTNORM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever a map is fitted."""
    counted: list[int] = []
    fit = zca.fit

    def counting(images: Tensor) -> Zca:
        counted.append(len(images))
        return fit(images)

    monkeypatch.setattr(zca, "fit", counting)
    return counted


def equal(a: Zca, b: Zca) -> bool:
    return torch.equal(a.mean, b.mean) and torch.equal(a.matrix, b.matrix)


def test_cached_map_is_bit_equal(cache: Path, fits: list[int]) -> None:
    first, second = zca.fit_once(IMAGES), zca.fit_once(IMAGES.clone())
    assert equal(first, second)
    assert fits == [100]
    assert [path.suffix for path in cache.iterdir()] == [".pt"]


@pytest.mark.usefixtures("cache")
def test_other_images_have_another_cache_file(fits: list[int]) -> None:
    changed = IMAGES.clone()
    changed[99, 0, 4, 4] ^= 1
    maps = [zca.fit_once(x) for x in (IMAGES, changed, IMAGES[:99], IMAGES.view(50, 50))]
    assert fits == [100, 100, 99, 50]
    assert not equal(maps[0], maps[1])


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.find(zca.fit(IMAGES).matrix.numpy().tobytes())
    assert at > 0
    content[at + 1000] ^= 1
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_something_else(path: Path) -> None:
    torch.save({"mean": torch.zeros(25)}, path)


def malicious(path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(path.with_name("trace")),)

    torch.save(Trap(), path)


@pytest.mark.parametrize("damage", [truncated, flipped, emptied, of_something_else, malicious])
def test_damaged_cache_is_replaced(cache: Path, fits: list[int], damage: object) -> None:
    first = zca.fit_once(IMAGES)
    (path,) = cache.iterdir()
    assert callable(damage)
    damage(path)
    fits.clear()
    assert equal(zca.fit_once(IMAGES), first)
    assert equal(zca.fit_once(IMAGES), first)
    assert fits == [100]
    assert list(cache.iterdir()) == [path]


def test_cache_file_of_another_map_is_not_used(cache: Path) -> None:
    first = zca.fit_once(IMAGES)
    (mine,) = cache.iterdir()
    zca.fit_once(IMAGES.flip(0)[:50])
    (theirs,) = (path for path in cache.iterdir() if path != mine)
    mine.write_bytes(theirs.read_bytes())
    assert equal(zca.fit_once(IMAGES), first)


def test_unwritable_cache_is_a_warning(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match=r"cannot be cached in .*WEIGHTNORM_CACHE"):
        fitted = zca.fit_once(IMAGES)
    assert equal(fitted, zca.fit(IMAGES))


def test_full_disk_leaves_no_partial_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match="No space left"):
        zca.fit_once(IMAGES)
    assert list(cache.iterdir()) == []
