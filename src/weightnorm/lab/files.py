"""Locks of folders, leftovers of killed writers, and SHA-256 digests of files."""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path
from typing import IO

from weightnorm.files.atomic import SUFFIX
from weightnorm.lab.errors import RunError

CHUNK = 1 << 20
"""Bytes read at a time, so that a file of any size fits into memory."""


def lock_folder(folder: Path) -> IO[str]:
    """Create a folder and lock it for this process, until the returned file is closed.

    Raises RunError if another process has locked it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunError(f"another process is running in {folder}") from None
    return file


def remove_temporary(folder: Path) -> None:
    """Delete the temporary files that killed writers left in a folder.

    Call it only under a lock that keeps other writers out of the folder.
    """
    for path in folder.glob(f".*{SUFFIX}"):
        path.unlink(missing_ok=True)


def digest(content: bytes | bytearray | memoryview) -> str:
    """Compute the SHA-256 digest of `content`, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def file_digest(path: Path) -> str:
    """Compute the SHA-256 digest of a file, in hexadecimal.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "empty"
    >>> path.touch()
    >>> file_digest(path) == digest(b"")
    True
    """
    result = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            result.update(chunk)
    return result.hexdigest()
