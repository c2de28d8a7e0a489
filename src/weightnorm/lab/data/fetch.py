"""Find the files of a data set, download missing ones, and verify size and checksum of each."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import sys
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pooch  # type: ignore[import-untyped]

from weightnorm.files.atomic import atomic_writer
from weightnorm.lab.data.catalog import DATA_SETS, DataSet, File
from weightnorm.lab.errors import DataError

DAMAGED_GZIP = (gzip.BadGzipFile, EOFError, zlib.error)
"""Exceptions raised by a damaged gzip file."""


@dataclass(frozen=True)
class FileStatus:
    """State of one file on disk."""

    file: File
    path: Path
    """Where the file is, or should be."""
    state: Literal["valid", "missing", "corrupt", "unreadable"]
    fault: str = ""
    """Why a file is corrupt or unreadable."""


@dataclass(frozen=True)
class DataSetStatus:
    """State of the files of one data set."""

    name: str
    folder: Path
    files: tuple[FileStatus, ...]

    @property
    def missing(self) -> tuple[FileStatus, ...]:
        return tuple(found for found in self.files if found.state == "missing")

    @property
    def faulty(self) -> tuple[FileStatus, ...]:
        return tuple(found for found in self.files if found.fault)

    @property
    def complete(self) -> bool:
        return not (self.missing or self.faulty)


def data_dir(explicit: Path | None = None) -> Path:
    """Return `explicit`, else ``$WEIGHTNORM_DATA``, else the user's cache folder."""
    chosen = explicit or os.environ.get("WEIGHTNORM_DATA") or pooch.os_cache("weightnorm")
    return Path(chosen).expanduser().absolute()


def status(root: Path | None = None) -> tuple[DataSetStatus, ...]:
    """Read and verify every file of every data set."""
    return tuple(inspect(name, root) for name in DATA_SETS)


def inspect(name: str, root: Path | None = None) -> DataSetStatus:
    """Read and verify every file of one data set."""
    if name not in DATA_SETS:
        raise DataError(f"there is no data set {name!r}; choose one of {', '.join(DATA_SETS)}")
    folder = data_dir(root) / DATA_SETS[name].folder
    return DataSetStatus(
        name, folder, tuple(_file_status(folder, f) for f in DATA_SETS[name].files)
    )


def fetch(name: str, root: Path | None = None, *, download: bool = True) -> dict[str, Path]:
    """Return the verified files of a data set by name, after downloading missing ones.

    A damaged file is never replaced or deleted; it is an error.
    """
    found = inspect(name, root)
    reason = "downloads are off"
    if download and found.missing and not found.faulty:
        try:
            _download(DATA_SETS[name], found)
        except OSError as error:
            reason = str(error)
        found = inspect(name, root)
    if not found.complete:
        raise DataError(_faulty_message(found) if found.faulty else _missing_message(found, reason))
    return {entry.file.name: entry.path for entry in found.files}


def _file_status(folder: Path, file: File) -> FileStatus:
    path = folder / file.name
    if file.or_gzipped and not path.exists():
        gzipped = path.with_name(file.name + ".gz")
        path = gzipped if gzipped.exists() else path
    if not path.exists():
        return FileStatus(file, path, "missing")
    try:
        fault = _fault(file, path)
    except OSError as error:
        return FileStatus(file, path, "unreadable", error.strerror or str(error))
    return FileStatus(file, path, "corrupt" if fault else "valid", fault)


def _fault(file: File, path: Path) -> str:
    """Describe how a file differs from the published one; empty if it does not."""
    algorithm, expected = file.checksum.split(":")
    unpack = path.name != file.name
    digest, size = hashlib.new(algorithm, usedforsecurity=False), 0
    try:
        with gzip.open(path) if unpack else path.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
        got = f"{size:,} bytes, {algorithm} {digest.hexdigest()}"
    except DAMAGED_GZIP as error:
        got = f"{size:,} bytes and then {error or type(error).__name__}"
    wanted = f"{file.size:,} bytes, {algorithm} {expected}"
    return "" if got == wanted else f"got {got}; expected {wanted}{' unpacked' * unpack}"


def _download(data: DataSet, found: DataSetStatus) -> None:
    """Download the missing files, each whole or not at all."""
    try:
        found.folder.mkdir(parents=True, exist_ok=True)
        scratch = TemporaryDirectory(dir=found.folder, prefix=".download-")
    except OSError as error:
        raise OSError(f"cannot write to {found.folder} ({error})") from error
    with scratch as name:
        temporary = Path(name)
        if data.archive:
            archive = _retrieve(data.archive, data.mirrors, temporary)
            _unpack(archive, {f"{data.folder}/{e.file.name}": e.path for e in found.missing})
            return
        for entry in found.missing:
            with (
                _retrieve(entry.file, data.mirrors, temporary).open("rb") as downloaded,
                atomic_writer(entry.path) as file,
            ):
                shutil.copyfileobj(downloaded, file)


def _retrieve(file: File, mirrors: tuple[str, ...], folder: Path) -> Path:
    """Download a file from the first mirror with the right checksum."""
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


def _unpack(archive: Path, members: dict[str, Path]) -> None:
    """Extract only the named members, to the given paths: those in the archive are untrusted."""
    with tarfile.open(archive) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.name in members else None
            if content:
                with atomic_writer(members[member.name]) as file:
                    shutil.copyfileobj(content, file)


def _faulty_message(found: DataSetStatus) -> str:
    return "\n".join(
        f"cannot read {entry.path}: {entry.fault}; check its permissions and the disk"
        if entry.state == "unreadable"
        else f"{entry.path} is not the published file: {entry.fault}. "
        "Delete it, and it is downloaded when next needed; or replace it."
        for entry in found.faulty
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
