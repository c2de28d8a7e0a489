"""State dicts of weight-normalized models, in three formats, and the ways between them.

- ``"parametrize"``: torch's newer keys and ours, ``parametrizations.weight.original0`` = g and
  ``…original1`` = v
- ``"hook"``: torch's older keys, ``weight_g`` and ``weight_v``
- ``"folded"``: plain ``weight``

Conversion looks at keys and shapes alone: no model, no code of one. Between the first two it
renames; folding computes w = g·v/‖v‖; unfolding sets v = w and g = ‖w‖, which folds back bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weightnorm import functional, kernels
from weightnorm.functional import Parts
from weightnorm.inspection import NormalizedWeight, find_normalized

Format = Literal["parametrize", "hook", "folded"]
FORMATS: tuple[Format, ...] = ("parametrize", "hook", "folded")
Dim = int | Literal["infer"] | None
State = Mapping[str, Any]


class StateDictError(ValueError):
    """A state dict that cannot be converted or loaded, with the reason."""


@dataclass(frozen=True)
class Entry:
    """A normalized weight in a state dict: where it is, in which format, and its stored parts."""

    path: str
    """Name of the weight itself, as in ``encoder.0.weight``."""
    format: Format
    v: Tensor
    g: Tensor
    """g, or s for a log-scale."""
    is_log: bool = False

    @property
    def parts(self) -> Parts:
        return Parts(self.v, self.g.exp() if self.is_log else self.g)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys this entry takes up."""
        g, v = keys_of(self.path, self.format)
        return (g, v, *([log_mark(self.path)] if self.is_log else []))


def keys_of(path: str, format: Format) -> tuple[str, str]:
    """The keys of g and v of the weight at `path`."""
    if format == "hook":
        return f"{path}_g", f"{path}_v"
    prefix, _, name = path.rpartition(".")
    inner = ".".join(filter(None, [prefix, "parametrizations", name]))
    return f"{inner}.original0", f"{inner}.original1"


def entries(state: State) -> dict[str, Entry]:
    """Every normalized weight of a state dict, by the name of the weight.

    >>> from weightnorm import weight_norm
    >>> list(entries(nn.Sequential(weight_norm(nn.Linear(2, 3))).state_dict()))
    ['0.weight']
    """
    found = {}
    for path, format in normalized_paths(state).items():
        g, v = (state[key] for key in keys_of(path, format))
        if isinstance(v, Tensor) and isinstance(g, Tensor):
            found[path] = Entry(path, format, v, g, log_mark(path) in state)
    return found


def normalized_paths(keys: Collection[str]) -> dict[str, Format]:
    """The weights that a state dict's keys show to be normalized, and in which format."""
    found: dict[str, Format] = {}
    for key in keys:
        path = _path_of_g(key)
        format: Format = "hook" if key.endswith("_g") else "parametrize"
        if path is not None and keys_of(path, format)[1] in keys:
            found[path] = format
    return found


def convert_state_dict(
    state: State,
    to: Format,
    *,
    weights: Iterable[str] | Callable[[str, Tensor], bool] = (),
    dim: Dim = "infer",
) -> dict[str, Any]:
    """A state dict with every normalized weight in the format `to`; all else as it is.

    Args:
        state: a state dict, or a checkpoint that holds some deeper down, as under ``"state_dict"``,
            ``"model"`` or ``"generator"``; weights are found wherever they are.
        to: ``"parametrize"``, ``"hook"`` or ``"folded"``.
        weights: plain weights to decompose, by name or pattern, such as ``"*.weight"``; or a
            function of name and tensor. None by default: a plain weight does not say whether it
            should be normalized.
        dim: the kept axis. It is read off g's shape, so it is needed only where g has lost it (a
            flat g beside a square v) and for plain weights that keep another axis than 0.

    A log-scale comes out as linear g. Conversions there and back are exact.

    >>> from weightnorm import weight_norm
    >>> list(convert_state_dict(weight_norm(nn.Linear(2, 3)).state_dict(), to="hook"))
    ['bias', 'weight_g', 'weight_v']
    """
    if to not in FORMATS:
        near = get_close_matches(str(to), FORMATS, 1) or FORMATS
        raise StateDictError(f"to={to!r} is unknown; expected one of {FORMATS}: {near[0]!r}?")
    chosen = weights if callable(weights) else name_matcher(tuple(weights))
    return _convert(state, to, chosen, dim)


def _convert(state: State, to: Format, chosen: Any, dim: Any) -> dict[str, Any]:
    found = entries(state)
    owner = {key: entry for entry in found.values() for key in entry.keys}
    out: dict[str, Any] = {}
    for key, value in state.items():
        entry = owner.get(key)
        if entry is not None:
            if key == entry.keys[0]:  # the whole entry goes where its g was
                out.update(_written(entry, to, dim))
        elif isinstance(value, Tensor):
            if to != "folded" and chosen(key, value):
                v, g = functional.decompose(value, plain_axis(key, value.ndim, dim))
                out.update(zip(keys_of(key, to), (g, v), strict=True))
            else:
                out[key] = value
        elif isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
            out[key] = _convert(value, to, chosen, dim)
        else:
            out[key] = value
    return out


def _written(entry: Entry, to: Format, dim: Any) -> dict[str, Tensor]:
    if to == "folded":
        return {entry.path: folded_weight(entry, dim)}
    g, v = keys_of(entry.path, to)
    return {g: entry.parts.g, v: entry.v}


def folded_weight(entry: Entry, dim: Dim = "infer") -> Tensor:
    """w = g·v/‖v‖; v itself for a unit whose g is ‖v‖ to the bit, so that unfolding is undone."""
    v, g = entry.parts
    axis, groups = infer_axis(entry, dim)
    shape = kernels.unit_shape(v.shape, axis, groups)
    g = g.reshape(shape)
    w = kernels.formula(v, g, axis, groups)
    same = functional.norm(v, axis, groups=groups).to(g.dtype) == g
    blocks = kernels.block_shape(v.shape, axis, groups)
    untouched = same.reshape(blocks[0], 1, blocks[2], 1).expand(blocks).reshape(v.shape)
    return torch.where(untouched, v, w)


def plain_axis(path: str, ndim: int, dim: Dim) -> int | None:
    """The axis to keep of a plain weight: 0, unless told otherwise."""
    try:
        return functional.resolve_dim(0 if dim == "infer" else dim, ndim)
    except IndexError as error:
        raise StateDictError(f"{path}: {error}") from None


def infer_axis(entry: Entry, dim: Dim = "infer") -> tuple[int | None, int]:
    """The kept axis and the groups, read off the shapes; `dim` decides where they leave it open."""
    v, g = entry.v, entry.g
    if g.ndim == 0 or (dim is None and g.numel() == 1):
        return None, 1
    if g.ndim == v.ndim:
        for axis in range(v.ndim):
            if g.shape == kernels.unit_shape(v.shape, axis):
                return axis, 1
        groups = g.shape[0]
        if v.ndim > 1 and v.shape[0] % groups == 0:
            grouped = kernels.unit_shape(v.shape, 1, groups)
            if g.shape == grouped:
                return 1, groups
    fitting = [axis for axis in range(v.ndim) if g.shape == v.shape[axis : axis + 1]]
    if len(fitting) > 1 and dim != "infer":
        fitting = [axis for axis in fitting if axis == plain_axis(entry.path, v.ndim, dim)]
    if len(fitting) == 1:
        return fitting[0], 1
    reason = (
        f"could lie along any of the axes {fitting}; say which with dim"
        if fitting
        else "fits none of its axes"
    )
    raise StateDictError(
        f"{entry.path}: g of shape {tuple(g.shape)} beside v of shape {tuple(v.shape)} {reason}"
    )


def load_state_dict(model: nn.Module, state: State, strict: bool = True) -> list[str]:
    """Load a state dict of any format into a model of any flavour, plain ones included.

    Returns the names of the weights that were converted on the way. With ``strict``, weights that
    are missing or left over are an error that names the weights, whatever keys they come under.

    >>> from weightnorm import weight_norm
    >>> plain = nn.Linear(2, 3)
    >>> load_state_dict(weight_norm(nn.Linear(2, 3)), plain.state_dict())
    ['weight']
    """
    own = {site.path: site for site in find_normalized(model)}
    found = entries(state)
    fitted: dict[str, Any] = {}
    owner = {key: entry for entry in found.values() for key in entry.keys}
    converted = []
    for key, value in state.items():
        entry = owner.get(key)
        if entry is not None and key != entry.keys[0]:
            continue
        path = key if entry is None else entry.path
        site = own.get(path)
        if site is None:
            fitted[path] = value if entry is None else folded_weight(entry)
            changed = entry is not None
        else:
            fitted.update(_for_site(site, entry, value))
            changed = entry is None or set(entry.keys) != set(_site_keys(site))
        if changed:
            converted.append(path)
    expected = set(model.state_dict())
    missing, unexpected = sorted(expected - set(fitted)), sorted(set(fitted) - expected)
    if strict and (missing or unexpected):
        raise StateDictError(_mismatch(model, missing, unexpected))
    model.load_state_dict(fitted, strict=False)
    return converted


def _for_site(site: NormalizedWeight, entry: Entry | None, value: Any) -> dict[str, Tensor]:
    """The keys of a normalized weight of the model, from an entry or a plain weight."""
    v_shape, g_shape = site.stored.v.shape, site.stored.g.shape
    if entry is not None and entry.v.shape == v_shape and _same_units(entry.g, site.stored.g):
        v, g = entry.parts
        stored = (
            site.parametrization.stored(g.reshape(g_shape)) if site.is_log else g.reshape(g_shape)
        )
        stored = entry.g.reshape(g_shape) if site.is_log and entry.is_log else stored
    else:
        weight = value if entry is None else folded_weight(entry)
        if weight.shape != v_shape:
            raise StateDictError(
                f"{site.path} has shape {tuple(weight.shape)} in the checkpoint, "
                f"{tuple(v_shape)} in the model"
            )
        v, stored = site.decomposed(weight)
    g_key, v_key, *mark = _site_keys(site)
    return {g_key: stored, v_key: v, **{key: torch.tensor(True) for key in mark}}


def _same_units(g: Tensor, own: Tensor) -> bool:
    """Whether both g are of the same units. A flat one has only their number to say."""
    return g.shape == own.shape or (g.ndim == 1 and g.numel() == own.numel())


def _site_keys(site: NormalizedWeight) -> tuple[str, ...]:
    format: Format = "hook" if site.parametrization is None else "parametrize"
    mark = [log_mark(site.path)] if site.is_log else []
    return (*keys_of(site.path, format), *mark)


def _mismatch(model: nn.Module, missing: list[str], unexpected: list[str]) -> str:
    path_of = {
        key: path
        for path, format in normalized_paths(model.state_dict()).items()
        for key in (*keys_of(path, format), log_mark(path))
    }
    lines = [f"the checkpoint does not fit {type(model).__name__}"]
    if missing:
        names = dict.fromkeys(path_of.get(key, key) for key in missing)
        lines.append(f"  missing: {', '.join(names)}")
    if unexpected:
        lines.append(f"  left over: {', '.join(unexpected)}")
    return "\n".join(lines)


def _path_of_g(key: str) -> str | None:
    """The weight whose g this key holds; None if it holds no g."""
    if key.endswith("_g"):
        return key[:-2]
    if not key.endswith(".original0"):
        return None
    *prefix, marker, name, _ = ["", *key.split(".")]
    if marker != "parametrizations":
        return None
    return ".".join([*filter(None, prefix), name])


def log_mark(path: str) -> str:
    """The key that marks a log-scale."""
    return keys_of(path, "parametrize")[0].removesuffix("original0") + "0.log_scale"


def name_matcher(patterns: tuple[str, ...]) -> Callable[[str, Tensor], bool]:
    """Whether a plain tensor is a weight that one of the patterns names."""

    def chosen(name: str, tensor: Tensor) -> bool:
        fits = any(fnmatchcase(name, pattern) for pattern in patterns)
        return fits and tensor.ndim > 1 and tensor.is_floating_point()

    return chosen


def walk(state: State, path: str = "") -> Iterator[tuple[str, State]]:
    """Every mapping in a checkpoint that holds tensors, with its place."""
    if any(isinstance(value, Tensor) for value in state.values()):
        yield path, state
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from walk(value, f"{path}.{key}".lstrip("."))
