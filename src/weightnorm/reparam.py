"""Apply weight normalization to a layer or a model, and initialize normalized weights.

Salimans & Kingma (2016), section 2: each weight vector is expressed as w = g·v/‖v‖, and training
updates v and g. Applying it does not change the output of the layer: v = w and g = ‖w‖.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from weightnorm import functional, kernels, layers, parametrization
from weightnorm.arguments import check_dim, check_module, check_where
from weightnorm.dtensor import is_sharded, refuse_partitioned
from weightnorm.folding import refuse_folded
from weightnorm.functional import EPS
from weightnorm.inspection import is_weight_normed, normalized_weight
from weightnorm.parametrization import (
    NormalizeWhenMaterialized,
    Scale,
    WeightNorm,
    WeightNormParametrizationList,
    check_scale,
    pending_hooks,
)

M = TypeVar("M", bound=nn.Module)
Dim = int | None | Literal["auto"]


def weight_norm(
    module: M,
    name: str | None = None,
    dim: Dim = "auto",
    *,
    g: float | Tensor | None = None,
    scale: Scale = "linear",
    mask: Tensor | None = None,
    eps: float = EPS,
    train_g: bool = True,
) -> M:
    """Reparameterize a layer's weights as w = g·v/‖v‖ (eq. 2). The layer's output stays the same.

    Args:
        module: any module. It is changed in place and returned. To normalize all layers of a model
            use ``weight_norm_model``.
        name: the parameter to normalize. By default the layer's ``weight``, or every weight matrix
            of a recurrent or attention layer.
        dim: the axis that is kept, with one g for each index along it. ``"auto"``: the output
            units, which lie along axis 1 for transposed convolutions and along axis 0 elsewhere.
            ``None``: one g for the whole tensor. Negative axes count from the end.
        g: the initial length. ``None``: ‖w‖, which keeps the initial weight. A number sets every g;
            a tensor must broadcast to the shape of g. Must be positive with ``scale="log"``.
        scale: train g itself (``"linear"``) or s with g = eˢ (``"log"``).
        mask: multiplied into v before the norm is taken, as autoregressive layers need.
        eps: rows with ‖v‖ ≤ eps are treated as zero: w = 0, no gradient.
        train_g: ``False`` freezes g; only the direction is trained.

    In float16 and bfloat16 each weight stays the same up to one unit in the last place, for every
    `dim`, since g = ‖w‖ is rounded to the weight's dtype. For ``dim=None`` all weights share that
    one rounding error.

    A lazy module is normalized when its first input gives it a shape. Create the optimizer after
    this call, since the module has new parameters. To initialize a normalized weight use ``init_``:
    ``nn.init.*_(layer.weight)`` would fill a temporary tensor. If another module shares the weight,
    use ``weight_norm_model``, which keeps weights tied.

    >>> from weightnorm import parts
    >>> layer = weight_norm(nn.Linear(20, 40))
    >>> parts(layer).v.shape, parts(layer).g.shape
    (torch.Size([40, 20]), torch.Size([40, 1]))
    """
    _check_changeable(module, "weight_norm")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name={name!r} must be the name of one parameter, or None")
    names = (name,) if name is not None else layers.weight_names(module) or ("weight",)
    options = _Options(dim, g, scale, mask, eps, train_g)
    _apply([_plan(module, n, options) for n in names])
    return module


def weight_norm_model(
    model: nn.Module,
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    dim: Dim = "auto",
    g: float | Tensor | None = None,
    scale: Scale = "linear",
    eps: float = EPS,
    train_g: bool = True,
) -> list[str]:
    """Apply ``weight_norm`` to the layers of a model; return the names of the normalized weights.

    By default all linear, bilinear, convolutional, recurrent and attention layers are normalized,
    except those that are already. ``unnormalized_weights(model)`` lists the weights left out.

    Args:
        model: a model or a layer. It is changed in place, completely or (on an error) not at all.
        where: ``where(name, module)`` returns whether to normalize the weights of a module. It can
            also select embeddings and, if `dim` is given, any module with a parameter ``weight`` of
            two or more dimensions.
        dim, g, scale, eps, train_g: as in ``weight_norm``.

    A weight that several modules share stays shared. Without `where` it is normalized in all of
    them if it is in one, so an embedding tied to a normalized output layer is normalized too; with
    `where`, selecting some of them and not the others is an error. Finding nothing to normalize is
    an error.

    >>> weight_norm_model(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    ['0.weight', '2.weight']
    """
    _check_changeable(model, "weight_norm_model")
    check_where(where)
    options = _Options(dim, g, scale, None, eps, train_g)
    plans, already = {}, 0
    for path, module, name in _selected(model, where, dim):
        if is_weight_normed(module, name) or name in pending_hooks(module):
            already += 1
        else:
            plans[path] = _plan(module, name, options)
    if not plans:
        raise ValueError(_nothing_to_normalize(model, already))
    plans = _with_tied(model, plans, options, extend=where is None)
    _apply([*plans.values()])
    return [*plans]


def _selected(
    model: nn.Module, where: Callable[[str, nn.Module], bool] | None, dim: Dim
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (path, module, name) of every weight to normalize, normalized already or not."""
    for path, module, name in layers.chosen_weights(model, where, _has_other_weight):
        known = layers.weight_names(module) or is_weight_normed(module)
        if dim == "auto" and not known:
            raise ValueError(layers.unknown_axis(path, module))
        yield path, module, name


def _has_other_weight(module: nn.Module) -> bool:
    """Whether a module of a type unknown to ``layers`` has a weight matrix named ``weight``."""
    return is_weight_normed(module, "weight") or layers.has_weight_matrix(module)


def _with_tied(
    model: nn.Module, plans: dict[str, _Plan], options: _Options, *, extend: bool
) -> dict[str, _Plan]:
    """Add plans for the other modules that share a selected weight, or raise if not `extend`."""
    selected = {id(plan.weight): path for path, plan in plans.items()}
    complete = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            path = f"{prefix}.{name}".lstrip(".")
            if path in plans:
                complete[path] = plans[path]
            elif id(parameter) in selected:
                first = selected[id(parameter)]
                if not extend:
                    raise ValueError(
                        f"`where` selected {first} but not {path}, which is the same parameter; "
                        "select both or neither, or give one of them its own copy"
                    )
                complete[path] = _plan(module, name, options)
    return complete


def _nothing_to_normalize(model: nn.Module, already: int) -> str:
    known = sum(bool(layers.weight_names(module)) for module in model.modules())
    others = [
        f"{path or 'the model'} ({type(module).__name__})"
        for path, module in model.named_modules()
        if not (layers.weight_names(module) or is_weight_normed(module))
        and _has_other_weight(module)
    ]
    if already:
        reason = f"all {already} weights are normalized already"
    elif known:
        reason = f"`where` selected none of its {known} layers"
    else:
        reason = "it has no linear, convolutional, recurrent or attention layer"
    if others:
        shown = ", ".join(others[:3]) + (" …" if len(others) > 3 else "")
        reason += f"; {shown} can be normalized by weight_norm(module, name, dim)"
    elif not known:
        reason += "; normalize other parameters by weight_norm(module, name, dim)"
    return f"nothing to normalize in {type(model).__name__}: {reason}"


@torch.no_grad()
def init_(module: M, fn: Callable[[Tensor], object], name: str = "weight") -> M:
    """Initialize a weight in place with `fn`, whether it is normalized or not.

    For a normalized weight v and g are set so that w has the value that `fn` fills in, or changes
    in place.

    >>> layer = init_(weight_norm(nn.Linear(2, 3)), nn.init.ones_)
    >>> bool((layer.weight == 1).all())
    True
    """
    check_module(module, "init_")
    if not callable(fn):
        got = type(fn).__name__ if isinstance(fn, Tensor) else repr(fn)
        raise TypeError(
            f"fn must be a function that fills a tensor, such as nn.init.xavier_uniform_; got {got}"
        )
    refuse_folded(module, f"initialize {name!r}")
    if is_weight_normed(module, name):
        normalized = normalized_weight(module, name)
        weight = normalized.weight().clone()
        fn(weight)
        normalized.write(weight)
    else:
        fn(_parameter(module, name, of_model="call init_ for each of"))
    return module


@dataclass(frozen=True)
class _Options:
    """The options of ``weight_norm``."""

    dim: Dim
    g: float | Tensor | None
    scale: Scale
    mask: Tensor | None
    eps: float
    train_g: bool


@dataclass(frozen=True)
class _Plan:
    """A weight to normalize, with arguments that were checked."""

    module: nn.Module
    name: str
    weight: nn.Parameter
    options: _Options

    @property
    def axis(self) -> tuple[int | None, int]:
        """The axis that is kept, and the number of groups axis 0 is split into."""
        if self.options.dim == "auto":
            return layers.unit_axis(self.module, self.name)
        return functional.resolve_dim(self.options.dim, self.weight.ndim), 1

    def execute(self) -> WeightNormParametrizationList:
        """Parametrize the weight."""
        (dim, groups), options = self.axis, self.options
        g = _initial_g(options.g, kernels.unit_shape(self.weight.shape, dim, groups))
        mask = None if options.mask is None else options.mask.to(self.weight, copy=True)
        weight_norm = WeightNorm(
            dim, groups=groups, scale=options.scale, mask=mask, eps=options.eps
        ).to(self.weight.device)
        order = dict(self.module._parameters)
        registered = parametrization.register(self.module, self.name, weight_norm)
        try:
            if g is not None:
                with torch.no_grad():
                    registered.original0.copy_(weight_norm.stored(g.to(registered.original0)))
            registered.original0.requires_grad_(options.train_g and self.weight.requires_grad)
        except BaseException:
            parametrization.unregister(self.module, self.name, order)
            raise
        return registered


def _initial_g(g: float | Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return the initial g in its shape, or raise if it does not broadcast to it."""
    if g is None:
        return None
    value = torch.as_tensor(g)
    try:
        return value.detach().broadcast_to(shape)
    except RuntimeError:
        raise ValueError(
            f"g has shape {tuple(value.shape)}, which does not broadcast to {shape}"
        ) from None


def _plan(module: nn.Module, name: str, options: _Options) -> _Plan:
    """Check that a tensor can be normalized with these options."""
    _check_options(options)
    refuse_folded(module, "apply weight norm to a weight")
    weight, where = _parameter(module, name), f"{type(module).__name__}.{name}"
    if (reason := layers.refusal(module, name)) is not None:
        raise ValueError(f"{where} cannot be weight-normalized: {reason}")
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise TypeError(
            f"{where} is {weight.dtype}; weight norm needs real floating-point weights of 16 bits "
            "or more" + (" (view a complex weight as two real ones)" * weight.is_complex())
        )
    refuse_partitioned(weight, where)
    if is_sharded(weight):
        raise ValueError(
            f"{where} is sharded over ranks already: normalize first, then fully_shard; or leave "
            "the model plain and use WeightNormOptimizer, which takes sharded weights"
        )
    if weight.layout is not torch.strided:
        raise TypeError(f"{where} has layout {weight.layout}; weight norm needs a dense weight")
    for argument in ("mask", "g"):
        if weight.is_meta and getattr(options, argument) is not None:
            raise ValueError(
                f"{where} is on the meta device, where {argument} would lose its values; give the "
                "layer memory with to_empty first"
            )
    if isinstance(module, nn.RNNBase) and "forward" in module.__dict__:
        raise ValueError(
            f"{where}: the forward of this layer was replaced (by a hook of accelerate, for "
            "example), so its weights would not be computed; normalize it first, then wrap it"
        )
    plan = _Plan(module, name, weight, options)
    if not isinstance(weight, UninitializedParameter):
        if options.dim == "auto" and weight.ndim < 2:
            raise ValueError(
                f"{where} has {weight.ndim} dimension{'s' * (weight.ndim != 1)}, so it holds no "
                "vector per unit to normalize; pass dim=None for one g for the whole tensor"
            )
        _initial_g(options.g, kernels.unit_shape(weight.shape, *plan.axis))
        if options.mask is not None:
            functional.check_mask(options.mask, weight.shape)
    return plan


def _check_changeable(module: Any, function: str) -> None:
    """Check that the argument is a module whose parameters can be replaced."""
    check_module(module, function)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"{function} cannot change a ScriptModule; apply it before torch.jit")
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise ValueError(
            "DistributedDataParallel has registered the parameters already, and would not send the "
            f"gradients of new ones; call {function} first, then wrap the model"
        )


def _check_options(options: _Options) -> None:
    """Check the options that do not depend on the weight."""
    check_scale(options.scale)
    check_dim(options.dim)
    if options.mask is not None and not isinstance(options.mask, Tensor):
        raise TypeError(f"mask must be a tensor; got {options.mask!r}")
    if not (isinstance(options.eps, (int, float)) and 0 <= options.eps < math.inf):
        raise ValueError(f"eps={options.eps!r} must be a number, 0 or greater")
    if options.g is not None:
        if not isinstance(options.g, (int, float, Tensor)):
            raise TypeError(f"g must be a number or a tensor; got {options.g!r}")
        # Not on the default device, which may be "meta": from_pretrained builds models there.
        g = options.g if isinstance(options.g, Tensor) else torch.tensor(options.g, device="cpu")
        if not g.isfinite().all():
            raise ValueError(f"g={options.g} must be finite")
        if options.scale == "log" and not (g > 0).all():
            raise ValueError(f'g={options.g} must be positive with scale="log", where g = eˢ')


def _parameter(
    module: nn.Module, name: str, *, of_model: str = "use weight_norm_model to normalize"
) -> nn.Parameter:
    """Return a plain parameter of the module, or raise an error with the reason.

    `of_model` is what to do with the layers inside a module that has no parameters of its own.
    """
    kind = type(module).__name__
    if is_weight_normed(module, name) or name in pending_hooks(module):
        raise ValueError(
            f"{kind}.{name} is weight-normalized already; use remove_weight_norm to remove it"
        )
    if name in layers.parametrizations_of(module):
        raise ValueError(f"{kind}.{name} has another parametrization; apply weight norm before it")
    parameter = module._parameters.get(name)
    if parameter is None:
        own = [n for n, p in module._parameters.items() if p is not None]
        if (reason := layers.refusal(module, name)) is not None:
            hint = reason
        elif not own and any(layers.weight_names(child) for child in module.modules()):
            hint = f"{of_model} the layers inside it"
        elif near := get_close_matches(name, own, 1):
            hint = f"did you mean {near[0]!r}?"
        else:
            hint = f"its parameters are {', '.join(own)}" if own else "it has no parameters"
        raise ValueError(f"{kind} has no parameter {name!r}: {hint}")
    return parameter


def _apply(plans: list[_Plan]) -> None:
    """Execute all plans or none."""
    tied: dict[int, tuple[WeightNormParametrizationList, _Plan]] = {}
    undo: list[Callable[[], object]] = []
    try:
        for plan in plans:
            module, name, weight = plan.module, plan.name, plan.weight
            order = dict(module._parameters)
            if isinstance(weight, UninitializedParameter):
                hook = NormalizeWhenMaterialized(name, partial(_apply, [plan]))
                module.register_forward_pre_hook(hook)
                undo.append(partial(hook.remove, module))
                continue
            if id(weight) in tied:
                registered, first = tied[id(weight)]
                if plan.axis != first.axis:
                    raise ValueError(
                        f"{type(first.module).__name__} and {type(module).__name__} share one "
                        "weight, but their units lie along different axes; pass dim to keep the "
                        "same axis for both, or leave out both with `where`"
                    )
                parametrization.register_tied(module, name, registered)
            else:
                tied[id(weight)] = plan.execute(), plan
            undo.append(partial(parametrization.unregister, module, name, order))
    except BaseException:
        for step in reversed(undo):
            step()
        raise
