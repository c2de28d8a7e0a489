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

Note [conversion is planned first]
    ``plan_conversion`` decides from shapes and types what each new key will hold, and refuses
    results that would lose a tensor or be misread. Only then is anything computed. Files are
    converted by the same plan, one tensor at a time.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeGuard, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from weightnorm import _units, functional
from weightnorm._dtensor import any_true
from weightnorm._units import Parts, Units, in_float64

Format = Literal["parametrize", "hook", "folded"]
FORMATS: tuple[Format, ...] = ("parametrize", "hook", "folded")
Dim = _units.Dim | Literal["infer"]
State = Mapping[Any, Any]
Weights = str | Iterable[str] | Callable[[str, Tensor], bool]

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


def part_keys(path: str, format: Format) -> tuple[str, str]:
    """Return the keys of g and v of the weight at `path`.

    >>> part_keys("encoder.weight", "hook")
    ('encoder.weight_g', 'encoder.weight_v')
    """
    if format == "hook":
        return f"{path}_g", f"{path}_v"
    prefix, dot, name = path.rpartition(".")
    inner = f"{prefix}{dot}parametrizations.{name}"
    return f"{inner}.original0", f"{inner}.original1"


def log_key(path: str) -> str:
    """Return the key that marks a log-scale."""
    return part_keys(path, "parametrize")[0].removesuffix("original0") + "0.log_scale"


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


# — folding and decomposing —


@torch.no_grad()
def fold(weight: StoredWeight, dim: Dim = "infer") -> Tensor:
    """Compute w = g·v/‖v‖, to the bit the same on every device; decomposing is undone exactly."""
    units = units_of(weight, dim)
    g = in_float64(weight.g).exp() if weight.is_log else weight.g
    return functional.fold(v=weight.v, g=g.reshape(units.shape(weight.v.shape)), units=units, eps=0)


@torch.no_grad()
def _decompose(path: str, w: Tensor, units: Units) -> Parts:
    """Return v = w and g = ‖w‖ (for zero units any direction and g = 0); exact when folded."""
    v, g = functional.decompose(w, units)
    if w.is_meta:
        return Parts(v=v, g=g)
    g = units.exact_norm(w).to(w)
    zero = units.sum((w != 0).float()) == 0  # functional.decompose also replaces short ones
    finite = units.sum(w.isfinite().logical_not().float()) == 0
    if any_true(finite & g.isfinite().logical_not()):
        raise StateDictError(f"{path}: ‖w‖ is too large for {w.dtype}; use a wider type")
    return Parts(v=torch.where(units.spread(zero, w), v, w), g=g)


# — conversion —


@dataclass(frozen=True)
class PlannedTensor:
    """An item of a converted state dict: where it comes from and how it is computed."""

    key: Hashable
    source: Hashable
    """The key that it replaces."""
    outline: Any
    """A tensor of its shape and type, or the value itself if that is not a tensor."""
    compute: Callable[[State], Any]
    """The value, given the state dict."""


@dataclass(frozen=True)
class Conversion:
    """The plan of one state dict's conversion."""

    names: list[str]
    """The weights that are folded, renamed or decomposed."""
    tensors: list[PlannedTensor]


def convert_state_dict(
    state: State, to: Format, *, weights: Weights = (), dim: Dim = "infer"
) -> dict[Any, Any]:
    """Return a state dict with every normalized weight in the format `to`; all else as it is.

    A model normalized by this library loads all three formats by its own ``load_state_dict``. For
    other models choose the format that has their keys: ``"folded"`` for a plain model,
    ``"parametrize"`` or ``"hook"`` for torch's two functions. ``"folded"`` also loads into a
    normalized model whose units lie along another axis.

    Args:
        state: a state dict. ``weightnorm convert`` also converts those inside a checkpoint.
        to: ``"parametrize"``, ``"hook"`` or ``"folded"``.
        weights: plain weights to decompose: a name or pattern such as ``"*.weight"``, several, or a
            function of name and tensor. A pattern that matches nothing is an error.
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
    plan = plan_conversion(state, to, weights, dim)
    result: Any = {planned.key: planned.compute(state) for planned in plan.tensors}
    if hasattr(state, "_metadata"):  # the versions of modules, which load_state_dict reads
        result = OrderedDict(result)
        result._metadata = state._metadata
    return cast(dict[Any, Any], result)


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


def plan_conversion(
    state: State, to: Format, weights: Weights = (), dim: Dim = "infer"
) -> Conversion:
    """Plan the conversion of a state dict, which may hold meta tensors, without computing."""
    if to not in FORMATS:
        raise StateDictError(f"to={to!r} is unknown; expected one of {FORMATS}")
    stored = {key: weight for weight in stored_weights(state, dim) for key in weight.keys}
    selected = _selected(state, stored, weights)
    names: list[str] = []
    tensors: list[PlannedTensor] = []
    for key, value in state.items():
        weight = stored.get(key)
        if weight is not None:
            if key == weight.keys[0]:  # the whole weight is placed where its g was
                names.append(weight.path)
                tensors += _plan_stored(state, weight, to, dim)
        elif key in selected and to != "folded":
            names.append(key)
            tensors += _plan_decomposed(key, value, to, dim)
        else:
            tensors.append(_plan_copy(key, key, value))
    _refuse_collisions(tensors)
    outline = {planned.key: planned.outline for planned in tensors}
    found = stored_weights(outline, dim)
    _refuse_misreadings(found, [] if to == "folded" else names)
    for weight in found:
        if not set(weight.keys) <= state.keys():  # its keys are new
            _refuse_further_parametrizations(outline, weight)
    return Conversion(names, tensors)


def _selected(state: State, stored: Mapping[Any, StoredWeight], weights: Weights) -> set[str]:
    """Return the names of the plain weights to decompose."""
    plain = {
        key: value
        for key, value in state.items()
        if isinstance(key, str) and isinstance(value, Tensor) and key not in stored
    }
    if callable(weights):
        return {name for name, value in plain.items() if weights(name, value)}
    matrices = {name for name, value in plain.items() if _is_real(value) and value.ndim > 1}
    names = matrices | {weight.path for weight in stored.values()}
    selected: set[str] = set()
    for pattern in [weights] if isinstance(weights, str) else weights:
        # A name may contain [ or *.
        matching = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not matching:
            raise StateDictError(f"weights={pattern!r} matches no weight (a matrix or more)")
        selected |= matching & matrices
    return selected


def _plan_copy(new: Hashable, key: Hashable, value: Any) -> PlannedTensor:
    return PlannedTensor(new, key, value, lambda state: state[key])


def _plan_stored(
    state: State, weight: StoredWeight, to: Format, dim: Dim
) -> Iterator[PlannedTensor]:
    if to == weight.format and not weight.is_log:
        for key in weight.keys:
            yield _plan_copy(key, key, state[key])
        return
    _refuse_further_parametrizations(state, weight)
    path, format, (g_key, v_key, *_) = weight.path, weight.format, weight.keys

    def read(state: State) -> StoredWeight:
        return StoredWeight(path, format, v=state[v_key], g=state[g_key], is_log=weight.is_log)

    if to == "folded":
        _refuse_narrow(path, weight.v, weight.g)
        units_of(weight, dim)
        yield PlannedTensor(path, v_key, weight.v, lambda state: fold(read(state), dim))
        return
    if weight.is_log:
        _refuse_narrow(path, weight.g)
    new_g, new_v = part_keys(path, to)
    yield PlannedTensor(new_g, g_key, weight.g, lambda state: read(state).parts.g)
    yield _plan_copy(new_v, v_key, weight.v)


def _plan_decomposed(key: str, w: Tensor, to: Format, dim: Dim) -> Iterator[PlannedTensor]:
    if not (_is_real(w) and w.ndim > 1 and w.numel()):
        raise StateDictError(
            f"{key}: cannot decompose {tuple(w.shape)} numbers of {w.dtype}; expected a "
            "floating-point weight of two or more dimensions that is not empty"
        )
    _refuse_narrow(key, w)
    units = _units_along(dim, key, w)
    g = torch.empty(units.shape(w.shape), dtype=w.dtype, device="meta")
    new_g, new_v = part_keys(key, to)
    yield PlannedTensor(new_g, key, g, lambda state: _decompose(key, state[key], units).g)
    yield PlannedTensor(new_v, key, w, lambda state: _decompose(key, state[key], units).v)


def _refuse_narrow(path: str, *parts: Tensor) -> None:
    for part in parts:
        if part.dtype.itemsize == 1:
            raise StateDictError(
                f"{path}: is stored as {part.dtype}, which can only be renamed; "
                "convert it to a wider type first"
            )


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


def _refuse_collisions(tensors: list[PlannedTensor]) -> None:
    sources: dict[Hashable, Hashable] = {}
    for planned in tensors:
        if planned.key in sources:
            raise StateDictError(
                f"{sources[planned.key]!r} and {planned.source!r} would both become "
                f"{planned.key!r}; remove or rename one of them"
            )
        sources[planned.key] = planned.source


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
