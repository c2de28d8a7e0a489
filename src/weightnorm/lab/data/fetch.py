"""Finds the files of a data set, downloads what is missing, and vouches for every byte.

No file is handed out before its size and checksum are those of `catalog.DATA_SETS`.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pooch  # type: ignore[import-untyped]

from weightnorm.lab.data.catalog import DATA_SETS, DataSet, File
from weightnorm.lab.errors import DataError

BAD_GZIP = (OSError, EOFError, zlib.error)
"""What reading a damaged gzip file can raise."""


@dataclass(frozen=True)
class FileStatus:
    """One file on disk, compared with what it should be."""

    file: File
    path: Path
    """Where it is, or where it belongs."""
    state: Literal["valid", "missing", "corrupt"]
    fault: str = ""
    """What is wrong with a corrupt file."""


@dataclass(frozen=True)
class DataSetStatus:
    """All files of one data set."""

    name: str
    folder: Path
    files: tuple[FileStatus, ...]

    @property
    def missing(self) -> tuple[FileStatus, ...]:
        return tuple(found for found in self.files if found.state == "missing")

    @property
    def corrupt(self) -> tuple[FileStatus, ...]:
        return tuple(found for found in self.files if found.state == "corrupt")

    @property
    def complete(self) -> bool:
        return not (self.missing or self.corrupt)


def data_dir(explicit: Path | None = None) -> Path:
    """The data folder: the one given, else ``$WEIGHTNORM_DATA``, else the user's cache folder."""
    chosen = explicit or os.environ.get("WEIGHTNORM_DATA") or pooch.os_cache("weightnorm")
    return Path(chosen).expanduser().absolute()


def status(root: Path | None = None) -> tuple[DataSetStatus, ...]:
    """What is there and what is not, for every data set, each file read and verified."""
    return tuple(inspect(name, root) for name in DATA_SETS)


def inspect(name: str, root: Path | None = None) -> DataSetStatus:
    """The status of one data set."""
    if name not in DATA_SETS:
        raise DataError(f"there is no data set {name!r}; choose one of {', '.join(DATA_SETS)}")
    folder = data_dir(root) / DATA_SETS[name].folder
    return DataSetStatus(name, folder, tuple(_look(folder, f) for f in DATA_SETS[name].files))


def fetch(name: str, root: Path | None = None, *, download: bool = True) -> dict[str, Path]:
    """The verified files of a data set, by name; what is missing is downloaded first.

    A damaged file is never replaced or deleted: it is an error that asks you to.
    """
    found = inspect(name, root)
    reason = "downloads are off"
    if download and found.missing and not found.corrupt:
        try:
            _download(DATA_SETS[name], found)
        except OSError as error:
            reason = str(error)
        found = inspect(name, root)
    if not found.complete:
        raise DataError(
            _corrupt_message(found) if found.corrupt else _missing_message(found, reason)
        )
    return {entry.file.name: entry.path for entry in found.files}


def _look(folder: Path, file: File) -> FileStatus:
    path = folder / file.name
    if file.or_gzipped and not path.exists():
        gzipped = path.with_name(file.name + ".gz")
        path = gzipped if gzipped.exists() else path
    if not path.exists():
        return FileStatus(file, path, "missing")
    fault = _fault(file, path)
    return FileStatus(file, path, "corrupt" if fault else "valid", fault)


def _fault(file: File, path: Path) -> str:
    """How the bytes at `path` differ from the published ones; empty if they do not."""
    algorithm, expected = file.checksum.split(":")
    unpack = path.name != file.name
    digest, size = hashlib.new(algorithm, usedforsecurity=False), 0
    try:
        with gzip.open(path) if unpack else path.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
        got = f"{size:,} bytes, {algorithm} {digest.hexdigest()}"
    except BAD_GZIP as error:
        got = f"{size:,} bytes and then {error or type(error).__name__}"
    wanted = f"{file.size:,} bytes, {algorithm} {expected}"
    return "" if got == wanted else f"got {got}; expected {wanted}{' unpacked' * unpack}"


def _download(data: DataSet, found: DataSetStatus) -> None:
    """Bring the missing files into place, each whole or not at all."""
    try:
        found.folder.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(dir=found.folder, prefix=".download-")
    except OSError as error:
        raise OSError(f"cannot write to {found.folder} ({error})") from error
    with scratch as name:
        temporary = Path(name)
        if data.archive:
            archive = _retrieve(data.archive, data.mirrors, temporary)
            _unpack(archive, {f"{data.folder}/{e.file.name}" for e in found.missing}, temporary)
        for entry in found.missing:
            if not data.archive:
                _retrieve(entry.file, data.mirrors, temporary).chmod(0o644)  # pooch's: 0o600.
            os.replace(temporary / entry.file.name, entry.path)


def _retrieve(file: File, mirrors: tuple[str, ...], folder: Path) -> Path:
    """Download one file from the first mirror that gives the right bytes."""
    failures = []
    for mirror in mirrors:
        downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty())
        try:
            return Path(
                pooch.retrieve(
                    mirror + file.name, file.checksum, file.name, folder, downloader=downloader
                )
            )
        except (OSError, ValueError) as error:  # No connection, no such page; a wrong checksum.
            failures.append(f"{mirror}{file.name}: {error}")
    raise OSError("\n  ".join(["the download failed", *failures]))


def _unpack(archive: Path, members: set[str], folder: Path) -> None:
    """Take out the named files and nothing else: no path inside the archive is trusted."""
    with tarfile.open(archive) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.name in members else None
            if content:
                (folder / Path(member.name).name).write_bytes(content.read())


def _corrupt_message(found: DataSetStatus) -> str:
    return "\n".join(
        f"{entry.path} is not the published file: {entry.fault}. "
        "Delete it, and it is downloaded when next needed; or replace it."
        for entry in found.corrupt
    )


def _missing_message(found: DataSetStatus, reason: str) -> str:
    data = DATA_SETS[found.name]
    source = f"inside {data.archive}, at" if data.archive else "at"
    return "\n".join(
        [
            f"{found.name} is not complete, and {reason}.",
            f"Missing from {found.folder}:",
            *(f"  {entry.file}" for entry in found.missing),
            f"They are {source} {' or '.join(data.mirrors)}",
            f"Put them into that folder, or let $WEIGHTNORM_DATA (or --data-dir) name a folder "
            f"that has them in {data.folder}/.",
        ]
    )
