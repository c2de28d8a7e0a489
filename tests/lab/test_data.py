"""Data sets: found, downloaded, checked before they are parsed; whitening against numpy."""

import gzip
import hashlib
import io
import os
import pickle
import socket
import struct
import tarfile
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pooch
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import datasets

from weightnorm.lab import data as module
from weightnorm.lab.data import (
    DATA_SETS,
    DataSet,
    Zca,
    apply_zca,
    binarize,
    data_dir,
    fetch,
    fit_zca,
    fit_zca_once,
    load_binarized_mnist,
    load_cifar10,
    load_digits,
    load_mnist,
    load_whitened_cifar10,
    read_published,
)
from weightnorm.lab.errors import DataError

real = pytest.mark.skipif(
    not os.environ.get("WEIGHTNORM_DATA"), reason="WEIGHTNORM_DATA names no folder of real data"
)
CLOSED = "http://127.0.0.1:1/"
A, B = b"a's bytes" * 50, b"0 1 1 0\n" * 30


def sha256(content):
    return hashlib.sha256(content).hexdigest()


TOY = DataSet("toy-files", (CLOSED,), {"a.bin": sha256(A), "b.txt": sha256(B)})


@pytest.fixture
def publish(monkeypatch):
    """Put a data set called "toy" into the catalogue; no proxy stands between it and us."""
    monkeypatch.setenv("NO_PROXY", "*")
    return partial(monkeypatch.setitem, DATA_SETS, "toy")


@pytest.fixture
def root(tmp_path, publish):
    """A data folder that holds the toy data set, complete."""
    publish(TOY)
    folder = tmp_path / "data" / "toy-files"
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(A)
    (folder / "b.txt").write_bytes(B)
    return tmp_path / "data"


@pytest.fixture
def no_network(monkeypatch):
    def retrieve(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(pooch, "retrieve", retrieve)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args): ...


@pytest.fixture
def server(tmp_path):
    """A web server on this machine: its address, and the folder it serves."""
    site = tmp_path / "site"
    site.mkdir()
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/", site
    http.shutdown()
    http.server_close()
    thread.join()


# — files that are there —


def test_data_folder_precedence(monkeypatch, tmp_path):
    monkeypatch.setenv("WEIGHTNORM_DATA", str(tmp_path / "variable"))
    assert data_dir(tmp_path / "given") == tmp_path / "given"
    assert data_dir() == tmp_path / "variable"
    monkeypatch.setenv("WEIGHTNORM_DATA", "")
    assert data_dir() == Path(pooch.os_cache("weightnorm"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_dir(Path("~/data")) == tmp_path / "data"
    assert data_dir(Path("here")).is_absolute()


@pytest.mark.usefixtures("no_network")
def test_complete_data_needs_no_network_and_may_be_gzipped(root):
    assert fetch("toy", root) == {"a.bin": A, "b.txt": B}
    plain = root / "toy-files/b.txt"
    plain.unlink()
    plain.with_name("b.txt.gz").write_bytes(gzip.compress(B))
    assert fetch("toy", root) == {"a.bin": A, "b.txt": B}


@given(position=st.integers(0, len(A) - 1), flip=st.integers(0, 255), packed=st.booleans())
def test_every_changed_or_missing_byte_is_refused(tmp_path_factory, position, flip, packed):
    changed = bytearray(A)
    changed[position] ^= flip
    damaged = bytes(changed) if flip else A[:position]
    path = tmp_path_factory.mktemp("data") / "a.bin"
    (path.with_name("a.bin.gz") if packed else path).write_bytes(
        gzip.compress(damaged) if packed else damaged
    )
    with pytest.raises(DataError, match=f"got SHA-256 {sha256(damaged)}; expected {sha256(A)}"):
        read_published(path, sha256(A))


@pytest.mark.usefixtures("no_network")
def test_damaged_file_is_reported_and_kept(root):
    """Even if another file is missing: nothing is downloaded."""
    path = root / "toy-files/b.txt.gz"
    path.with_suffix("").unlink()
    path.write_bytes(gzip.compress(B)[:-9])
    (root / "toy-files/a.bin").unlink()
    with pytest.raises(DataError, match=r"b\.txt\.gz is not the published file.*WEIGHTNORM_DATA"):
        fetch("toy", root)
    assert path.read_bytes() == gzip.compress(B)[:-9]


class Trap:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def test_files_with_other_checksums_are_not_parsed(tmp_path):
    """A folder that a user names may hold anything: no pickle in it is executed."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in DATA_SETS["cifar10"].files:
        (folder / name).write_bytes(pickle.dumps({b"data": Trap(tmp_path / "trace")}))
    with pytest.raises(DataError, match="data_batch_1 is not the published file"):
        load_cifar10(tmp_path)
    assert not (tmp_path / "trace").exists()


# — downloads, from a real server —


def test_message_names_what_is_missing(tmp_path, publish):
    publish(TOY)
    with pytest.raises(DataError) as caught:
        fetch("toy", tmp_path)
    message = str(caught.value)
    assert f"Missing from {tmp_path / 'toy-files'}:" in message
    assert all(f"{name}  SHA-256 {digest}" in message for name, digest in TOY.files.items())
    assert CLOSED in message
    assert "WEIGHTNORM_DATA" in message
    assert not [*tmp_path.rglob("*.bin"), *tmp_path.rglob(".download*")]


def test_missing_files_come_from_the_first_good_mirror(root, server, publish):
    address, site = server
    for mirror, content in (("empty", None), ("wrong", B[::-1]), ("right", B)):
        (site / mirror).mkdir()
        if content:
            (site / mirror / "b.txt").write_bytes(content)
    publish(replace(TOY, mirrors=tuple(f"{address}{m}/" for m in ("empty", "wrong", "right"))))
    (root / "toy-files/b.txt").unlink()
    before = (root / "toy-files/a.bin").stat()
    assert fetch("toy", root)["b.txt"] == B
    assert (root / "toy-files/b.txt").stat().st_mode & 0o777 == 0o644
    assert (root / "toy-files/a.bin").stat().st_mtime_ns == before.st_mtime_ns
    assert sorted(p.name for p in (root / "toy-files").iterdir()) == ["a.bin", "b.txt"]
    publish(replace(TOY, mirrors=(f"{address}wrong/",)))
    (root / "toy-files/b.txt").unlink()
    with pytest.raises(DataError, match="does not match"):
        fetch("toy", root)
    assert [p.name for p in (root / "toy-files").iterdir()] == ["a.bin"]


def test_only_named_members_of_an_archive_are_extracted(tmp_path, server, publish):
    address, site = server
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        names = {"toy-files/b.txt": B, "toy-files/a.bin": A, "../../escaped": b"!", "a.bin": b"!"}
        for name, content in names.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    (site / "toy.tar.gz").write_bytes(stream.getvalue())
    archive = "toy.tar.gz", hashlib.md5(stream.getvalue()).hexdigest()
    publish(replace(TOY, mirrors=(address,), archive=archive))
    assert fetch("toy", tmp_path / "data") == {"a.bin": A, "b.txt": B}
    assert sorted(p.name for p in (tmp_path / "data/toy-files").iterdir()) == ["a.bin", "b.txt"]
    assert not (tmp_path / "escaped").exists()


# — readers —


def publish_as(monkeypatch, root, name, contents):
    """Write files of our own, as the published ones of a data set."""
    data = replace(DATA_SETS[name], files={k: sha256(v) for k, v in contents.items()})
    monkeypatch.setitem(DATA_SETS, name, data)
    folder = root / data.folder
    folder.mkdir(parents=True)
    for file, content in contents.items():
        (folder / file).write_bytes(content)


def synthetic_cifar10(monkeypatch, root, per_batch=4):
    """Publish batches of random images; return their pixels, the test batch last."""
    names = [name for name in DATA_SETS["cifar10"].files if name != "batches.meta"]
    pixels = np.random.RandomState(0).randint(256, size=(6, per_batch, 3072)).astype(np.uint8)
    batches = {
        name: {b"data": pixels[i], b"labels": [i, *range(per_batch - 1)]}
        for i, name in enumerate(names)
    }
    batches["batches.meta"] = {b"label_names": [b"cat", b"dog"]}
    contents = {name: pickle.dumps(batch, 3) for name, batch in batches.items()}
    publish_as(monkeypatch, root, "cifar10", contents)
    return pixels


def test_cifar10(tmp_path, monkeypatch):
    pixels = synthetic_cifar10(monkeypatch, tmp_path)
    data = load_cifar10(tmp_path)
    assert data.train.shape == (20, 3, 32, 32)
    assert data.test.shape == (4, 3, 32, 32)
    assert data.train.dtype == data.test.dtype == torch.uint8
    np.testing.assert_array_equal(data.train.flatten(1), pixels[:5].reshape(20, 3072))
    np.testing.assert_array_equal(data.test.flatten(1), pixels[5])
    assert data.train[2, 1, 5, 7] == pixels[0, 2, 1024 + 5 * 32 + 7]
    assert data.train_labels.tolist() == [x for i in range(5) for x in (i, 0, 1, 2)]
    assert data.test_labels.tolist() == [5, 0, 1, 2]
    assert data.label_names == ("cat", "dog")


def test_limit_applies_after_fitting(tmp_path, monkeypatch):
    synthetic_cifar10(monkeypatch, tmp_path)
    plain = load_cifar10(tmp_path)
    fitted = Zca(torch.full((3072,), 0.25), 2 * torch.eye(3072))

    def fit(images):
        assert torch.equal(images, plain.train)
        return fitted

    monkeypatch.setattr(module, "fit_zca_once", fit)
    white = load_whitened_cifar10(tmp_path, 7)
    for got, pixels, n in ((white.train, plain.train, 7), (white.test, plain.test, None)):
        torch.testing.assert_close(got, 2 * ((pixels[:n].float() - 127.5) / 128 - 0.25))
    assert torch.equal(white.train_labels, plain.train_labels[:7])


def test_mnist_and_its_binarization(tmp_path, monkeypatch):
    random = np.random.RandomState(0)
    arrays, contents = [], {}
    for name, shape in zip(
        DATA_SETS["mnist"].files, [(5, 28, 28), (5,), (2, 28, 28), (2,)], strict=True
    ):
        arrays.append(random.randint(256, size=shape).astype(np.uint8))
        head = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
        contents[name] = gzip.compress(head + arrays[-1].tobytes())
    publish_as(monkeypatch, tmp_path, "mnist", contents)
    data = load_mnist(tmp_path)
    got = data.train, data.train_labels, data.test, data.test_labels
    for tensor, array in zip(got, arrays, strict=True):
        np.testing.assert_array_equal(tensor, array)
    assert data.train.dtype == torch.uint8
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64

    bits = [random.randint(2, size=(n, 784)) for n in (3, 1, 2)]
    lines = [b"".join(b" ".join(b"%d" % x for x in row) + b"\n" for row in rows) for rows in bits]
    names = DATA_SETS["binarized-mnist"].files
    publish_as(monkeypatch, tmp_path, "binarized-mnist", dict(zip(names, lines, strict=True)))
    fixed = load_binarized_mnist(tmp_path)
    for tensor, rows in zip((fixed.train, fixed.valid, fixed.test), bits, strict=True):
        assert tensor.dtype == torch.uint8
        np.testing.assert_array_equal(tensor.flatten(1), rows)


def test_binarize_frequencies():
    images = torch.arange(256, dtype=torch.uint8).expand(4000, 256)
    drawn = binarize(images, torch.Generator().manual_seed(0))
    assert drawn.dtype == torch.float32
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    p = images[0] / 255
    sigma = (p * (1 - p) / 4000).sqrt()
    assert ((drawn.mean(0) - p).abs() <= 4.5 * sigma + 1e-9).all()
    assert torch.equal(drawn, binarize(images, torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match=r"uint8 from 0 to 255; got torch\.float32"):
        binarize(torch.rand(3, 28, 28))


def test_digits(monkeypatch):
    """All of scikit-learn's, without a network, rounded once, always in the same split."""

    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket, "socket", refuse)
    data, raw = load_digits(), datasets.load_digits()
    assert data.train.shape == (1437, 1, 8, 8)
    assert data.test.shape == (360, 1, 8, 8)
    labels = torch.cat([data.train_labels, data.test_labels])
    order = np.random.RandomState(0).permutation(len(raw.target))
    floats = torch.from_numpy(raw.images[order]).float() / 16
    expected = (floats * 255).round().to(torch.uint8)
    assert torch.equal(torch.cat([data.train, data.test]).squeeze(1), expected)
    assert labels.tolist() == raw.target[order].tolist()


# — the real files —


@real
@pytest.mark.usefixtures("no_network")
def test_real_cifar10():
    data = load_cifar10()
    assert data.train.shape == (50_000, 3, 32, 32)
    assert data.test.shape == (10_000, 3, 32, 32)
    assert data.train_labels.bincount().tolist() == [5000] * 10
    assert data.test_labels.bincount().tolist() == [1000] * 10
    assert (data.label_names[0], data.label_names[9]) == ("airplane", "truck")
    means = data.train.float().mean((0, 2, 3)) / 255  # those everybody normalizes by
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-4, rtol=0)


@real
@pytest.mark.usefixtures("no_network")
def test_real_mnist():
    gray, fixed = load_mnist(), load_binarized_mnist()
    assert gray.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert gray.test_labels.bincount()[[0, 9]].tolist() == [980, 1009]
    pixels = gray.train.float() / 255
    assert pixels.mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert pixels.std().item() == pytest.approx(0.3081, abs=1e-4)
    assert [len(split) for split in (fixed.train, fixed.valid, fixed.test)] == [50000, 10000, 10000]
    # They come in another order than MNIST's, training images dealt out anew to train and valid.
    pool = torch.cat([fixed.train, fixed.valid]).float().mean(0)
    assert (pool - pixels.mean(0)).abs().max() < 0.01
    drawn, test = fixed.test[:20].flatten(1).float(), gray.test.flatten(1)
    black, white = (test == 0).float(), (test == 255).float()
    impossible = drawn @ black.T + (1 - drawn) @ white.T  # (20, 10000) pixels, drawn against gray
    assert impossible.min(1).values.tolist() == [0] * 20


# — whitening —


def random_images(seed, *shape, levels=256):
    """Correlated pixels: a random walk along the last axis, wrapped into the range."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-20, 21, shape, generator=generator).cumsum(-1)
    return ((steps + 128) % levels).to(torch.uint8)


def whitening_in_float64(images):
    """Mean and matrix by the formula, slowly."""
    x = (images.numpy().reshape(len(images), -1).astype(np.float64) - 127.5) / 128
    mean = x.mean(0)
    u, s, _ = np.linalg.svd((x - mean).T @ (x - mean) / len(x))
    return mean, u @ np.diag(1 / np.sqrt(s + 1e-5)) @ u.T


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(2, 60),
    shape=st.sampled_from([(1,), (7,), (1, 4, 4), (3, 4, 4)]),
    levels=st.sampled_from([2, 256]),
)
def test_whitening_matches_numpy(seed, n, shape, levels):
    images, others = random_images(seed, 2, max(n, 5), *shape, levels=levels)
    images = images[:n]
    mean, matrix = whitening_in_float64(images)
    fitted = fit_zca(images)
    scale = np.abs(matrix).max()
    np.testing.assert_allclose(fitted.mean, mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(fitted.matrix, matrix, rtol=1e-5, atol=1e-6 * scale)
    white = apply_zca(fitted, others)
    assert white.shape == others.shape
    expected = ((others.numpy().reshape(len(others), -1) - 127.5) / 128 - mean) @ matrix
    np.testing.assert_allclose(white.flatten(1), expected, rtol=1e-4, atol=1e-4 * scale)


def test_products_are_exact():
    """Against integers, where the sums are largest: most pixels at an end of the range."""
    pixels = random_images(5, 3 * module._EXACT_ROWS + 1, 99)
    pixels[:, 5:] = 1
    integers = pixels.double() - 128  # far below 2⁵³
    n, mean = len(pixels), integers.sum(0) / len(pixels)
    expected = (integers.T @ integers / n - mean.outer(mean)) / 128**2
    assert torch.equal(module._moments(pixels)[1], expected)


def test_whitening_refuses_what_is_no_pixels():
    for images in (torch.rand(5, 3), torch.zeros(5, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"takes pixels, uint8 of shape \(N, …\); got torch"):
            fit_zca(images)


# — the cache of whitening —

IMAGES = random_images(4, 100, 1, 5, 5)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WEIGHTNORM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fits(monkeypatch):
    """Grows by one whenever a map is fitted."""
    counted, fit = [], fit_zca
    monkeypatch.setattr(
        module, "fit_zca", lambda images: counted.append(len(images)) or fit(images)
    )
    return counted


def equal(a, b):
    return torch.equal(a.mean, b.mean) and torch.equal(a.matrix, b.matrix)


def test_every_map_is_fitted_once(cache, fits):
    changed = IMAGES.clone()
    changed[99, 0, 4, 4] ^= 1
    different = [IMAGES, changed, IMAGES[:99], IMAGES.view(50, 50)]
    first, second = ([fit_zca_once(images.clone()) for images in different] for _ in range(2))
    assert fits == [100, 100, 99, 50]
    assert all(map(equal, first, second))
    assert not equal(first[0], first[1])
    assert [path.suffix for path in cache.iterdir()] == [".pt"] * 4


def flipped(content):
    at = content.find(fit_zca(IMAGES).matrix.numpy().tobytes())
    assert at > 0
    return content[: at + 999] + bytes([content[at + 999] ^ 1]) + content[at + 1000 :]


def malicious(content):
    stream = io.BytesIO()
    torch.save(Trap("trace"), stream)
    return stream.getvalue()


@pytest.mark.parametrize("damage", [lambda content: content[:-100], flipped, malicious])
def test_damaged_cache_is_replaced(cache, fits, damage, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    first = fit_zca_once(IMAGES)
    (path,) = cache.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    fits.clear()
    assert equal(fit_zca_once(IMAGES), first)
    assert equal(fit_zca_once(IMAGES), first)
    assert fits == [100]
    assert not (tmp_path / "trace").exists()


def test_cache_that_cannot_be_written_is_a_warning(cache):
    cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match=r"cannot be cached in .*WEIGHTNORM_CACHE"):
        fitted = fit_zca_once(IMAGES)
    assert equal(fitted, fit_zca(IMAGES))
