"""Replace files whole or not at all. Standard library only."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

SUFFIX = ".tmp"


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the block ends without an error.

    A reader sees the old content or the new, never a mixture. The data is synced to disk before
    the file is renamed. After an error the temporary file is removed and `path` is as before.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "result.txt"
    >>> with atomic_writer(path) as file:
    ...     _ = file.write(b"done")
    >>> path.read_bytes()
    b'done'
    """
    # A random name: process ids are not unique on a file system that machines share.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{SUFFIX}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the content of a file, whole or not at all."""
    with atomic_writer(path) as file:
        file.write(content)
