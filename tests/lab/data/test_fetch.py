"""Finding, verifying and downloading files, and the error messages."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pooch
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightnorm.lab.data import fetch as module
from weightnorm.lab.data.catalog import DATA_SETS, DataSet, File
from weightnorm.lab.data.fetch import data_dir, fetch, inspect, status
from weightnorm.lab.errors import DataError

A, B = b"a's bytes" * 50, b"0 1 1 0\n" * 30
CLOSED = "http://127.0.0.1:1/"

real = pytest.mark.skipif(
    not os.environ.get("WEIGHTNORM_DATA"), reason="WEIGHTNORM_DATA names no folder of real data"
)


def checksum(content: bytes, algorithm: str) -> str:
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


FILE_A = File("a.bin", len(A), checksum(A, "md5"))
FILE_B = File("b.txt", len(B), checksum(B, "sha256"), or_gzipped=True)
TOY = DataSet("toy-files", (FILE_A, FILE_B), (CLOSED,))


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Callable[[DataSet], None]:
    """Puts a data set called "toy" into the catalogue; no proxy stands between it and us."""
    monkeypatch.setenv("NO_PROXY", "*")
    return partial(monkeypatch.setitem, DATA_SETS, "toy")


@pytest.fixture
def root(tmp_path: Path, publish: Callable[[DataSet], None]) -> Path:
    """A data folder that holds the toy data set, complete."""
    publish(TOY)
    root = tmp_path / "data"
    (root / "toy-files").mkdir(parents=True)
    (root / "toy-files/a.bin").write_bytes(A)
    (root / "toy-files/b.txt").write_bytes(B)
    return root


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def retrieve(*args: Any, **kwargs: Any) -> str:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(pooch, "retrieve", retrieve)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A web server on this machine: its address, and the folder it serves."""
    site = tmp_path / "site"
    site.mkdir()
    http = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/", site
    http.shutdown()
    http.server_close()
    thread.join()


# The folder


def test_data_folder_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEIGHTNORM_DATA", str(tmp_path / "variable"))
    assert data_dir(tmp_path / "given") == tmp_path / "given"
    assert data_dir() == tmp_path / "variable"
    monkeypatch.setenv("WEIGHTNORM_DATA", "")
    assert data_dir() == Path(pooch.os_cache("weightnorm"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_dir(Path("~/data")) == tmp_path / "data"
    assert data_dir(Path("here")).is_absolute()


# Files that are there


@pytest.mark.usefixtures("no_network")
def test_complete_data_needs_no_network(root: Path) -> None:
    folder = root / "toy-files"
    assert fetch("toy", root) == {"a.bin": folder / "a.bin", "b.txt": folder / "b.txt"}


@pytest.mark.usefixtures("no_network")
def test_gzipped_file_is_verified_by_its_content(root: Path) -> None:
    plain, packed = root / "toy-files/b.txt", root / "toy-files/b.txt.gz"
    packed.write_bytes(gzip.compress(B, 1))
    assert fetch("toy", root)["b.txt"] == plain
    plain.unlink()
    assert fetch("toy", root)["b.txt"] == packed
    packed.write_bytes(gzip.compress(B, 9))
    assert fetch("toy", root)["b.txt"] == packed


def test_gzip_is_accepted_only_where_allowed(root: Path) -> None:
    (root / "toy-files/a.bin").rename(root / "toy-files/a.bin.gz")
    assert [entry.file for entry in inspect("toy", root).missing] == [FILE_A]


@given(position=st.integers(0, len(A) - 1), flip=st.integers(1, 255))
def test_every_changed_byte_is_detected(position: int, flip: int) -> None:
    changed = bytearray(A)
    changed[position] ^= flip
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.bin")
        path.write_bytes(changed)
        found = module._file_status(Path(folder), FILE_A)
    assert found.state == "corrupt"
    assert hashlib.md5(changed).hexdigest() in found.fault


@given(length=st.integers(0, len(A) - 1))
def test_every_truncation_is_detected(length: int) -> None:
    with TemporaryDirectory() as folder:
        Path(folder, "a.bin").write_bytes(A[:length])
        assert module._file_status(Path(folder), FILE_A).state == "corrupt"
        Path(folder, "b.txt.gz").write_bytes(gzip.compress(B)[: length % len(gzip.compress(B))])
        assert module._file_status(Path(folder), FILE_B).state == "corrupt"


@pytest.mark.usefixtures("no_network")
def test_damaged_file_is_reported_and_kept(root: Path) -> None:
    path = root / "toy-files/a.bin"
    path.write_bytes(A[:-1])
    (root / "toy-files/b.txt").unlink()
    with pytest.raises(DataError) as caught:
        fetch("toy", root)
    message = str(caught.value)
    assert str(path) in message
    assert f"got {len(A) - 1} bytes, md5 {hashlib.md5(A[:-1]).hexdigest()}" in message
    assert f"expected {len(A)} bytes, md5 {hashlib.md5(A).hexdigest()}" in message
    assert "Delete it" in message
    assert path.read_bytes() == A[:-1]


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(B)[:-9], gzip.compress(A)],
    ids=["empty", "not gzip", "truncated", "another's"],
)
def test_damaged_gzip_file_is_a_data_error(root: Path, content: bytes) -> None:
    (root / "toy-files/b.txt").unlink()
    (root / "toy-files/b.txt.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"b\.txt\.gz is not the published file.*unpacked"):
        fetch("toy", root)


def test_unknown_data_set_is_refused() -> None:
    with pytest.raises(DataError, match="no data set 'cifar100'; choose one of cifar10, mnist"):
        fetch("cifar100")


# Files that are not


def check_names_what_is_missing(message: str, folder: Path) -> None:
    assert f"Missing from {folder}:" in message
    for file in (FILE_A, FILE_B):
        assert file.name in message
        assert f"{file.size:,} bytes" in message
        assert file.checksum.replace(":", " ") in message
    assert CLOSED in message
    assert "WEIGHTNORM_DATA" in message


def test_offline_message(tmp_path: Path, publish: Callable[[DataSet], None]) -> None:
    publish(TOY)
    with pytest.raises(DataError) as caught:
        fetch("toy", tmp_path)
    check_names_what_is_missing(str(caught.value), tmp_path / "toy-files")
    assert "the download failed" in str(caught.value)
    assert "refused" in str(caught.value)
    assert list((tmp_path / "toy-files").iterdir()) == []


@pytest.mark.usefixtures("no_network")
def test_nothing_is_written_without_downloads(
    tmp_path: Path, publish: Callable[[DataSet], None]
) -> None:
    publish(TOY)
    with pytest.raises(DataError) as caught:
        fetch("toy", tmp_path, download=False)
    check_names_what_is_missing(str(caught.value), tmp_path / "toy-files")
    assert list(tmp_path.iterdir()) == []


def test_missing_files_are_named(root: Path) -> None:
    (root / "toy-files/b.txt").unlink()
    with pytest.raises(DataError, match=r"b\.txt") as caught:
        fetch("toy", root, download=False)
    assert "a.bin" not in str(caught.value)


def test_unwritable_folder_is_named(tmp_path: Path, publish: Callable[[DataSet], None]) -> None:
    publish(TOY)
    (tmp_path / "file").write_text("where a folder should be")
    with pytest.raises(DataError, match="cannot write to") as caught:
        fetch("toy", tmp_path / "file")
    check_names_what_is_missing(str(caught.value), tmp_path / "file/toy-files")


# Downloads, from a real server


def test_missing_files_come_from_the_first_good_mirror(
    root: Path, server: tuple[str, Path], publish: Callable[[DataSet], None]
) -> None:
    address, site = server
    for mirror, content in (("empty", None), ("wrong", B[::-1]), ("right", B)):
        (site / mirror).mkdir()
        if content:
            (site / mirror / "b.txt").write_bytes(content)
    publish(replace(TOY, mirrors=tuple(f"{address}{m}/" for m in ("empty", "wrong", "right"))))
    (root / "toy-files/b.txt").unlink()
    before = (root / "toy-files/a.bin").stat()
    paths = fetch("toy", root)
    assert paths["b.txt"].read_bytes() == B
    assert paths["b.txt"].stat().st_mode & 0o777 == 0o644
    assert paths["a.bin"].stat().st_mtime_ns == before.st_mtime_ns
    assert sorted(p.name for p in (root / "toy-files").iterdir()) == ["a.bin", "b.txt"]


def test_wrong_downloads_are_removed(
    tmp_path: Path, server: tuple[str, Path], publish: Callable[[DataSet], None]
) -> None:
    address, site = server
    (site / "a.bin").write_bytes(A[:-1])
    publish(replace(TOY, mirrors=(address,)))
    with pytest.raises(DataError, match="does not match"):
        fetch("toy", tmp_path)
    assert list((tmp_path / "toy-files").iterdir()) == []


def packed(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def archived(content: bytes, mirror: str) -> DataSet:
    archive = File("toy.tar.gz", len(content), checksum(content, "md5"))
    return replace(TOY, mirrors=(mirror,), archive=archive)


def test_only_named_members_are_extracted(
    tmp_path: Path, server: tuple[str, Path], publish: Callable[[DataSet], None]
) -> None:
    address, site = server
    hostile = {"../../escaped": b"!", "/tmp/a.bin": b"!", "a.bin": b"!", "toy-files/more": b"!"}
    content = packed({"toy-files/b.txt": B, "toy-files/a.bin": A, **hostile})
    (site / "toy.tar.gz").write_bytes(content)
    publish(archived(content, address))
    paths = fetch("toy", tmp_path / "data")
    assert {name: path.read_bytes() for name, path in paths.items()} == {"a.bin": A, "b.txt": B}
    assert sorted(p.name for p in (tmp_path / "data").rglob("*")) == [
        "a.bin",
        "b.txt",
        "toy-files",
    ]
    assert not (tmp_path / "escaped").exists()


def test_incomplete_archive_is_a_data_error(
    tmp_path: Path, server: tuple[str, Path], publish: Callable[[DataSet], None]
) -> None:
    address, site = server
    content = packed({"toy-files/a.bin": A})
    (site / "toy.tar.gz").write_bytes(content)
    publish(archived(content, address))
    with pytest.raises(DataError, match=r"b\.txt") as caught:
        fetch("toy", tmp_path)
    assert "inside toy.tar.gz" in str(caught.value)
    assert [p.name for p in (tmp_path / "toy-files").iterdir()] == ["a.bin"]


def test_interrupted_download_is_removed(
    tmp_path: Path, publish: Callable[[DataSet], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(url: str, known_hash: str, fname: str, path: Path, **_: Any) -> str:
        Path(path, fname).write_bytes(A[:9])
        raise KeyboardInterrupt

    publish(TOY)
    monkeypatch.setattr(pooch, "retrieve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("toy", tmp_path)
    assert list((tmp_path / "toy-files").iterdir()) == []


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["a.bin", "b.txt"])
def test_a_file_that_cannot_be_read_is_not_called_corrupt(root: Path, name: str) -> None:
    path = root / "toy-files" / name
    path.unlink()
    path.mkdir()
    (found,) = inspect("toy", root).faulty
    assert (found.path, found.state) == (path, "unreadable")
    with pytest.raises(DataError, match=f"cannot read {path}: Is a directory; check") as error:
        fetch("toy", root)
    assert "elete" not in str(error.value)


# Status and catalogue


def test_status_of_valid_missing_and_corrupt_files(root: Path) -> None:
    (root / "toy-files/a.bin").write_bytes(b"?")
    found = {entry.name: entry for entry in status(root)}
    assert list(found) == list(DATA_SETS)
    toy, mnist = found["toy"], found["mnist"]
    assert [(e.file.name, e.state) for e in toy.files] == [("a.bin", "corrupt"), ("b.txt", "valid")]
    assert toy.folder == root / "toy-files"
    assert not toy.complete
    assert {entry.state for entry in mnist.files} == {"missing"}
    assert mnist.missing == mnist.files
    (root / "toy-files/a.bin").write_bytes(A)
    assert inspect("toy", root).complete


@pytest.mark.parametrize("name", DATA_SETS)
def test_catalog_is_well_formed(name: str) -> None:
    data = DATA_SETS[name]
    digits = {"md5": 32, "sha256": 64}
    for file in (*data.files, *filter(None, [data.archive])):
        algorithm, value = file.checksum.split(":")
        assert len(value) == digits[algorithm]
        assert int(value, 16)
        assert file.size > 0
    assert len({file.name for file in data.files}) == len(data.files)
    assert all(mirror.startswith("http") and mirror.endswith("/") for mirror in data.mirrors)


@real
@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", DATA_SETS)
def test_real_files_match_the_catalog(name: str) -> None:
    assert len(fetch(name)) == len(DATA_SETS[name].files)
