"""Inspect and convert checkpoint files.

Reads and writes .safetensors, whole or in shards with an index, and torch's .pt, .pth, .bin and
.ckpt. Files are not trusted:

- Nothing in a file is executed: pickles are loaded with ``weights_only=True``.
- Sizes are checked against the file before memory is used for them.
- Whatever is wrong with a file, a FileError names it, with control characters escaped.

Safetensors files are read and written one weight at a time. The output appears whole or not at
all, and the input is never written to.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weightnorm import functional
from weightnorm.checkpoints import (
    Conversion,
    Dim,
    Format,
    State,
    StateDictError,
    StoredWeight,
    WeightSelection,
    convert_state_dict,
    join_path,
    nested_mappings,
    plan_conversion,
    stored_weights,
    units_of,
)
from weightnorm.lab.errors import FileError, printable
from weightnorm.lab.files import atomic_writer, write_atomically
from weightnorm.lab.safetensors_writer import DTYPES, TensorToWrite, write_safetensors

Kind = Literal["pickle", "whole", "sharded"]
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
NEEDS_CODE = re.compile(r"[Uu]nsupported (?:global: )?GLOBAL ([\w.]+)")
"""How torch names the class that it refuses to load."""
WHOLE, INDEX = ".safetensors", ".safetensors.index.json"


@dataclass(frozen=True)
class WeightSummary:
    """One normalized weight of a file."""

    name: str
    format: Format
    shape: tuple[int, ...]
    dim: int | tuple[int, ...] | Literal["ambiguous"] | None
    """The kept axis; ambiguous for a flat g beside a square v."""
    units: int
    v_norm: float
    """Mean ‖v‖ over the units; NaN if the axis is ambiguous."""
    g: float
    """Mean |g| over the units."""
    dead: int
    """Units with g = 0 or v = 0, whose weights are 0."""


def inspect_file(path: Path) -> tuple[list[WeightSummary], int]:
    """Return the normalized weights of a checkpoint file, and the number of its other tensors."""
    rows, others = [], 0
    with _reading(path), _opened(path) as states:
        for place, state in states:
            items = state.outlines() if isinstance(state, Shards) else state
            weights = stored_weights(items)
            taken = {key for weight in weights for key in weight.keys}
            rows += [_summary(join_path(place, w.path), _loaded(state, w)) for w in weights]
            others += sum(isinstance(x, Tensor) for key, x in items.items() if key not in taken)
    return rows, others


def convert_file(
    source: Path, target: Path, to: Format, weights: tuple[str, ...] = (), dim: Dim = "infer"
) -> list[str]:
    """Write `source` in another format to `target`; returns the names of the normalized weights.

    `weights` are names or patterns of plain weights to decompose, and `dim` their kept axis, as for
    ``convert_state_dict``. `target` is replaced when everything is written; after an error it is as
    before.
    """
    kind = _kind(source)
    if kind != _kind(target):
        raise _error(
            target,
            f"is a {_kind(target)} file and {source.name} a {kind} one; conversion keeps the kind",
        )
    if kind == "pickle":
        return _convert_pickle(source, target, to, weights, dim)
    return _convert_safetensors(source, target, to, weights, dim)


# — conversion —


def _convert_pickle(
    source: Path, target: Path, to: Format, weights: tuple[str, ...], dim: Dim
) -> list[str]:
    with _reading(source):
        before = _load_pickle(source)
        after = convert_state_dict(before, to, weights=weights, dim=dim)
        normalized = before if to == "folded" else after
        names = [
            join_path(place, weight.path)
            for place, state in nested_mappings(normalized)
            for weight in stored_weights(state, dim)
        ]
        _refuse_nothing(names, to)
    with _writing(source, target), atomic_writer(target) as file:
        torch.save(after, file)
    return names


def _convert_safetensors(
    source: Path, target: Path, to: Format, weights: tuple[str, ...], dim: Dim
) -> list[str]:
    with _reading(source), _opened(source) as states:
        ((_, state),) = states
        assert isinstance(state, Shards)
        selection = WeightSelection(weights)
        plan = plan_conversion(state.outlines(), to, selection, dim)
        selection.raise_unmatched()
        _refuse_nothing(plan.names, to)
        shards = _by_shard(state, plan)
        with _writing(source, target):
            if _kind(source) == "whole":
                ((name, tensors),) = shards.items()
                write_safetensors(target, tensors, state.metadata(name))
            else:
                _write_shards(target, shards, state)
    return plan.names


def _by_shard(state: Shards, plan: Conversion) -> dict[str, list[TensorToWrite]]:
    """Return the tensors to write by shard: each where the one it replaces was."""
    shards: dict[str, list[TensorToWrite]] = {name: [] for name in state.files}
    for planned in plan.tensors:
        shards[state.shard_of[str(planned.source)]].append(
            TensorToWrite(
                str(planned.key),
                planned.outline.dtype,
                tuple(planned.outline.shape),
                partial(planned.compute, state),
            )
        )
    return shards


def _write_shards(target: Path, shards: dict[str, list[TensorToWrite]], state: Shards) -> None:
    """Write shards and then their index, which makes all of them visible at once.

    Note [the index decides]
        Files that exist keep their content: a shard whose name is taken gets a new one. Until the
        index is replaced, an earlier output is complete; from then on, the new one is. Shards that
        only the earlier index lists are deleted last.
    """
    earlier = _listed_shards(target)
    written: dict[str, list[TensorToWrite]] = {}
    try:
        for name, tensors in shards.items():
            if tensors:
                new = _free_name(target.parent, name)
                written[new] = tensors
                write_safetensors(target.parent / new, tensors, state.metadata(name))
        total = sum(tensor.size for tensors in written.values() for tensor in tensors)
        weight_map = {tensor.key: new for new, tensors in written.items() for tensor in tensors}
        index = {
            "metadata": {**state.index_metadata, "total_size": total},
            "weight_map": weight_map,
        }
        write_atomically(target, json.dumps(index, indent=2).encode())
    except BaseException:
        for new in written:
            (target.parent / new).unlink(missing_ok=True)
        raise
    others = (path for path in target.parent.glob(f"*{INDEX}") if path.name != target.name)
    for name in earlier.difference(written, *map(_listed_shards, others)):
        with suppress(OSError):  # the output is complete
            (target.parent / name).unlink()


def _listed_shards(index: Path) -> set[str]:
    """Return the shards that an index lists; none if there is no index that can be read."""
    try:
        return set(_read_index(index)[0].values())
    except (FileError, OSError):
        return set()


def _free_name(folder: Path, name: str) -> str:
    stem, new = name.removesuffix(WHOLE), name
    while os.path.lexists(folder / new):
        new = f"{stem}.{secrets.token_hex(4)}{WHOLE}"
    return new


def _refuse_nothing(names: list[str], to: Format) -> None:
    if not names and to != "folded":
        raise StateDictError(
            f"nothing to write as {to}: no weight is normalized, and no plain one was chosen; "
            "choose with --weights, such as --weights '*.weight'"
        )


# — errors —


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn every error into a FileError that names the file."""
    try:
        yield
    except FileError:
        raise
    except StateDictError as error:
        raise _error(path, error) from error
    # Files may hold anything, and neither torch nor safetensors limit what they raise for it.
    except Exception as error:
        raise _error(path, f"is damaged or cannot be read: {_reason(error)}") from error


@contextmanager
def _writing(source: Path, target: Path) -> Iterator[None]:
    """Refuse a target that is the source, make its folder, and turn errors into FileErrors."""
    try:
        _refuse_same(source, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (FileError, StateDictError):
        raise
    except Exception as error:
        raise _error(target, f"cannot be written: {_reason(error)}") from error


def _refuse_same(source: Path, target: Path) -> None:
    same = os.path.exists(target) and os.path.samefile(source, target)
    if _kind(source) == "sharded" and target.parent.is_dir():
        same = same or os.path.samefile(source.parent, target.parent)
    if same:
        raise _error(target, "would overwrite the input; choose another folder or name")


def _error(path: Path, reason: object) -> FileError:
    return FileError(printable(f"{path}: {reason}"))


def _reason(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return next(iter((text or "").splitlines()), "") or type(error).__name__


# — reading —


@contextmanager
def _opened(path: Path) -> Iterator[list[tuple[str, State]]]:
    """Open the state dicts of a file, each with its place in the file."""
    if _kind(path) == "pickle":
        yield nested_mappings(_load_pickle(path))
        return
    with ExitStack() as stack:
        if _kind(path) == "sharded":
            weight_map, metadata = _read_index(path)
            names = sorted(set(weight_map.values()))
        else:
            weight_map, metadata, names = None, {}, [path.name]
        files = {name: _open_shard(stack, path.parent / name) for name in names}
        shard_of: dict[str, str] = {}
        for name, file in files.items():
            for key in file.keys():  # noqa: SIM118
                if key in shard_of:
                    raise _error(path, f"{key!r} is in two shards, {shard_of[key]} and {name}")
                shard_of[key] = name
        if weight_map is not None and weight_map != shard_of:
            key = min(weight_map.items() ^ shard_of.items())[0]
            raise _error(path, f"does not list what its shards contain: {key!r}")
        yield [("", Shards(path.parent, files, shard_of, metadata))]


def _open_shard(stack: ExitStack, path: Path) -> Any:
    _check_regular(path)
    with _reading(path):
        return stack.enter_context(safe_open(str(path), "pt"))


class Shards(Mapping[str, Tensor]):
    """The tensors of one or more safetensors files, each read when it is accessed."""

    def __init__(
        self,
        folder: Path,
        files: dict[str, Any],
        shard_of: dict[str, str],
        index_metadata: dict[str, Any],
    ) -> None:
        self.folder, self.files, self.shard_of = folder, files, shard_of
        self.index_metadata = index_metadata

    def __getitem__(self, key: str) -> Tensor:
        name = self.shard_of[key]
        with _reading(self.folder / name):
            tensor: Tensor = self.files[name].get_tensor(key)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.shard_of)

    def __len__(self) -> int:
        return len(self.shard_of)

    def metadata(self, name: str) -> dict[str, str]:
        """Return the metadata of one file."""
        return self.files[name].metadata() or {}

    def outlines(self) -> dict[str, Tensor]:
        """Return meta tensors with the shapes and types of all tensors, without reading any."""
        return {key: self._outline(key) for key in self}

    def _outline(self, key: str) -> Tensor:
        name = self.shard_of[key]
        with _reading(self.folder / name):
            view = self.files[name].get_slice(key)
            if view.get_dtype() not in DTYPES:
                known = ", ".join(DTYPES)
                raise StateDictError(f"{key} has type {view.get_dtype()}; supported are {known}")
            return torch.empty(view.get_shape(), dtype=DTYPES[view.get_dtype()], device="meta")


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the weight map and the metadata of an index of shards."""
    _check_regular(path)
    try:
        index = json.loads(path.read_bytes())
        weight_map, metadata = index["weight_map"], index.get("metadata") or {}
        valid = isinstance(weight_map, dict) and isinstance(metadata, dict)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise _error(path, "is not an index of shards: expected JSON with a weight_map")
    for name in weight_map.values():
        if not (isinstance(name, str) and Path(name).name == name and name.endswith(WHOLE)):
            raise _error(path, f"names {name!r}; expected {WHOLE} files beside it")
    if not weight_map:
        raise _error(path, "lists no weights")
    return weight_map, metadata


def _load_pickle(path: Path) -> dict[Any, Any]:
    _check_regular(path)
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
            reason = f"contains {found[1]}, which needs code to load and is refused"
        else:
            reason = f"is damaged, or needs code to load, which is refused ({_reason(error)})"
        raise _error(path, f"{reason}; save its state dict alone and try again") from error
    if not isinstance(checkpoint, Mapping):
        raise _error(path, f"contains a {type(checkpoint).__name__}; expected a state dict")
    for _, state in nested_mappings(checkpoint):
        for key, value in state.items():
            if isinstance(value, Tensor) and _claimed_bytes(value) > size:
                raise _error(
                    path,
                    f"{key!r} claims {_claimed_bytes(value):,} bytes in a file of {size:,}",
                )
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
            raise _error(
                path, "has compressed entries: TorchScript? expected the output of torch.save"
            )
        bad = archive.testzip()
    if bad is not None:
        raise _error(path, f"is damaged: the checksum of {bad} does not match")


def _check_regular(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise _error(path, "is missing" if missing else _reason(error)) from error
    if stat.S_ISDIR(mode):
        raise _error(path, "is a folder; expected a checkpoint file")
    if not stat.S_ISREG(mode):
        raise _error(path, "is not a regular file")


def _kind(path: Path) -> Kind:
    if path.name.endswith(INDEX):
        return "sharded"
    if path.name.endswith(WHOLE):
        return "whole"
    if path.suffix in PICKLES:
        return "pickle"
    raise _error(path, f"expected one of {', '.join((*PICKLES, WHOLE, INDEX))}")


# — inspection —


def _loaded(state: State, weight: StoredWeight) -> StoredWeight:
    g_key, v_key, *_ = weight.keys
    return StoredWeight(
        weight.path, weight.format, v=state[v_key], g=state[g_key], is_log=weight.is_log
    )


def _summary(name: str, weight: StoredWeight) -> WeightSummary:
    v, g = weight.v, weight.parts.g.float().flatten()
    v = v.float() if v.dtype.itemsize == 1 else v
    dead, v_norm = g == 0, float("nan")
    dim: int | tuple[int, ...] | Literal["ambiguous"] | None
    try:
        units = units_of(weight)
    except StateDictError:
        dim = "ambiguous"
    else:
        dim = units.dim
        norm = functional.norm(v, units).flatten()
        dead, v_norm = dead | (norm == 0), norm.mean().item()
    return WeightSummary(
        name=name,
        format=weight.format,
        shape=tuple(v.shape),
        dim=dim,
        units=g.numel(),
        v_norm=v_norm,
        g=g.abs().mean().item(),
        dead=int(dead.sum()),
    )
