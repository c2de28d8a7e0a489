"""Convert and load state dicts of weight-normalized models.

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
    index along an axis (with 1 along all others, or flat). All other tensors are copied as they
    are.

Note [conversion is planned first]
    ``plan_conversion`` decides from shapes and types what each new key will hold, and refuses
    results that would lose a tensor or be misread. Only then is anything computed. Files are
    converted by the same plan, one tensor at a time.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any, Literal, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from weightnorm import _kernels, functional
from weightnorm._dtensor import any_true, placed_like
from weightnorm._units import Parts, Units
from weightnorm.folding import refuse_folded
from weightnorm.inspection import NormalizedWeight, find_normalized

Format = Literal["parametrize", "hook", "folded"]
FORMATS: tuple[Format, ...] = ("parametrize", "hook", "folded")
Dim = int | Literal["infer"] | None
State = Mapping[Any, Any]
Weights = str | Iterable[str] | Callable[[str, Tensor], bool]

_PARAMETRIZED = re.compile(r"(.*\.)?parametrizations\.([^.]+)\.(.+)", re.DOTALL)


class StateDictError(ValueError):
    """A state dict that cannot be converted or loaded, with the reason."""


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

    >>> from weightnorm import weight_norm
    >>> state = nn.Sequential(weight_norm(nn.Linear(2, 3))).state_dict()
    >>> [weight.path for weight in stored_weights(state)]
    ['0.weight']
    """
    named = (_path_of_g(key) for key in state if isinstance(key, str))
    pairs = (_stored_pair(state, *found) for found in named if found)
    return [pair for pair in pairs if pair and _kept_axes(pair, dim)]


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


def _kept_axes(weight: StoredWeight, dim: Dim) -> list[Units]:
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
    # A grouped transposed convolution. With a g as large as v, only specific names are believed.
    groups, known = g[0], weight.format == "parametrize" or g != v
    if len(v) > 2 and groups > 1 and known and v[0] % groups == 0:
        return [Units(1, groups)] if g == Units(1, groups).shape(v) else []
    return []


def units_of(weight: StoredWeight, dim: Dim = "infer") -> Units:
    """Return the units by the shapes; `dim` decides if several axes fit."""
    fitting = _kept_axes(weight, dim)
    if len(fitting) > 1 and dim != "infer":
        fitting = [u for u in fitting if u.dim == _resolve(weight.path, weight.v, dim)]
    if len(fitting) == 1:
        return fitting[0]
    axes = [units.dim for units in fitting]
    reason = (
        f"could be along any of the axes {axes}; choose with dim, in convert_state_dict"
        if axes
        else "fits no axis"
    )
    raise StateDictError(
        f"{weight.path}: g of shape {tuple(weight.g.shape)} beside v of shape "
        f"{tuple(weight.v.shape)} {reason}"
    )


def _resolve(path: str, w: Tensor, dim: Dim) -> Any:
    """Return a valid axis of a weight; 0 if it is to be inferred."""
    try:
        return Units(0 if dim == "infer" else dim).of(w.shape).dim
    except IndexError as error:
        raise StateDictError(f"{path}: {error}") from None


# — folding and decomposing —


@torch.no_grad()
def fold(weight: StoredWeight, dim: Dim = "infer") -> Tensor:
    """Compute w = g·v/‖v‖; v itself for units with g = ‖v‖, so that decomposing is undone exactly.

    g is compared with ‖v‖ rounded to g's type, as `_decompose` stores it.
    """
    v, g = weight.parts
    units = units_of(weight, dim)
    g = g.reshape(units.shape(v.shape))
    norm = functional.norm(v, units).to(g.dtype)
    unchanged = (norm == g) | (norm.isnan() & g.isnan())
    w = _kernels.formula(v, g, units).to(v.dtype)
    return torch.where(units.spread(unchanged, v), v, w)


@torch.no_grad()
def _decompose(path: str, w: Tensor, axis: int | None) -> Parts:
    """Return v = w and g = ‖w‖ (for zero rows any direction and g = 0); exact when folded."""
    units = Units(axis)
    v, g = functional.decompose(w, units)
    if w.device.type == "meta":
        return Parts(v=v, g=g)
    # functional.decompose also replaces rows that are merely short, and folding must return them.
    zero = functional.norm((w != 0).to(w.dtype), units) == 0
    v = torch.where(units.spread(zero, w), v, w)
    finite = functional.norm(w.isfinite().logical_not().to(w.dtype), units) == 0
    if any_true(finite & g.isfinite().logical_not()):
        raise StateDictError(f"{path}: ‖w‖ is too large for {w.dtype}; use a wider type")
    return Parts(v=v, g=g)


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


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)  # a name may contain [ or *


class WeightSelection:
    """Selects plain weights by name, pattern or function."""

    def __init__(self, weights: Weights) -> None:
        self._function = weights if callable(weights) else None
        patterns = () if callable(weights) else weights
        self._patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        if wrong := [pattern for pattern in self._patterns if not isinstance(pattern, str)]:
            raise StateDictError(f"weights has {wrong[0]!r}; expected names and patterns")
        self._unmatched = dict.fromkeys(self._patterns)
        self._names: list[str] = []

    def matches(self, name: str) -> bool:
        """Whether a pattern matches the name."""
        self._names.append(name)
        found = [pattern for pattern in self._patterns if _fits(name, pattern)]
        for pattern in found:
            self._unmatched.pop(pattern, None)
        return bool(found)

    def selects(self, name: Hashable, value: Any) -> bool:
        """Whether this item of a state dict is a plain weight to decompose."""
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            return False
        if self._function is not None:
            return bool(self._function(name, value))
        return _is_real(value) and value.ndim > 1 and self.matches(name)

    def raise_unmatched(self) -> None:
        """Raise for a pattern that has matched nothing, naming the nearest weights."""
        for pattern in self._unmatched:
            near = get_close_matches(pattern, self._names, 3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "check the names"
            raise StateDictError(
                f"weights={pattern!r} matches no weight (a matrix or more); {hint}"
            )


def convert_state_dict(
    state: State, to: Format, *, weights: Weights = (), dim: Dim = "infer"
) -> dict[Any, Any]:
    """Return a state dict with every normalized weight in the format `to`; all else as it is.

    Args:
        state: a state dict. ``weightnorm convert`` also converts those inside a checkpoint.
        to: ``"parametrize"``, ``"hook"`` or ``"folded"``.
        weights: plain weights to decompose: a name or pattern such as ``"*.weight"``, several, or a
            function of name and tensor. A pattern that matches nothing is an error.
        dim: the kept axis. It is inferred from the shape of g, so it is needed only for a flat g
            beside a square v, and for plain weights that keep another axis than 0.

    A log-scale is converted to linear g. Conversion and its inverse are exact. If two tensors would
    get the same key, or the result could be misread, a StateDictError names both.

    >>> from weightnorm import weight_norm
    >>> list(convert_state_dict(weight_norm(nn.Linear(2, 3)).state_dict(), to="hook"))
    ['bias', 'weight_g', 'weight_v']
    """
    _check_state(state, "convert_state_dict")
    plan = plan_conversion(state, to, weights, dim)
    nested = [key for key, value in state.items() if isinstance(value, Mapping)]
    if nested and not plan.names:
        raise StateDictError(
            f"found no weight to convert; {nested[0]!r} is a mapping: pass the state dict itself"
        )
    result = _empty_like(state)
    result.update({planned.key: planned.compute(state) for planned in plan.tensors})
    return result


def _empty_like(state: State) -> dict[Any, Any]:
    """Return a dict with the versions of the modules, which ``load_state_dict`` passes to them."""
    empty: Any = OrderedDict() if hasattr(state, "_metadata") else {}
    if hasattr(state, "_metadata"):
        empty._metadata = state._metadata
    return cast(dict[Any, Any], empty)


def plan_conversion(
    state: State, to: Format, weights: Weights = (), dim: Dim = "infer"
) -> Conversion:
    """Plan the conversion of a state dict, which may hold meta tensors, without computing."""
    _check_arguments(to, dim)
    selection = WeightSelection(weights)
    stored = {key: weight for weight in stored_weights(state, dim) for key in weight.keys}
    names: list[str] = []
    tensors: list[PlannedTensor] = []
    for key, value in state.items():
        weight = stored.get(key)
        if weight is not None:
            if key != weight.keys[0]:
                continue  # the whole weight is placed where its g was
            selection.matches(weight.path)
            names.append(weight.path)
            tensors += _plan_stored(state, weight, to, dim)
        elif selection.selects(key, value) and to != "folded":
            names.append(key)
            tensors += _plan_decomposed(key, value, to, dim)
        else:
            tensors.append(_plan_copy(key, key, value))
    selection.raise_unmatched()
    _refuse_collisions(tensors)
    outline = {planned.key: planned.outline for planned in tensors}
    found = stored_weights(outline, dim)
    _refuse_misreadings(found, [] if to == "folded" else names)
    for weight in found:
        if not set(weight.keys) <= state.keys():  # its keys are new
            _refuse_further_parametrizations(outline, weight)
    return Conversion(names, tensors)


def _check_state(state: object, function: str) -> None:
    if isinstance(state, Mapping):
        return
    if isinstance(state, nn.Module):
        got = f"the module {type(state).__name__}: pass its state_dict()"
    elif isinstance(state, (str, PathLike)):
        got = f"{str(state)!r}: pass torch.load(path, weights_only=True)"
    else:
        got = type(state).__name__
    raise TypeError(f"{function} expects a state dict; got {got}")


def _check_arguments(to: Any, dim: Any) -> None:
    if to not in FORMATS:
        near = get_close_matches(str(to), FORMATS, 1) or FORMATS
        raise StateDictError(f"to={to!r} is unknown; expected one of {FORMATS}: {near[0]!r}?")
    if not (dim is None or dim == "infer" or isinstance(dim, int)):
        raise StateDictError(f"dim={dim!r}; expected an axis, None or 'infer'")


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
    axis = _resolve(key, w, dim)
    g = torch.empty(Units(axis).shape(w.shape), dtype=w.dtype, device="meta")
    new_g, new_v = part_keys(key, to)
    yield PlannedTensor(new_g, key, g, lambda state: _decompose(key, state[key], axis).g)
    yield PlannedTensor(new_v, key, w, lambda state: _decompose(key, state[key], axis).v)


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
        if weight.path not in expected:
            g, v = weight.keys[:2]
            raise StateDictError(
                f"{g!r} and {v!r} of the result would be read as the normalized weight "
                f"{weight.path!r}; rename one of them"
            )
    for path in sorted(set(expected) - {weight.path for weight in found}):
        raise StateDictError(f"{path}: g has the shape of v; it could not be recognized again")


# — loading —


@torch.no_grad()
def load_state_dict(model: nn.Module, state: State, strict: bool = True) -> list[str]:
    """Load a state dict of any format into a model, normalized in any way or plain.

    Returns the names of the weights that were converted. Keys that the model itself has are loaded
    as they are. With ``strict``, missing and unexpected weights are an error that names them. After
    a StateDictError the model is unchanged.

    >>> from weightnorm import weight_norm
    >>> plain = nn.Linear(2, 3)
    >>> load_state_dict(weight_norm(nn.Linear(2, 3)), plain.state_dict())
    ['weight']
    """
    _check_state(state, "load_state_dict")
    for module in model.modules():
        refuse_folded(module, "load the weights")
    own = model.state_dict()
    found = find_normalized(model, remove_duplicate=False)
    normalized = {weight.path: weight for weight in found}
    stored = _loadable_weights(state, own, normalized)
    fitted: dict[Any, Any] = {}
    sources: dict[Any, Any] = {}
    converted = []
    for key, value in state.items():
        weight = stored.get(key)
        if weight is not None and key != weight.keys[0]:
            continue
        path = key if weight is None else weight.path
        target = normalized.get(path)
        if target is not None:
            tensors = _fit(target, weight, value)
            changed = weight is None or set(weight.keys) != set(tensors)
        else:
            tensors = {path: value if weight is None else _fold_checked(state, weight)}
            changed = weight is not None
        for new in tensors:
            if new in sources:
                raise StateDictError(
                    f"{sources[new]!r} and {key!r} are both values of {path!r}; remove one of them"
                )
            sources[new] = key
        fitted.update(tensors)
        converted += [path] * changed
    missing = [key for key in own if key not in fitted]
    unexpected = [key for key in fitted if key not in own]
    named = _empty_like(state)
    named.update({key: value for key, value in fitted.items() if isinstance(key, str)})
    if strict and (missing or unexpected) and not _modules_accept(model, named):
        raise StateDictError(_mismatch(model, normalized, missing, unexpected))
    for key in fitted.keys() & own.keys():
        _check_fits(key, fitted[key], own[key])
    try:
        model.load_state_dict(named, strict=False)
    except RuntimeError as error:
        raise StateDictError(str(error)) from error
    return converted


def _modules_accept(model: nn.Module, state: dict[str, Any]) -> bool:
    """Whether the model's own ``load_state_dict`` accepts these keys, tried on a copy without data.

    Modules may add missing keys, as BatchNorm does for checkpoints of old versions, or rename them.
    """
    tensors = (*model.parameters(), *model.buffers())
    memo: dict[int, Any] = {id(t): _without_data(t) for t in tensors if t is not None}
    outlines = _empty_like(state)
    outlines.update({k: _without_data(x) for k, x in state.items()})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tensors without data
            deepcopy(model, memo).load_state_dict(outlines)
    except Exception:  # it does not fit, or the model cannot be copied
        return False
    return True


def _without_data(value: Any) -> Any:
    """Return a tensor on the meta device, and anything else as it is."""
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().to("meta"), value.requires_grad)
    return value.to("meta") if isinstance(value, Tensor) else value


def _loadable_weights(
    state: State, own: State, normalized: Mapping[str, NormalizedWeight]
) -> dict[str, StoredWeight]:
    """Return the stored weights by each of their keys, except where the model has such keys."""
    plain = own.keys() - {key for weight in normalized.values() for key in _own_keys(weight)}
    # For the weights that are normalized in the model, names are enough.
    known = [_stored_pair(state, path, format) for path in normalized for format in FORMATS[:2]]
    weights = [*stored_weights(state), *filter(None, known)]
    return {key: w for w in weights if plain.isdisjoint(w.keys) for key in w.keys}


def _fit(target: NormalizedWeight, weight: StoredWeight | None, value: Any) -> dict[str, Tensor]:
    """Return the tensors of one of the model's weights, from stored parts or a plain weight."""
    own_v, own_g = target.stored.v, target.stored.g
    if weight is not None and _keeps_parts(target, weight):
        v, g = weight.v, weight.g
        if target.is_log != weight.is_log:
            g = weight.parts.g if weight.is_log else target.parametrization.stored(g)
    else:
        if weight is not None:
            _refuse_narrow(target.path, weight.v, weight.g)
        w = value if weight is None else fold(weight)
        if not _is_real(w):
            kind = w.dtype if isinstance(w, Tensor) else type(w).__name__
            raise StateDictError(f"{target.path} is {kind}; expected a floating-point tensor")
        _check_shape(target.path, w, own_v)
        _refuse_narrow(target.path, w)
        v, g = target.decomposed(target.inverted(w) if weight is None else w)
        if not g.is_meta and any_true(g.isfinite().logical_not()):
            raise StateDictError(
                f"{target.path}: ‖w‖ is not finite, so w cannot be represented by v and g"
            )
    g_key, v_key, *mark = _own_keys(target)
    g, v = placed_like(g.reshape(own_g.shape), own_g), placed_like(v, own_v)
    return {g_key: g, v_key: v, **{key: torch.tensor(True) for key in mark}}


def _keeps_parts(target: NormalizedWeight, weight: StoredWeight) -> bool:
    """Whether v and g themselves can be loaded; else only w = g·v/‖v‖ can."""
    v, g = target.stored
    if weight.v.shape != v.shape:
        return False
    # A flat g is accepted if it can only be along one axis.
    flat = weight.g.ndim == 1 and _kept_axes(weight, "infer") == [target.units]
    if weight.g.shape != g.shape and not flat:
        return False
    # A log-scale cannot represent a negative g.
    return not target.is_log or weight.is_log or not any_true(weight.g < 0)


def _fold_checked(state: State, weight: StoredWeight) -> Tensor:
    _refuse_further_parametrizations(state, weight)
    _refuse_narrow(weight.path, weight.v, weight.g)
    return fold(weight)


def _own_keys(weight: NormalizedWeight) -> tuple[str, ...]:
    format: Format = "hook" if weight.parametrization is None else "parametrize"
    mark = [log_key(weight.path)] if weight.is_log else []
    return (*part_keys(weight.path, format), *mark)


def _check_fits(key: str, value: Any, own: Any) -> None:
    if not isinstance(own, Tensor):  # a module's extra state
        return
    if not isinstance(value, Tensor):
        raise StateDictError(f"{key} is a {type(value).__name__}; expected a tensor")
    if is_lazy(own):
        return
    if own.is_meta and not value.is_meta:
        raise StateDictError(
            f"{key} of the model is on the meta device and has no memory to load into; call "
            "model.to_empty(device=…) first"
        )
    if value.layout != own.layout or not torch.can_cast(value.dtype, own.dtype):
        raise StateDictError(
            f"{key} is {value.dtype} ({value.layout}) in the checkpoint, "
            f"{own.dtype} ({own.layout}) in the model"
        )
    _check_shape(key, value, own)


def _check_shape(key: str, value: Tensor, own: Tensor) -> None:
    if value.shape != own.shape and not (own.shape == () and value.shape == (1,)):
        raise StateDictError(
            f"{key} has shape {tuple(value.shape)} in the checkpoint, "
            f"{tuple(own.shape)} in the model"
        )


def _mismatch(
    model: nn.Module,
    normalized: Mapping[str, NormalizedWeight],
    missing: list[str],
    unexpected: list[Any],
) -> str:
    path_of = {key: path for path, weight in normalized.items() for key in _own_keys(weight)}
    lines = [f"the checkpoint does not fit {type(model).__name__}"]
    if missing:
        names = dict.fromkeys(path_of.get(key, key) for key in missing)
        lines.append(f"  missing: {', '.join(names)}")
    if unexpected:
        lines.append(f"  unexpected: {', '.join(map(str, unexpected))}")
    return "\n".join(lines)
