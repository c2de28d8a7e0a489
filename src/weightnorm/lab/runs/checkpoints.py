"""Checkpoints of a run: two generations, each written atomically and with a digest.

Note [digest in the zip comment]
    torch writes a zip archive but does not check its CRCs when it reads one, so a flipped bit would
    be loaded as another number. The SHA-256 digest of the file is appended as the archive's
    comment: `torch.load` still reads the file, and the digest is replaced together with the data.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightnorm.files.atomic import atomic_writer
from weightnorm.lab.errors import CheckpointError
from weightnorm.lab.files import digest

END_OF_DIRECTORY = b"PK\x05\x06"
"""Signature of the last 22 bytes of a zip archive, which end with the length of its comment."""
DIGEST_LENGTH = 64


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a new generation and keep the one before it."""
    memory = io.BytesIO()  # on a full disk, torch.save raises other errors than OSError
    torch.save(state, memory)
    with atomic_writer(path) as file:
        file.write(_with_digest(memory.getvalue()))
        file.flush()
        os.fsync(file.fileno())
        if path.exists():
            path.replace(previous(path))


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Return the latest generation that is intact; None if there is no checkpoint.

    A run resumes exactly from either generation, so falling back costs time and nothing else.
    """
    failures = []
    for generation in (path, previous(path)):
        if not generation.exists():
            continue
        try:
            content = io.BytesIO(_verified(generation))
            state: dict[str, Any] = torch.load(content, map_location="cpu", weights_only=True)
            return state
        except Exception as error:  # torch raises many kinds for a damaged file
            reason = (str(error) or type(error).__name__).splitlines()[0]
            failures.append(f"{generation.name}: {reason}")
    if failures:
        raise CheckpointError(
            f"no checkpoint in {path.parent} is intact ({'; '.join(failures)}); "
            "delete the folder to start over"
        )
    return None


def recover_checkpoint(path: Path) -> None:
    """Replace a damaged latest generation by the previous one, if that is intact.

    The next save must not move a damaged file over the intact generation.
    """
    if path.exists() and previous(path).exists():
        try:
            _verified(path)
        except (OSError, ValueError):
            try:
                _verified(previous(path))
            except (OSError, ValueError):
                return  # load_checkpoint reports both
            previous(path).replace(path)


def previous(path: Path) -> Path:
    """Return the path of the previous generation."""
    return path.with_name(f"{path.stem}-previous{path.suffix}")


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of torch's random number generators on the CPU and on `device`."""
    state = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(*_index(device))
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what `random_state` returned; on another type of device, the CPU's alone."""
    torch.set_rng_state(state["cpu"])
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """Return the argument that selects a device; mps has only one and takes none."""
    return () if device.type == "mps" else (device,)


def _with_digest(archive: bytes) -> bytes:
    """Append the digest as the zip archive's comment; see Note [digest in the zip comment]."""
    if archive[-22:-18] != END_OF_DIRECTORY or archive[-2:] != b"\0\0":
        raise ValueError("expected a zip archive without a comment from torch.save")
    body = archive[:-2] + DIGEST_LENGTH.to_bytes(2, "little")
    return body + digest(body).encode()


def _verified(path: Path) -> bytes:
    """Read a checkpoint file. Raises ValueError unless its digest is that of its content."""
    content = path.read_bytes()
    body, expected = content[:-DIGEST_LENGTH], content[-DIGEST_LENGTH:]
    if digest(body).encode() != expected:
        raise ValueError(f"its {len(content):,} bytes do not have the digest they were saved with")
    return content
