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
