"""Reads a pickle of arrays, lists, numbers and bytes, and can build nothing else.

Note [stand-ins for numpy]
    A pickle is a program that names what to call. Not even numpy's own names are safe to call:
    ``numpy.ndarray`` takes any bytes for an array of objects, which are then followed as pointers.
    So each admitted name means a class below, and the array is made from plain bytes by us.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from weightnorm.lab.errors import DataError


def read(path: Path) -> dict[bytes, Any]:
    """The dictionary pickled at `path`; its arrays are of uint8. Anything else is a `DataError`."""
    try:
        with path.open("rb") as stream:
            content = _Unpickler(stream, encoding="bytes").load()
        if not isinstance(content, dict):
            raise TypeError(f"expected a dictionary, got {type(content).__name__}")
        return {k: v.value if isinstance(v, _Array) else v for k, v in content.items()}
    except Exception as error:  # A malformed pickle can raise whatever it likes.
        raise DataError(f"{path} is refused: {error}; get the file from its authors") from error


class _Array:
    """Stands for a numpy array of bytes; pickle hands over its content by ``__setstate__``."""

    value: np.ndarray[Any, np.dtype[np.uint8]]

    def __init__(self, *like: object) -> None: ...

    def __setstate__(self, state: tuple[object, tuple[int, ...], object, bool, bytes]) -> None:
        _, shape, dtype, fortran_order, content = state
        if not isinstance(dtype, _Uint8) or fortran_order:
            raise TypeError("expected an array of uint8 in C order")
        self.value = np.frombuffer(content, np.uint8).reshape(shape)


class _Uint8:
    """Stands for numpy's dtype of that name, the only one admitted."""

    def __init__(self, name: bytes | str, *flags: object) -> None:
        if name not in (b"u1", "u1"):
            raise TypeError(f"expected an array of uint8, got dtype {name!r}")

    def __setstate__(self, state: object) -> None: ...


_ADMITTED = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Uint8,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        try:
            return _ADMITTED[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, but holds data: arrays, lists, numbers"
            ) from None
