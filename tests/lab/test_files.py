"""Atomic writes and digests."""

import os
import subprocess
import sys

import pytest

from weightnorm.files.atomic import atomic_writer, write_atomically
from weightnorm.lab.files import remove_temporary


def test_replaces_whole_content(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"a long old content")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"]


def test_error_keeps_old_content(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), atomic_writer(path) as file:  # noqa: PT012
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "x", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_a_killed_writer_leaves_only_a_temporary_file(tmp_path):
    code = (
        "import os, pathlib; from weightnorm.files.atomic import atomic_writer\n"
        f"with atomic_writer(pathlib.Path({str(tmp_path / 'x')!r})) as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert len(os.listdir(tmp_path)) == 1
    assert not (tmp_path / "x").exists()
    remove_temporary(tmp_path)
    assert not os.listdir(tmp_path)


WITHOUT_POSIX = """
import os, pathlib, sys, types
sys.modules["fcntl"] = None
del os.posix_fallocate
locked = []
def locking(file, mode, size):
    if locked:
        raise OSError("locked")
    locked.append((mode, size))
import weightnorm.lab.cli
from weightnorm.lab.errors import RunError
from weightnorm.lab.files import lock_folder
from weightnorm.lab.replay_buffer import ReplayBuffer
# Not before: its presence makes other modules take this for Windows.
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=locking)
folder = pathlib.Path(sys.argv[1])
with lock_folder(folder):
    try:
        lock_folder(folder)
    except RunError as error:
        assert "another process is running" in str(error)
assert locked == [(2, 1)]
ReplayBuffer(folder / "replay", 1000, (12, 12))
assert (folder / "replay").stat().st_blocks * 512 >= 144_000  # allocated, not sparse
"""


def test_locks_and_allocation_where_a_system_has_neither_call(tmp_path):
    """As on Windows, which has no fcntl, and on macOS, which has no posix_fallocate."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
