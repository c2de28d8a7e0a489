"""Files that killed or concurrent processes cannot damage: locks, and states with a digest.

Note [digest in the zip comment]
    torch writes a zip archive but does not check its CRCs when it reads one, so a flipped bit would
    be loaded as another number. The SHA-256 digest of the file is appended as the archive's
    comment: `torch.load` still reads the file, and the digest is replaced together with the data.
"""

from __future__ import annotations

import io
import os
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch

from weightnorm.files.atomic import SUFFIX, atomic_writer
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


# — states with a digest —

END_OF_DIRECTORY = b"PK\x05\x06"
"""Signature of the last 22 bytes of a zip archive, which end with the length of its comment."""
DIGEST_LENGTH = 64


def save_state(path: Path, state: dict[str, Any], *, keep_previous: bool = False) -> None:
    """Write tensors and plain values with a digest, whole or not at all.

    With `keep_previous`, the file that is replaced is kept, see `previous`.
    """
    memory = io.BytesIO()  # on a full disk, torch.save raises other errors than OSError
    torch.save(state, memory)
    archive = memory.getvalue()
    if archive[-22:-18] != END_OF_DIRECTORY or archive[-2:] != b"\0\0":
        raise ValueError("expected a zip archive without a comment from torch.save")
    body = archive[:-2] + DIGEST_LENGTH.to_bytes(2, "little")
    with atomic_writer(path) as file:
        file.write(body + sha256(body).hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())
        if keep_previous and path.exists():
            path.replace(previous(path))


def load_state(path: Path) -> dict[str, Any]:
    """Load what `save_state` wrote. Raises an error unless every byte is as it was written."""
    content = io.BytesIO(_verified(path))
    state: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=True)
    return state


def recover_state(path: Path) -> None:
    """Replace a damaged or missing file by the previous one, if that is intact.

    A run resumes exactly from either, so falling back costs time and nothing else. The next
    `save_state` must not move a damaged file over the intact one.
    """
    for generation in (path, previous(path)):
        try:
            _verified(generation)
        except (OSError, ValueError):
            continue
        generation.replace(path)
        return


def previous(path: Path) -> Path:
    """Return the path of the file that `save_state` keeps."""
    return path.with_name(f"{path.stem}-previous{path.suffix}")


def _verified(path: Path) -> bytes:
    """Read a file of `save_state`. Raises ValueError unless its digest is that of its content."""
    content = path.read_bytes()
    body, expected = content[:-DIGEST_LENGTH], content[-DIGEST_LENGTH:]
    if sha256(body).hexdigest().encode() != expected:
        raise ValueError(f"its {len(content):,} bytes do not have the digest they were saved with")
    return content
