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
from torch.overrides import TorchFunctionMode

from weightnorm.files.errors import FileError, check_regular, file_error, reason
from weightnorm.files.nested import nested_mappings

NEEDS_CODE = re.compile(r"[Uu]nsupported (?:global: )?GLOBAL ([\w.]+)")
"""How torch names the class that it refuses to load."""


def load_pickle(path: Path) -> dict[Any, Any]:
    """Load a checkpoint. Raises a FileError if it is damaged, too large or needs code."""
    check_regular(path)
    size = path.stat().st_size
    try:
        _check_archive(path)
        with warnings.catch_warnings(), _CheckedStorage():
            warnings.simplefilter("ignore")  # torch warns about pickles that it then refuses
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileError:
        raise
    except Exception as error:
        if found := NEEDS_CODE.search(str(error)):
            why = f"contains {found[1]}, which needs code to load and is refused"
        else:
            why = f"is damaged, or needs code to load, which is refused ({reason(error)})"
        raise file_error(path, f"{why}; save its state dict alone and try again") from error
    if not isinstance(checkpoint, Mapping):
        raise file_error(path, f"contains a {type(checkpoint).__name__}; expected a state dict")
    for _, state in nested_mappings(checkpoint):
        for key, value in state.items():
            claimed = _claimed_bytes(value) if isinstance(value, Tensor) else 0
            if claimed > size:
                raise file_error(path, f"{key!r} claims {claimed:,} bytes in a file of {size:,}")
    return dict(checkpoint)


def _claimed_bytes(tensor: Tensor) -> int:
    """Return the bytes of a dense tensor if it were copied; 0 for other layouts and meta."""
    dense = tensor.layout == torch.strided and not tensor.is_nested
    return tensor.numel() * tensor.element_size() if dense and not tensor.is_meta else 0


class _CheckedStorage(TorchFunctionMode):
    """Refuses tensors that extend beyond their storage; torch may enlarge the storage instead."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.set_:
            tensor, storage, offset, sizes, strides = args
            last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
            needed = (offset + last + 1) * tensor.element_size() if 0 not in sizes else 0
            if needed > storage.nbytes() or offset < 0 or min((*sizes, *strides), default=0) < 0:
                raise ValueError(
                    f"a tensor needs {needed:,} bytes, {storage.nbytes():,} are stored"
                )
        return func(*args, **(kwargs or {}))


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
