"""Data sets as tensors: found or downloaded, checked, then parsed.

The published files are known by their SHA-256 digests. A file with another digest is refused: it is
neither parsed nor replaced. Whitening is that of the authors' code:
x ← U·diag(1/√(S + ε))·Uᵀ (x − μ), with x = (pixel − 127.5)/128 and U·S·Uᵀ the covariance.

Note [exact covariance]
    pixel − 128 is a signed integer of 7 bits, so a product has at most 14 bits and a sum of 1024
    products at most 24, which float32 represents exactly in any order of summation. Blocks of 1024
    images are multiplied in float32, which is fast, and summed in float64, so nothing is rounded.
    CIFAR-10's smallest eigenvalues are below ε and its largest above 200: a float32 `eigh` loses
    the small ones, so it is computed in float64.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import sys
import tarfile
import warnings
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pooch  # type: ignore[import-untyped]
import torch
from torch import Tensor

from weightnorm.files.atomic import write_atomically
from weightnorm.lab.errors import DataError
from weightnorm.lab.files import load_state, save_state

ZCA_EPS = 1e-5
"""The authors' code."""
_EXACT_ROWS = 1024
DIGITS_TRAIN = 1437
"""Four fifths of scikit-learn's digits; the other 360 are the test set."""


# — published files —


@dataclass(frozen=True)
class DataSet:
    """The files of one data set."""

    folder: str
    """Subfolder of the data folder."""
    mirrors: tuple[str, ...]
    """Addresses to which a file's name is appended, tried in this order."""
    files: dict[str, str]
    """Name → SHA-256 digest of the content. A file may be gzipped, as name.gz."""
    archive: tuple[str, str] | None = None
    """Name and MD5 digest of a single download that contains all files, as `folder`/name."""


def sha256sums(lines: str) -> dict[str, str]:
    """Parse the output of ``sha256sum``: name → digest."""
    return {name: digest for digest, name in map(str.split, lines.strip().splitlines())}


DATA_SETS = {
    "cifar10": DataSet(
        folder="cifar-10-batches-py",
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        archive=("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
        files=sha256sums("""
        54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd  data_batch_1
        766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8  data_batch_2
        0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9  data_batch_3
        3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b  data_batch_4
        d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154  data_batch_5
        f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831  test_batch
        f962466ef690d46b226450fb9aadc74ba4bc64a76aa526b5827fe4bc5c7125cb  batches.meta
        """),
    ),
    "mnist": DataSet(
        folder="mnist",
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        files=sha256sums("""
        440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609  train-images-idx3-ubyte.gz
        3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c  train-labels-idx1-ubyte.gz
        8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6  t10k-images-idx3-ubyte.gz
        f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6  t10k-labels-idx1-ubyte.gz
        """),
    ),
    "binarized-mnist": DataSet(
        folder="binarized-mnist",
        mirrors=("https://www.cs.toronto.edu/~larocheh/public/datasets/binarized_mnist/",),
        files=sha256sums("""
        ad693b29f94c14277b095f5238ddefbbdaaae0939789dd2f4f0205278cee3e4d  binarized_mnist_train.amat
        1de3d397c40fe8eeb33dafd4099a1f665ec01e96d9be234aaeeac8a34930e2e2  binarized_mnist_valid.amat
        e6687bfea3f820c174f33b7865140b2a2dd2930ef786f35d45795fc193b5ab2c  binarized_mnist_test.amat
        """),
    ),
}


def data_dir(explicit: Path | None = None) -> Path:
    """Return `explicit`, else ``$WEIGHTNORM_DATA``, else the user's cache folder."""
    chosen = explicit or os.environ.get("WEIGHTNORM_DATA") or pooch.os_cache("weightnorm")
    return Path(chosen).expanduser().absolute()


def read_published(path: Path, expected: str) -> bytes | None:
    """Return the content of a file, None if it is missing. Raises DataError if it is another."""
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and not packed.exists():
        return None
    path, unpack = (path, bytes) if path.exists() else (packed, gzip.decompress)
    try:
        content = unpack(path.read_bytes())
        digest = hashlib.sha256(content).hexdigest()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        digest = f"none, {error or type(error).__name__}"
    except OSError as error:
        reason = f"{error.strerror}; check its permissions and the disk"
        raise DataError(f"cannot read {path}: {reason}") from error
    if digest != expected:
        raise DataError(
            f"{path} is not the published file: got SHA-256 {digest}; expected {expected}. Delete "
            "it, and it is downloaded when next needed; or replace it, or let $WEIGHTNORM_DATA (or "
            "--data-dir) name another folder"
        )
    return content


def fetch(name: str, root: Path | None = None) -> dict[str, bytes]:
    """Return the content of each file of a data set by name, after downloading missing ones."""
    data = DATA_SETS[name]
    folder = data_dir(root) / data.folder
    contents, missing = {}, []
    for file, digest in data.files.items():
        if (content := read_published(folder / file, digest)) is None:
            missing.append(file)
        else:
            contents[file] = content
    if not missing:
        return contents
    try:
        _download(data, folder, missing)
    except OSError as error:
        source = f" inside {data.archive[0]}" if data.archive else ""
        lines = [f"  {file}  SHA-256 {data.files[file]}" for file in missing]
        raise DataError(
            "\n".join(
                [
                    f"{name} is not complete, and {error}.",
                    f"Missing from {folder}:",
                    *lines,
                    f"They are{source} at {' or '.join(data.mirrors)}",
                    "Put them into that folder, or let $WEIGHTNORM_DATA (or --data-dir) name a "
                    f"folder that has them in {data.folder}.",
                ]
            )
        ) from error
    return fetch(name, root)


def _download(data: DataSet, folder: Path, missing: list[str]) -> None:
    """Download the missing files, each whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(dir=folder, prefix=".download-")
    except OSError as error:
        raise OSError(f"cannot write to {folder} ({error})") from error
    with scratch as temporary:
        if data.archive:
            name, md5 = data.archive
            with tarfile.open(_retrieve(data.mirrors, name, f"md5:{md5}", temporary)) as tar:
                for file in missing:
                    member = tar.extractfile(f"{data.folder}/{file}")
                    assert member is not None
                    write_atomically(folder / file, member.read())
        else:
            for file in missing:
                path = _retrieve(data.mirrors, file, f"sha256:{data.files[file]}", temporary)
                write_atomically(folder / file, path.read_bytes())


def _retrieve(mirrors: tuple[str, ...], name: str, digest: str, folder: str) -> Path:
    """Download a file from the first mirror that has it with the right digest."""
    failures = []
    for mirror in mirrors:
        downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty())
        try:
            return Path(pooch.retrieve(mirror + name, digest, name, folder, downloader=downloader))
        except (OSError, ValueError) as error:  # no connection, no such page; a wrong digest
            failures.append(f"{mirror}{name}: {error}")
    raise OSError("\n  ".join(["the download failed", *failures]))


# — images —


@dataclass(frozen=True, eq=False)
class Labelled:
    """Images and labels, one row per example; labels are int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    label_names: tuple[str, ...]


def load_cifar10(root: Path | None = None) -> Labelled:
    """Load the published pixels: uint8, (50000, 3, 32, 32) and (10000, 3, 32, 32)."""
    contents = fetch("cifar10", root)
    # A pickle is a program; these are the published ones.
    batches = {k: pickle.loads(content, encoding="bytes") for k, content in contents.items()}
    names = tuple(name.decode() for name in batches.pop("batches.meta")[b"label_names"])
    test = batches.pop("test_batch")
    pixels = [
        torch.from_numpy(np.concatenate([batch[b"data"] for batch in part])).view(-1, 3, 32, 32)
        for part in (batches.values(), [test])
    ]
    labels = [label for batch in batches.values() for label in batch[b"labels"]]
    return Labelled(
        pixels[0], torch.tensor(labels), pixels[1], torch.tensor(test[b"labels"]), names
    )


def load_whitened_cifar10(root: Path | None = None, limit: int | None = None) -> Labelled:
    """Load ZCA-whitened images: float32; of the training images only the first `limit`. The map is
    fitted on all training images."""
    data = load_cifar10(root)
    whitening = fit_zca_once(data.train)
    return replace(
        data,
        train=apply_zca(whitening, data.train[:limit]),
        train_labels=data.train_labels[:limit],
        test=apply_zca(whitening, data.test),
    )


def load_mnist(root: Path | None = None) -> Labelled:
    """Load the published pixels: uint8, (60000, 28, 28) and (10000, 28, 28)."""
    raw = {k: gzip.decompress(content) for k, content in fetch("mnist", root).items()}

    def images(split: str) -> Tensor:
        content = bytearray(raw[f"{split}-images-idx3-ubyte.gz"])
        return torch.frombuffer(content, dtype=torch.uint8, offset=16).view(-1, 28, 28)

    def labels(split: str) -> Tensor:
        content = bytearray(raw[f"{split}-labels-idx1-ubyte.gz"])
        return torch.frombuffer(content, dtype=torch.uint8, offset=8).long()

    names = tuple("0123456789")
    return Labelled(images("train"), labels("train"), images("t10k"), labels("t10k"), names)


@dataclass(frozen=True, eq=False)
class Binarized:
    """Binary images: uint8, (50000, 28, 28), (10000, 28, 28), (10000, 28, 28)."""

    train: Tensor
    valid: Tensor
    test: Tensor


def load_binarized_mnist(root: Path | None = None) -> Binarized:
    """Load the fixed binarization, the benchmark of density estimation.

    A file has a line per image, of 784 zeros and ones separated by spaces.
    """
    contents = fetch("binarized-mnist", root)

    def read(split: str) -> Tensor:
        content = bytearray(contents[f"binarized_mnist_{split}.amat"])
        text = torch.frombuffer(content, dtype=torch.uint8)
        return (text[::2] - ord("0")).view(-1, 28, 28)

    return Binarized(read("train"), read("valid"), read("test"))


def binarize(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Sample x ~ Bernoulli(pixel/255): uint8 in, float32 zeros and ones out."""
    if images.dtype != torch.uint8:
        raise ValueError(f"binarize takes pixels, uint8 from 0 to 255; got {images.dtype}")
    return torch.bernoulli(images.float() / 255, generator=generator)


def load_digits() -> Labelled:
    """Load scikit-learn's handwritten digits, which are included in the package.

    Scaled from 0…16 to 0…255: uint8, (1437, 1, 8, 8) and (360, 1, 8, 8), always in the same split.
    """
    from sklearn import datasets  # type: ignore[import-untyped]

    raw = datasets.load_digits()
    # Neighbours in the file are by the same writer: shuffle. RandomState's stream never changes.
    order = np.random.RandomState(0).permutation(len(raw.target))
    pixels = (raw.images[order] * (255 / 16)).round().astype(np.uint8)
    images = torch.from_numpy(pixels).unsqueeze(1).split([DIGITS_TRAIN, 360])  # (N, 1, 8, 8)
    labels = torch.from_numpy(raw.target[order]).long().split([DIGITS_TRAIN, 360])
    return Labelled(images[0], labels[0], images[1], labels[1], tuple("0123456789"))


# — ZCA whitening, fitted once and cached on disk —


@dataclass(frozen=True, eq=False)
class Zca:
    """The map x ↦ (x − mean)·matrix on flattened images; float32."""

    mean: Tensor
    matrix: Tensor


def fit_zca(images: Tensor) -> Zca:
    """Fit the ZCA map of images, (N, …) of uint8.

    >>> generator = torch.Generator().manual_seed(0)
    >>> images = torch.randint(256, (1000, 2), generator=generator, dtype=torch.uint8)
    >>> covariance = torch.cov(apply_zca(fit_zca(images), images).T, correction=0)
    >>> torch.allclose(covariance, torch.eye(2), atol=1e-3)
    True
    """
    mean, covariance = _moments(_flat(images))
    s, u = torch.linalg.eigh(covariance, UPLO="U")
    matrix = (u * (s.clamp_min(0) + ZCA_EPS).rsqrt()) @ u.T
    return Zca(mean.float(), matrix.float())


def apply_zca(zca: Zca, images: Tensor) -> Tensor:
    """Whiten images: uint8 in, float32 of the same shape out."""
    pixels = _flat(images)
    white = torch.empty(pixels.shape, dtype=torch.float32)
    for rows, out in zip(pixels.split(4096), white.split(4096), strict=True):
        torch.mm((rows.float() - 127.5) / 128 - zca.mean, zca.matrix, out=out)
    return white.view(images.shape)


def fit_zca_once(images: Tensor) -> Zca:
    """Fit the ZCA map, or load it from the cache if these images were fitted before.

    The cache is ``$WEIGHTNORM_CACHE`` or the user's cache folder. A damaged file is replaced; a
    folder that cannot be written is a warning.
    """
    folder = Path(os.environ.get("WEIGHTNORM_CACHE") or pooch.os_cache("weightnorm")).expanduser()
    key = hashlib.sha256(f"{ZCA_EPS} {tuple(images.shape)}".encode())
    key.update(images.contiguous().numpy().data)
    path = folder / f"whitening-{key.hexdigest()[:32]}.pt"
    try:
        return Zca(**load_state(path))
    except Exception:  # missing or damaged: it is fitted, again perhaps
        zca = fit_zca(images)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_state(path, vars(zca))
    except OSError as error:
        warnings.warn(
            f"the ZCA map is fitted but cannot be cached in {folder} ({error}); it will be "
            "fitted again next time, unless $WEIGHTNORM_CACHE names a writable folder",
            stacklevel=2,
        )
    return zca


def _moments(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and covariance of (pixel − 127.5)/128; see Note [exact covariance]."""
    n, d = pixels.shape
    total, products = torch.zeros(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    for rows in pixels.split(_EXACT_ROWS):
        x = rows.float() - 128
        total += x.sum(0)
        products += x.T @ x
    mean = total / n
    return (mean + 0.5) / 128, (products / n - mean.outer(mean)) / 128**2


def _flat(images: Tensor) -> Tensor:
    if images.dtype != torch.uint8 or images.ndim < 2:
        raise ValueError(
            f"ZCA takes pixels, uint8 of shape (N, …); got {images.dtype} of shape "
            f"{tuple(images.shape)}"
        )
    return images.flatten(1)
