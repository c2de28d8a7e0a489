"""Checkpoint files: what is in them, and the same weights in another format.

Reads and writes .safetensors, whole or in shards with an index, and torch's .pt, .pth, .bin and
.ckpt. Nothing untrusted runs: pickles are loaded with ``weights_only=True`` or not at all. From
safetensors one weight at a time is held. Output appears whole or not at all.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weightnorm import functional, kernels
from weightnorm.lab.errors import FileError
from weightnorm.lab.files import write_atomically
from weightnorm.lab.safetensors_writer import DTYPES, Piece, write_safetensors
from weightnorm.state_dicts import (
    Dim,
    Entry,
    Format,
    StateDictError,
    convert_state_dict,
    entries,
    folded_weight,
    infer_axis,
    keys_of,
    log_mark,
    name_matcher,
    normalized_paths,
    plain_axis,
    walk,
)

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
WHOLE, INDEX = ".safetensors", ".safetensors.index.json"


@dataclass(frozen=True)
class WeightRow:
    """One normalized weight of a file."""

    name: str
    format: Format
    shape: tuple[int, ...]
    dim: int | None
    units: int
    v_norm: float
    """Mean ‖v‖ over the units."""
    g: float
    """Mean |g| over the units."""
    dead: int
    """Units with g = 0 or v = 0: nothing comes from them."""


def inspect_file(path: Path) -> tuple[list[WeightRow], int]:
    """The normalized weights of a checkpoint file, and the number of its other tensors."""
    rows, others = [], 0
    with _opened(path) as states:
        for place, state in states.items():
            paths = normalized_paths(state)
            for name, format in paths.items():
                rows.append(_row(f"{place}.{name}".lstrip("."), _entry(state, name, format)))
            taken = {key for name, format in paths.items() for key in keys_of(name, format)}
            others += sum(key not in taken and ".log_scale" not in key for key in state)
    return rows, others


def convert_file(
    source: Path, target: Path, to: Format, weights: tuple[str, ...] = (), dim: Dim = "infer"
) -> list[str]:
    """Write `source` in another format to `target`; returns the names of the normalized weights.

    `weights` are patterns of the plain weights to decompose, as for ``convert_state_dict``, and so
    is `dim`.
    """
    if _kind(source) != _kind(target):
        raise FileError(
            f"{source.name} is a {_kind(source)} file and {target.name} a {_kind(target)} one; "
            "conversion keeps the kind"
        )
    same = target.parent.resolve() == source.parent.resolve()
    if same and (target.name == source.name or _kind(source) == "sharded"):
        raise FileError(f"{target} would overwrite the input; choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if _kind(source) == "pickle":
            return _convert_pickle(source, target, to, weights, dim)
        return _convert_safetensors(source, target, to, weights, dim)
    except StateDictError as error:
        raise FileError(f"{source}: {error}") from error
    except OSError as error:
        raise FileError(f"cannot write {target}: {error.strerror or error}") from error


def _convert_pickle(
    source: Path, target: Path, to: Format, weights: tuple[str, ...], dim: Dim
) -> list[str]:
    before = _load_pickle(source)
    after = convert_state_dict(before, to, weights=weights, dim=dim)
    normalized = walk(before if to == "folded" else after)
    names = [
        f"{place}.{name}".lstrip(".") for place, state in normalized for name in entries(state)
    ]
    _refuse_nothing(names, to)
    memory = io.BytesIO()
    torch.save(after, memory)
    write_atomically(target, memory.getvalue())
    return names


def _convert_safetensors(
    source: Path, target: Path, to: Format, weights: tuple[str, ...], dim: Dim
) -> list[str]:
    with _opened(source) as states:
        state = states[""]
        assert isinstance(state, Shards)
        names, shards = _planned(state, to, weights, dim)
        _refuse_nothing(names, to)
        if _kind(source) == "whole":
            (pieces,) = shards.values()
            write_safetensors(target, pieces, state.metadata)
        else:
            shards = {file: pieces for file, pieces in shards.items() if pieces}
            for file, pieces in shards.items():
                write_safetensors(target.parent / file, pieces, state.metadata)
            index = {
                "metadata": {"total_size": sum(p.size for ps in shards.values() for p in ps)},
                "weight_map": {p.key: file for file, ps in shards.items() for p in ps},
            }
            write_atomically(target, json.dumps(index, indent=2).encode())
        return names


def _planned(
    state: Shards, to: Format, weights: tuple[str, ...], dim: Dim
) -> tuple[list[str], dict[str, list[Piece]]]:
    """The normalized weights, and what each shard will hold: a weight stays where its v was."""
    paths = normalized_paths(state)
    owner = {keys_of(name, format)[0]: (name, format) for name, format in paths.items()}
    silent = {keys_of(name, format)[1] for name, format in paths.items()}
    silent |= {log_mark(name) for name in paths}
    chosen = name_matcher(weights if to != "folded" else ())
    names = list(paths)
    shards: dict[str, list[Piece]] = {name: [] for name in state.shards}
    for key in state:
        if key in silent:
            continue
        if key in owner:
            name, format = owner[key]
            home = state.home[keys_of(name, format)[1]]
            shards[home] += _pieces(state, name, format, to, dim)
        elif chosen(key, state.outline(key)):
            names.append(key)
            shards[state.home[key]] += _taken_apart(state, key, to, dim)
        else:
            shards[state.home[key]].append(state.piece(key, key))
    return names, shards


def _refuse_nothing(names: list[str], to: Format) -> None:
    if not names and to != "folded":
        raise StateDictError(
            f"nothing to write as {to}: no weight is normalized, and no plain one was chosen; "
            "choose with --weights, such as --weights '*.weight'"
        )


def _pieces(state: Shards, name: str, format: Format, to: Format, dim: Dim) -> list[Piece]:
    g_key, v_key = keys_of(name, format)
    if to == "folded":
        v, entry = state.piece(v_key, name), partial(_entry, state, name, format)
        return [Piece(name, v.dtype, v.shape, lambda: folded_weight(entry(), dim))]
    new_g, new_v = keys_of(name, to)
    g = state.piece(g_key, new_g)
    return [
        Piece(new_g, g.dtype, g.shape, lambda: _entry(state, name, format).parts.g),
        state.piece(v_key, new_v),
    ]


def _taken_apart(state: Shards, key: str, to: Format, dim: Dim) -> list[Piece]:
    whole, (g_key, v_key) = state.piece(key, key), keys_of(key, to)
    axis = plain_axis(key, len(whole.shape), dim)
    shape = kernels.unit_shape(torch.Size(whole.shape), axis)
    return [
        Piece(g_key, whole.dtype, shape, lambda: functional.decompose(state[key], axis).g),
        Piece(v_key, whole.dtype, whole.shape, lambda: functional.decompose(state[key], axis).v),
    ]


class Shards(Mapping[str, Tensor]):
    """The tensors of one or more safetensors files, each read when it is asked for."""

    def __init__(self, files: dict[str, Any], home: dict[str, str]) -> None:
        self.shards, self.home = files, home
        self.metadata: dict[str, str] = next(iter(files.values())).metadata() or {}

    def __getitem__(self, key: str) -> Tensor:
        tensor: Tensor = self.shards[self.home[key]].get_tensor(key)
        return tensor

    def __contains__(self, key: object) -> bool:
        return key in self.home

    def __iter__(self) -> Iterator[str]:
        return iter(self.home)

    def __len__(self) -> int:
        return len(self.home)

    def outline(self, key: str) -> Tensor:
        """A tensor's shape and type, without its numbers."""
        piece = self.piece(key, key)
        return torch.empty(piece.shape, dtype=DTYPES[piece.dtype], device="meta")

    def piece(self, key: str, new: str) -> Piece:
        """A tensor to be written as it is under a new key, without reading it now."""
        view = self.shards[self.home[key]].get_slice(key)
        if view.get_dtype() not in DTYPES:
            raise StateDictError(f"{key} is of type {view.get_dtype()}, which is not known here")
        return Piece(new, view.get_dtype(), tuple(view.get_shape()), partial(self.__getitem__, key))


@contextmanager
def _opened(path: Path) -> Iterator[dict[str, Mapping[str, Any]]]:
    """The state dicts of a file by their place in it."""
    kind = _kind(path)
    if not path.exists():
        raise FileError(f"{path} is missing")
    if kind == "pickle":
        yield dict(walk(_load_pickle(path)))
        return
    try:
        with ExitStack() as stack:
            home = _weight_map(path) if kind == "sharded" else {}
            names = sorted(set(home.values())) or [path.name]
            files = {
                name: stack.enter_context(safe_open(str(path.parent / name), "pt"))
                for name in names
            }
            actual = {key: name for name, file in files.items() for key in file.keys()}  # noqa: SIM118
            if home and home != actual:
                raise FileError(f"{path} does not list what its shards hold")
            yield {"": Shards(files, home or actual)}
    except SafetensorError as error:
        raise FileError(f"{path} is damaged: {error}") from error
    except FileNotFoundError as error:
        raise FileError(f"{path} names a shard that is missing: {error}") from error


def _weight_map(path: Path) -> dict[str, str]:
    try:
        home = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"{path} is not an index of shards: {error!r}") from error
    if not isinstance(home, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in home.values()
    ):
        raise FileError(f"{path} names shards outside its folder, which is refused")
    return home


def _load_pickle(path: Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():  # torch warns of pickles it then refuses
            warnings.simplefilter("ignore", UserWarning)
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileError(f"{path} is missing") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileError(
            f"{path} is damaged, or needs code to load, which is refused ({reason}); "
            "save its state dict alone and try again"
        ) from None
    if not isinstance(checkpoint, Mapping):
        raise FileError(f"{path} holds a {type(checkpoint).__name__}; expected a state dict")
    return dict(checkpoint)


def _kind(path: Path) -> str:
    if path.name.endswith(INDEX):
        return "sharded"
    if path.name.endswith(WHOLE):
        return "whole"
    if path.suffix in PICKLES:
        return "pickle"
    raise FileError(f"{path.name}: expected one of {', '.join((*PICKLES, WHOLE, INDEX))}")


def _entry(state: Mapping[str, Any], name: str, format: Format) -> Entry:
    g, v = keys_of(name, format)
    return Entry(name, format, state[v], state[g], log_mark(name) in state)


def _row(name: str, entry: Entry) -> WeightRow:
    v, g = entry.parts
    dim, groups = infer_axis(entry)
    norm = functional.norm(v, dim, groups=groups).flatten()
    return WeightRow(
        name=name,
        format=entry.format,
        shape=tuple(v.shape),
        dim=dim,
        units=g.numel(),
        v_norm=norm.mean().item(),
        g=g.float().abs().mean().item(),
        dead=int(((g.flatten() == 0) | (norm == 0)).sum()),
    )
