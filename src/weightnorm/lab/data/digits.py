"""scikit-learn's handwritten digits: 1,797 images of 8×8, included in the package."""

from __future__ import annotations

import numpy as np
import torch

from weightnorm.lab.data.labelled import Labelled

TRAIN = 1437
"""Four fifths; the other 360 are the test set."""


def load() -> Labelled:
    """Load the pixels, scaled from 0…16 to 0…255: uint8, (1437, 1, 8, 8) and (360, 1, 8, 8).

    The split is always the same.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    raw = load_digits()
    # Neighbours in the file are by the same writer: shuffle. RandomState's stream never changes.
    order = np.random.RandomState(0).permutation(len(raw.target))
    pixels = (raw.images[order] * (255 / 16)).round().astype(np.uint8)
    images = torch.from_numpy(pixels).unsqueeze(1)  # (N, 1, 8, 8)
    labels = torch.from_numpy(raw.target[order]).long()
    return Labelled(
        images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:], tuple("0123456789")
    )
