"""Locks of folders, and the leftovers of killed writers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import IO

from weightnorm.files.atomic import SUFFIX
from weightnorm.lab.errors import RunError


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
        _lock(file.fileno())
    except OSError:
        file.close()
        raise RunError(f"another process is running in {folder}") from None
    return file


def _lock(file: int) -> None:
    """Lock a file until it is closed. Raises OSError if another process has locked it."""
    try:
        fcntl = import_module("fcntl")
    except ModuleNotFoundError:  # Windows
        msvcrt = import_module("msvcrt")
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(folder: Path) -> bool:
    """Whether a process has locked a folder with `lock_folder`."""
    try:
        file = (folder / "lock").open("r+")
    except OSError:
        return False
    with file:
        try:
            _lock(file.fileno())
        except OSError:
            return True
    return False


def remove_temporary(folder: Path) -> None:
    """Delete the temporary files that killed writers left in a folder.

    Call it only under a lock that keeps other writers out of the folder.
    """
    for path in folder.glob(f".*{SUFFIX}"):
        path.unlink(missing_ok=True)
