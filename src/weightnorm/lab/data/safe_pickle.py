"""Unpickle arrays, lists, numbers and bytes, and nothing else.

Note [stand-ins for numpy]
    A pickle is a program that calls functions by name. Even numpy's own functions are not safe:
    ``numpy.ndarray`` accepts any bytes as an array of objects, which are then used as pointers. So
    each allowed name is replaced by a class below, which builds the array from plain bytes.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from weightnorm.lab.errors import DataError


def read(path: Path) -> dict[bytes, Any]:
    """Read a pickled dictionary whose arrays are uint8. Raises DataError for anything else."""
    try:
        with path.open("rb") as stream:
            content = _Unpickler(stream, encoding="bytes").load()
        if not isinstance(content, dict):
            raise TypeError(f"expected a dictionary, got {type(content).__name__}")
        return {k: v.value if isinstance(v, _Array) else v for k, v in content.items()}
    except Exception as error:  # A malformed pickle can raise any exception.
        raise DataError(f"{path} is refused: {error}; get the file from its authors") from error


class _Array:
    """Replaces numpy.ndarray; pickle passes the content to ``__setstate__``."""

    value: np.ndarray[Any, np.dtype[np.uint8]]

    def __init__(self, *like: object) -> None: ...

    def __setstate__(self, state: tuple[object, tuple[int, ...], object, bool, bytes]) -> None:
        _, shape, dtype, fortran_order, content = state
        if not isinstance(dtype, _Uint8) or fortran_order:
            raise TypeError("expected an array of uint8 in C order")
        self.value = np.frombuffer(content, np.uint8).reshape(shape)


class _Uint8:
    """Replaces numpy.dtype; only uint8 is allowed."""

    def __init__(self, name: bytes | str, *flags: object) -> None:
        if name not in (b"u1", "u1"):
            raise TypeError(f"expected an array of uint8, got dtype {name!r}")

    def __setstate__(self, state: object) -> None: ...


_ALLOWED = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Uint8,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        try:
            return _ALLOWED[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it refers to {module}.{name}; expected only arrays, lists and numbers"
            ) from None
