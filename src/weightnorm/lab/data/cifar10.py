"""CIFAR-10: 50,000 training and 10,000 test images of 32×32 in ten classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weightnorm.lab.data import safe_pickle, zca
from weightnorm.lab.data.fetch import fetch
from weightnorm.lab.data.labelled import Labelled
from weightnorm.lab.errors import DataError


def load(data_dir: Path | None = None) -> Labelled:
    """Load the published pixels: uint8, (50000, 3, 32, 32) and (10000, 3, 32, 32)."""
    paths = fetch("cifar10", data_dir)
    train, train_labels = _batches([p for name, p in paths.items() if name.startswith("data_")])
    test, test_labels = _batches([paths["test_batch"]])
    return Labelled(train, train_labels, test, test_labels, _label_names(paths["batches.meta"]))


def load_whitened(
    data_dir: Path | None = None, *, limit: int | None = None, test_limit: int | None = None
) -> Labelled:
    """Load ZCA-whitened images: float32. The map is fitted on all training images.

    Args:
        data_dir: see `fetch.data_dir`.
        limit: number of training images to return; all if None.
        test_limit: number of test images to return; all if None.
    """
    for name, value in (("limit", limit), ("test_limit", test_limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: give a number from 1 up, or None for all images")
    data = load(data_dir)
    whitening = zca.fit_once(data.train)
    return replace(
        data,
        train=zca.apply(whitening, data.train[:limit]),
        train_labels=data.train_labels[:limit],
        test=zca.apply(whitening, data.test[:test_limit]),
        test_labels=data.test_labels[:test_limit],
    )


def _batches(paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
    """Read and concatenate the images and labels of batch files."""
    images, labels = [], []
    for path in paths:
        batch = safe_pickle.read(path)
        data, classes = batch.get(b"data"), batch.get(b"labels")
        if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != 3 * 32 * 32:
            raise DataError(f"{path} is not a CIFAR-10 batch: its data is not (N, 3072)")
        if not isinstance(classes, list) or len(classes) != len(data):
            raise DataError(f"{path} is not a CIFAR-10 batch: it needs a label for each image")
        if not all(isinstance(label, int) and 0 <= label < 10 for label in classes):
            raise DataError(f"{path} is not a CIFAR-10 batch: its labels are not all 0 to 9")
        images.append(data)
        labels += classes
    return torch.from_numpy(np.concatenate(images)).view(-1, 3, 32, 32), torch.tensor(labels)


def _label_names(path: Path) -> tuple[str, ...]:
    names = safe_pickle.read(path).get(b"label_names")
    if not (isinstance(names, list) and all(isinstance(name, bytes) for name in names)):
        raise DataError(f"{path} is not the CIFAR-10 meta file: it has no label names")
    return tuple(name.decode() for name in names)
