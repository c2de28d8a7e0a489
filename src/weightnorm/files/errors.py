"""Errors that name a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weightnorm.checkpoints import StateDictError


class FileError(Exception):
    """A checkpoint file that cannot be read, converted or written, with the reason."""


def printable(text: str, keep: str = "") -> str:
    r"""Escape what is not printable, except the characters in `keep`.

    Names in a file are chosen by its author: unescaped, they could control the terminal.

    >>> print(printable("a\x1b[2J\nb"))
    a\x1b[2J\nb
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def file_error(path: Path, reason: object) -> FileError:
    """Return a FileError that names the file."""
    return FileError(printable(f"{path}: {reason}"))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn every error into a FileError that names the file."""
    try:
        yield
    except FileError:
        raise
    except StateDictError as error:
        raise file_error(path, error) from error
    except FileNotFoundError as error:
        raise file_error(path, "is missing") from error
    # Files may hold anything, and neither torch nor safetensors limit what they raise for it.
    except Exception as error:
        raise file_error(path, f"is damaged or cannot be read: {reason(error)}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the file's folder, and turn errors of writing into FileErrors."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (FileError, StateDictError):
        raise
    except Exception as error:
        raise file_error(path, f"cannot be written: {reason(error)}") from error


def refuse_existing(path: Path) -> None:
    """Raise a FileError if there is something at a path, the input or a link to it perhaps."""
    if os.path.lexists(path):
        raise file_error(path, "exists; delete it, or choose another folder or name")


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return next(iter((text or "").splitlines()), "") or type(error).__name__


def check_regular(path: Path) -> None:
    """Raise a FileError unless this is a regular file: reading a pipe would wait forever."""
    with reading(path):
        path.stat()
    if not path.is_file():
        raise file_error(path, "is not a regular file; expected a checkpoint file")
