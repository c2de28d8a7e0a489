"""The embedded digits: pixels and split."""

from __future__ import annotations

import hashlib
import socket

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from weightnorm.lab.data import digits


def test_shapes_range_and_types() -> None:
    data = digits.load()
    assert data.train.shape == (1437, 1, 8, 8)
    assert data.test.shape == (360, 1, 8, 8)
    assert data.train.dtype == data.test.dtype == torch.uint8
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64
    assert data.train.min() == 0
    assert data.train.max() == 255
    assert data.label_names == tuple("0123456789")


def test_split_is_a_partition_and_labels_match() -> None:
    data, raw = digits.load(), load_digits()
    images = (torch.cat([data.train, data.test]).flatten(1).numpy() / (255 / 16)).round()
    labels = torch.cat([data.train_labels, data.test_labels]).numpy()
    got = sorted((*image.astype(int), label) for image, label in zip(images, labels, strict=True))
    wanted = sorted(
        (*image.astype(int), label) for image, label in zip(raw.data, raw.target, strict=True)
    )
    assert got == wanted


def test_pixels_are_rounded_once() -> None:
    """As they were when the experiments converted floats: round(255 · p/16), half to even."""
    data, raw = digits.load(), load_digits()
    order = np.random.RandomState(0).permutation(len(raw.target))
    floats = torch.from_numpy(raw.images[order]).float() / 16
    expected = (floats * 255).round().to(torch.uint8)
    assert torch.equal(torch.cat([data.train, data.test]).squeeze(1), expected)
    assert torch.equal(expected > 128, floats > 0.5)


def test_split_never_changes() -> None:
    labels = torch.cat([digits.load().train_labels, digits.load().test_labels])
    found = hashlib.md5(bytes(labels.tolist())).hexdigest()
    assert found == "3fc353eeffa8caaae33ddb5e2bbd5f68"


def test_both_parts_have_every_class() -> None:
    data = digits.load()
    assert data.train_labels.bincount().min() > 130
    assert data.test_labels.bincount().min() > 25


def test_no_network_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket, "socket", refuse)
    assert len(digits.load().train) == 1437
