"""Read torch's .pt, .pth, .bin and .ckpt without executing or believing what is in them."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightnorm.files.errors import FileError, file_error, reason
from weightnorm.files.nested import nested_mappings

NEEDS_CODE = re.compile(r"[Uu]nsupported (?:global: )?GLOBAL ([\w.]+)")
"""How torch names the class that it refuses to load."""


def load_pickle(path: Path) -> dict[Any, Any]:
    """Load a checkpoint. Raises a FileError if it is damaged, too large or needs code."""
    try:
        _check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles that it then refuses
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (FileError, OSError):
        raise
    except Exception as error:
        if found := NEEDS_CODE.search(str(error)):
            why = f"contains {found[1]}, which needs code to load and is refused"
        else:
            why = f"is damaged, or needs code to load, which is refused ({reason(error)})"
        raise file_error(path, f"{why}; save its state dict alone and try again") from error
    if not isinstance(checkpoint, Mapping):
        raise file_error(path, f"contains a {type(checkpoint).__name__}; expected a state dict")
    size = path.stat().st_size
    for _, state in nested_mappings(checkpoint):
        for key, value in state.items():
            if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
                claimed = value.numel() * value.element_size()
                if claimed > size:  # it is expanded: a copy would need that much memory
                    claim = f"{key!r} claims {claimed:,} bytes in a file of {size:,}"
                    raise file_error(path, claim)
    return dict(checkpoint)


def _check_archive(path: Path) -> None:
    """Verify the checksums of a zip archive, torch's format since 1.6. torch.load does not."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise file_error(
                path, "has compressed entries: TorchScript? expected the output of torch.save"
            )
        bad = archive.testzip()
    if bad is not None:
        raise file_error(path, f"is damaged: the checksum of {bad} does not match")
