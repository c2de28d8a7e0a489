"""A text corpus that is on every machine with torch: the Python source of the installed package.

The files are taken in sorted order of their paths. One in ten is held out for evaluation, chosen by
a hash of its path, so that a file stays on the same side in every version of torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weightnorm.lab.errors import DataError

HELD_OUT = 10
"""One file in this many is held out."""


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to evaluate on."""

    train: Tensor
    """(N,), uint8."""
    test: Tensor
    digest: str
    """SHA-256 of both parts."""
    version: str
    """Version of the torch package they were read from."""


def load(root: Path | None = None, version: str = torch.__version__) -> Corpus:
    """Read the Python source below `root`, by default that of the installed torch package."""
    root = Path(torch.__file__).parent if root is None else root
    files = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in files:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        parts[is_held_out(path.relative_to(root).as_posix())].append(text)
    train, test = (b"".join(parts[held_out]) for held_out in (False, True))
    if not train or not test:
        raise DataError(
            f"found {len(files)} Python files below {root}, expected those of a torch package; "
            "install torch from a wheel that contains its source"
        )
    digest = hashlib.sha256(train + b"\0" + test).hexdigest()
    return Corpus(_tensor(train), _tensor(test), digest, version)


def is_held_out(path: str) -> bool:
    """Whether a file, given by its path relative to the package, is held out.

    >>> [is_held_out(path) for path in ("nn/functional.py", "_ops.py")]
    [False, False]
    """
    return hashlib.sha256(path.encode()).digest()[0] % HELD_OUT == 0


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def trigram_bits_per_byte(corpus: Corpus) -> float:
    """Bits per byte of the held-out part under a trigram model of the training part.

    p(c | ab) interpolates relative frequencies of trigrams, bigrams and bytes (Witten & Bell 1991):
    p(c | h) = (n(hc) + t(h)·p(c | h′)) / (n(h) + t(h)), with t(h) the number of different bytes
    seen after h and h′ the shorter context.
    """
    train, test = (x.long() for x in (corpus.train, corpus.test))
    p = torch.full((256,), 1 / 256, dtype=torch.float64)
    for order in range(3):
        counts = _counts(train, order)  # (256^order, 256)
        kinds = (counts > 0).sum(1, keepdim=True)
        total = counts.sum(1, keepdim=True) + kinds
        shorter = p.reshape(-1, 256).repeat(counts.shape[0] // p.reshape(-1, 256).shape[0], 1)
        seen = (counts + kinds * shorter) / total.clamp_min(1)
        p = torch.where(total > 0, seen, shorter)
    index = test[:-2] * 65_536 + test[1:-1] * 256 + test[2:]
    return -p.flatten()[index].log2().mean().item()


def _counts(text: Tensor, order: int) -> Tensor:
    """How often each byte follows each context of `order` bytes: (256^order, 256)."""
    size = len(text) - order
    index = sum(text[i : i + size] * 256 ** (order - i) for i in range(order + 1))
    assert isinstance(index, Tensor)
    counts = torch.bincount(index, minlength=256 ** (order + 1)).double()
    return counts.view(256**order, 256)
