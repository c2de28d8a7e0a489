"""Convert state dicts of weight-normalized models.

A normalized weight is stored in one of three formats:

- ``"parametrize"``: ``parametrizations.weight.original0`` = g and ``….original1`` = v, the keys of
  ``torch.nn.utils.parametrizations.weight_norm`` and of this library
- ``"hook"``: ``weight_g`` and ``weight_v``, the keys of ``torch.nn.utils.weight_norm``
- ``"folded"``: plain ``weight``

Conversion reads keys, shapes and types; it needs no model. Between the first two formats it
renames. Folding computes w = g·v/‖v‖. Decomposing a plain weight sets v = w and g = ‖w‖, which
folds back bit for bit.

Note [which pairs are weight norm]
    Names alone do not decide: other tensors have such names too, as ``bias_v`` of
    ``nn.MultiheadAttention``. A pair counts as weight norm if both are real floating-point tensors,
    v has two or more dimensions, and g has the shape of a norm of v: one number, or one for each
    index along some axes, but not all (with 1 along all others; along one axis also flat). All
    other tensors are copied as they are.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from weightnorm import _units, functional
from weightnorm._dtensor import any_true
from weightnorm._parametrize import log_key, part_keys
from weightnorm._units import Parts, Units, in_float64

Format = Literal["parametrize", "hook", "folded"]
FORMATS: tuple[Format, ...] = ("parametrize", "hook", "folded")
Dim = _units.Dim | Literal["infer"]
State = Mapping[Any, Any]

_PARAMETRIZED = re.compile(r"(.*\.)?parametrizations\.([^.]+)\.(.+)", re.DOTALL)


class StateDictError(ValueError):
    """A state dict that cannot be converted, with the reason."""


# — stored weights —


@dataclass(frozen=True)
class StoredWeight:
    """A normalized weight in a state dict: its name, its format and its stored parts."""

    path: str
    """Name of the weight itself, as in ``encoder.0.weight``."""
    format: Format
    v: Tensor
    g: Tensor
    """g, or s = log g if `is_log`."""
    is_log: bool = False

    @property
    def parts(self) -> Parts:
        return Parts(v=self.v, g=self.g.exp() if self.is_log else self.g)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of g and v, and of the log-scale marker if there is one."""
        return (*part_keys(self.path, self.format), *([log_key(self.path)] if self.is_log else []))


def stored_weights(state: State, dim: Dim = "infer") -> list[StoredWeight]:
    """Find the normalized weights of a state dict. See Note [which pairs are weight norm].

    >>> state = {"0.weight_g": torch.ones(3, 1), "0.weight_v": torch.ones(3, 2)}
    >>> [weight.path for weight in stored_weights(state)]
    ['0.weight']
    """
    named = (_path_of_g(key) for key in state if isinstance(key, str))
    pairs = (_stored_pair(state, *found) for found in named if found)
    return [pair for pair in pairs if pair and _fitting_units(pair, dim)]


def _path_of_g(key: str) -> tuple[str, Format] | None:
    """Return the path and format of the weight whose g has this key; None if no g has."""
    if key.endswith("_g"):
        path = key[:-2]
        return (path, "hook") if path.rpartition(".")[2] else None
    match = _PARAMETRIZED.fullmatch(key)
    if match and match[3] == "original0":
        return (match[1] or "") + match[2], "parametrize"
    return None


def _stored_pair(state: State, path: str, format: Format) -> StoredWeight | None:
    """Return the pair under the keys of `path`, if both are real floating-point tensors."""
    g, v = (state.get(key) for key in part_keys(path, format))
    if not (_is_real(g) and _is_real(v)):
        return None
    is_log = format == "parametrize" and log_key(path) in state
    return StoredWeight(path, format, v=v, g=g, is_log=is_log)


def _is_real(x: Any) -> TypeGuard[Tensor]:
    dense = isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested
    return dense and x.is_floating_point() and not is_lazy(x)


def _fitting_units(weight: StoredWeight, dim: Dim) -> list[Units]:
    """Return all units for which g has the shape of a norm of v."""
    v, g = weight.v.shape, weight.g.shape
    if len(v) < 2:
        return []
    if not g or (dim is None and math.prod(g) == 1):
        return [Units(None)]
    if len(g) != len(v):
        return [Units(axis) for axis in range(len(v)) if g == v[axis : axis + 1]]
    for axis in range(len(v)):
        if g == Units(axis).shape(v):
            return [Units(axis)]
    if weight.format == "hook" and g == v:
        return []  # a g as large as v: only specific names are believed
    kept = tuple(axis for axis in range(len(v)) if g[axis] > 1)
    if 1 < len(kept) < len(v) and g == Units(kept).shape(v):
        return [Units(kept)]
    if len(v) > 2 and g[0] > 1 and v[0] % g[0] == 0 and g == Units(1, g[0]).shape(v):
        return [Units(1, g[0])]  # a grouped transposed convolution
    return []


def units_of(weight: StoredWeight, dim: Dim = "infer") -> Units:
    """Return the units by the shapes; `dim` decides if several axes fit."""
    fitting = _fitting_units(weight, dim)
    if len(fitting) > 1 and dim != "infer":
        fitting = [units for units in fitting if units == _units_along(dim, weight.path, weight.v)]
    if len(fitting) == 1:
        return fitting[0]
    axes = [units.dim for units in fitting]
    reason = f"could be along any of the axes {axes}; choose with dim" if axes else "fits no axis"
    raise StateDictError(
        f"{weight.path}: g of shape {tuple(weight.g.shape)} beside v of shape "
        f"{tuple(weight.v.shape)} {reason}"
    )


def _units_along(dim: Dim, path: str, w: Tensor) -> Units:
    """Return the units of a weight along the axes of `dim`; along 0 if it is to be inferred."""
    try:
        return Units(0 if dim == "infer" else dim).of(w.shape)
    except IndexError as error:
        raise StateDictError(f"{path}: {error}") from None


@torch.no_grad()
def fold(weight: StoredWeight, dim: Dim = "infer") -> Tensor:
    """Compute w = g·v/‖v‖, to the bit the same on every device; decomposing is undone exactly."""
    units = units_of(weight, dim)
    g = in_float64(weight.g).exp() if weight.is_log else weight.g
    return functional.fold(v=weight.v, g=g.reshape(units.shape(weight.v.shape)), units=units, eps=0)


@torch.no_grad()
def decompose(path: str, w: Tensor, dim: Dim = "infer") -> Parts:
    """Return v = w and g = ‖w‖ (for zero units any direction and g = 0); exact when folded."""
    units = _units_along(dim, path, w)
    v, g = functional.decompose(w, units)
    g = units.exact_norm(w).to(w)
    zero = units.sum((w != 0).float()) == 0  # functional.decompose also replaces short ones
    finite = units.sum(w.isfinite().logical_not().float()) == 0
    if any_true(finite & g.isfinite().logical_not()):
        raise StateDictError(f"{path}: ‖w‖ is too large for {w.dtype}; use a wider type")
    return Parts(v=torch.where(units.spread(zero, w), v, w), g=g)


# — conversion —


def convert_state_dict(
    state: State, to: Format, *, weights: str | Iterable[str] = (), dim: Dim = "infer"
) -> dict[Any, Any]:
    """Return a state dict with every normalized weight in the format `to`; all else as it is.

    A model normalized by this library loads all three formats by its own ``load_state_dict``. For
    other models choose the format that has their keys: ``"folded"`` for a plain model,
    ``"parametrize"`` or ``"hook"`` for torch's two functions. ``"folded"`` also loads into a
    normalized model whose units lie along another axis.

    Args:
        state: a state dict. ``weightnorm convert`` also converts those inside a checkpoint.
        to: ``"parametrize"``, ``"hook"`` or ``"folded"``.
        weights: plain weights to decompose: a name or pattern such as ``"*.weight"``, or several.
            A pattern that matches nothing is an error.
        dim: the kept axis or axes. They are inferred from the shape of g, so `dim` is needed only
            for a flat g beside a square v, and for plain weights that keep another axis than 0.

    A log-scale is converted to linear g. Conversion and its inverse are exact. If two tensors would
    get the same key, or the result could be misread, a StateDictError names both.

    >>> from torch import nn
    >>> from weightnorm import weight_norm
    >>> state = convert_state_dict(weight_norm(nn.Linear(2, 3)).state_dict(), to="folded")
    >>> nn.Linear(2, 3).load_state_dict(state)
    <All keys matched successfully>
    """
    _refuse_nested(state)
    matching = matching_weights(state, [weights] if isinstance(weights, str) else weights)
    for pattern, names in matching.items():
        if not names:
            raise StateDictError(f"weights={pattern!r} matches no weight (a matrix or more)")
    return convert(state, to, set().union(*matching.values()), dim).state


def _refuse_nested(state: State) -> None:
    """Raise if state dicts lie inside this one: they would be copied unconverted."""
    inner = [
        f"state[{key!r}]"
        for key, value in state.items()
        if isinstance(value, Mapping) and not str(key).endswith("_extra_state")
        if any(isinstance(x, (Tensor, Mapping)) for x in value.values())
    ]
    if inner:
        raise StateDictError(
            f"found other mappings inside; pass the state dict itself, one of {', '.join(inner)}"
        )


def matching_weights(state: State, patterns: Iterable[str], place: str = "") -> dict[str, set[str]]:
    """Return the names of the weights, plain or normalized, that match each pattern.

    `place` is where the state dict is in its file; a pattern matches with or without it.
    """
    stored = stored_weights(state)
    parts = {key for weight in stored for key in weight.keys}
    names = {weight.path for weight in stored} | {
        key
        for key, value in state.items()
        if isinstance(key, str) and key not in parts
        if _is_real(value) and value.ndim > 1 and value.numel()
    }
    full = {name: f"{place}.{name}".lstrip(".") for name in names}

    def matches(name: str, pattern: str) -> bool:  # a name may contain [ or *
        return name == pattern or fnmatchcase(name, pattern)

    return {
        pattern: {x for x in names if matches(x, pattern) or matches(full[x], pattern)}
        for pattern in patterns
    }


@dataclass(frozen=True)
class Conversion:
    """A converted state dict."""

    state: dict[Any, Any]
    sources: dict[Hashable, Hashable]
    """For each of its keys the one that it replaces."""
    names: list[str]
    """The weights that were folded, renamed or decomposed."""


def convert(state: State, to: Format, selected: set[str], dim: Dim = "infer") -> Conversion:
    """Convert a state dict; `selected` are the plain weights to decompose."""
    if to not in FORMATS:
        raise StateDictError(f"to={to!r} is unknown; expected one of {FORMATS}")
    stored = {key: weight for weight in stored_weights(state, dim) for key in weight.keys}
    new: Any = {}
    sources: dict[Hashable, Hashable] = {}
    names: list[str] = []
    for key, value in state.items():
        items = [(key, key, value)]
        if key in stored:
            weight = stored[key]
            if key != weight.keys[0]:
                continue  # the whole weight is placed where its g was
            names.append(weight.path)
            items = _stored_as(to, weight, state, dim)
        elif key in selected and to != "folded":
            names.append(key)
            v, g = decompose(key, value, dim)
            g_key, v_key = part_keys(key, to)
            items = [(g_key, key, g), (v_key, key, v)]
        for new_key, source, tensor in items:
            if new_key in sources:
                raise StateDictError(
                    f"{sources[new_key]!r} and {source!r} would both become {new_key!r}; "
                    "remove or rename one of them"
                )
            sources[new_key], new[new_key] = source, tensor
    found = stored_weights(new, dim)
    _refuse_misreadings(found, [] if to == "folded" else names)
    for weight in found:
        if not set(weight.keys) <= state.keys():  # its keys are new
            _refuse_further_parametrizations(new, weight)
    if hasattr(state, "_metadata"):  # the versions of modules, which load_state_dict reads
        new = OrderedDict(new)
        new._metadata = state._metadata
    return Conversion(new, sources, names)


def _stored_as(
    to: Format, weight: StoredWeight, state: State, dim: Dim
) -> list[tuple[str, str, Tensor]]:
    """Return (new key, key, value) of a normalized weight in the format `to`."""
    g_key, v_key, *_ = weight.keys
    if to != weight.format or weight.is_log:
        _refuse_further_parametrizations(state, weight)
    if to == "folded":
        return [(weight.path, v_key, fold(weight, dim))]
    new_g, new_v = part_keys(weight.path, to)
    return [(new_g, g_key, weight.parts.g), (new_v, v_key, weight.v)]


def _refuse_further_parametrizations(state: State, weight: StoredWeight) -> None:
    """Refuse a weight that more than weight norm computes: folding would drop the rest."""
    if weight.format != "parametrize":
        return
    prefix = weight.keys[0].removesuffix("original0")
    further = re.compile(re.escape(prefix) + r"\d+\.")  # the modules of a ParametrizationList
    for key in state:
        if isinstance(key, str) and further.match(key) and key != log_key(weight.path):
            raise StateDictError(
                f"{weight.path}: {key!r} belongs to a further parametrization of the weight; "
                "remove it from the model before saving"
            )


def _refuse_misreadings(found: list[StoredWeight], expected: list[str]) -> None:
    """Refuse a result in which other weights are `found` than those that were written."""
    for weight in found:
        if weight.path not in expected or weight.is_log:  # no log-scale is written
            raise StateDictError(
                f"{' and '.join(map(repr, weight.keys))} of the result would be read as the "
                f"normalized weight {weight.path!r}; rename one of them"
            )
    for path in sorted(set(expected) - {weight.path for weight in found}):
        raise StateDictError(f"{path}: g has the shape of v; it could not be recognized again")
