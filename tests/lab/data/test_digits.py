"""The embedded digits: always there, always split alike."""

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
    assert data.train.dtype == data.test.dtype == torch.float32
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64
    assert data.train.min() == 0
    assert data.train.max() == 1
    assert data.label_names == tuple("0123456789")


def test_the_two_parts_are_the_whole_and_each_image_keeps_its_label() -> None:
    data, raw = digits.load(), load_digits()
    images = torch.cat([data.train, data.test]).flatten(1).numpy() * 16
    labels = torch.cat([data.train_labels, data.test_labels]).numpy()
    got = sorted((*image.astype(int), label) for image, label in zip(images, labels, strict=True))
    wanted = sorted(
        (*image.astype(int), label) for image, label in zip(raw.data, raw.target, strict=True)
    )
    assert got == wanted
    np.testing.assert_array_equal(images, images.astype(int))


def test_the_split_is_the_same_forever() -> None:
    labels = torch.cat([digits.load().train_labels, digits.load().test_labels])
    found = hashlib.md5(bytes(labels.tolist())).hexdigest()
    assert found == "3fc353eeffa8caaae33ddb5e2bbd5f68"


def test_both_parts_hold_every_class() -> None:
    data = digits.load()
    assert data.train_labels.bincount().min() > 130
    assert data.test_labels.bincount().min() > 25


def test_no_network_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(socket, "socket", refuse)
    assert len(digits.load().train) == 1437
