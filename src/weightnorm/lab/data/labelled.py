"""The type of a labelled data set."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Labelled:
    """Images and labels, one row per example; labels are int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    label_names: tuple[str, ...]
