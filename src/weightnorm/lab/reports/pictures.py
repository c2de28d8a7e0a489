"""Images from the arrays that a run saved."""

from __future__ import annotations

import zipfile

import numpy as np
from numpy.typing import NDArray

from weightnorm.lab.records import RunRecord

GAP = 1
"""Pixels between the images of a grid."""


def load_arrays(record: RunRecord, name: str) -> dict[str, NDArray[np.generic]]:
    """Load the arrays of ``name.npz`` in a run's folder; none if it is missing or damaged."""
    try:
        with (
            (record.folder / f"{name}.npz").open("rb") as file,
            np.load(file, allow_pickle=False) as arrays,
        ):
            return {key: arrays[key] for key in arrays.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile):
        return {}


def image_grid(images: NDArray[np.uint8], columns: int, background: int = 128) -> NDArray[np.uint8]:
    """Arrange images (n, height, width) or (n, height, width, 3) in rows, as one image.

    >>> image_grid(np.zeros((3, 2, 2), np.uint8), columns=2).shape
    (5, 5)
    """
    n, height, width, *color = images.shape
    rows = -(-n // columns)
    shape = (rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, *color)
    sheet = np.full(shape, background, np.uint8)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        y, x = row * (height + GAP), column * (width + GAP)
        sheet[y : y + height, x : x + width] = image
    return sheet
