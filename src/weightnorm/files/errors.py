"""Errors that name a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

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
def naming(path: Path, verb: Literal["read", "written"] = "read") -> Iterator[None]:
    """Turn every error into a FileError that names the file.

    Files may hold anything, and neither torch nor safetensors limit what they raise for it.
    """
    try:
        yield
    except FileError:
        raise
    except StateDictError as error:
        raise file_error(path, error) from error
    except OSError as error:
        raise file_error(path, f"cannot be {verb}: {reason(error)}") from error
    except Exception as error:
        damaged = "is damaged or " * (verb == "read")
        raise file_error(path, f"{damaged}cannot be {verb}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    text = getattr(error, "strerror", None) or str(error)
    return next(iter(text.splitlines()), "") or type(error).__name__


def refuse_existing(path: Path) -> None:
    """Raise a FileError if there is something at a path, the input or a link to it perhaps."""
    if os.path.lexists(path):
        raise file_error(path, "exists; delete it, or choose another folder or name")
