"""scikit-learn's handwritten digits: 1,797 images of 8×8, embedded, so no network is needed."""

from __future__ import annotations

import numpy as np
import torch

from weightnorm.lab.data.labelled import Labelled

TRAIN = 1437
"""Four fifths; the other 360 are the test set."""


def load() -> Labelled:
    """float32 in [0, 1], (1437, 1, 8, 8) and (360, 1, 8, 8); the split is always the same."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    raw = load_digits()
    # Neighbours in the file are by the same writer: shuffle. RandomState's stream never changes.
    order = np.random.RandomState(0).permutation(len(raw.target))
    images = torch.from_numpy(raw.images[order]).float().unsqueeze(1) / 16  # (N, 1, 8, 8)
    labels = torch.from_numpy(raw.target[order]).long()
    return Labelled(
        images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:], tuple("0123456789")
    )
