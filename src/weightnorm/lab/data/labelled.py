"""What every labelled data set is once loaded."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Labelled:
    """Images and their classes: one row an example, labels as int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    label_names: tuple[str, ...]
