"""Weight normalization on a layer or a model: apply it, and initialize what is normalized.

Salimans & Kingma (2016), section 2: each weight vector w is expressed as w = g·v/‖v‖, and training
moves v and g. Applying it changes nothing the layer computes: v = w and g = ‖w‖.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from weightnorm import functional, layers, parametrization
from weightnorm.dtensor import is_sharded, refuse_partitioned
from weightnorm.functional import EPS
from weightnorm.inspection import is_weight_normed, normalized_weight
from weightnorm.parametrization import SCALES, Scale, WeightNorm

M = TypeVar("M", bound=nn.Module)
Dim = int | None | Literal["auto"]


def weight_norm(
    layer: M,
    name: str | None = None,
    dim: Dim = "auto",
    *,
    scale: Scale = "linear",
    mask: Tensor | None = None,
    eps: float = EPS,
    train_g: bool = True,
) -> M:
    """Reparameterize a layer's weights as w = g·v/‖v‖ (eq. 2); the layer computes what it did.

    Args:
        layer: any module. It is changed in place and returned.
        name: the parameter to normalize. By default the layer's ``weight``, or every weight matrix
            of a recurrent or attention layer.
        dim: the axis that is kept, with one g for each index along it. ``"auto"``: the output
            units, which lie along axis 1 for transposed convolutions and along axis 0 elsewhere.
            ``None``: one g for the whole tensor. Negative axes count from the end.
        scale: train g itself (``"linear"``) or s with g = eˢ (``"log"``).
        mask: multiplied into v before the norm is taken, as autoregressive layers need.
        eps: rows with ‖v‖ ≤ eps count as zero: w = 0, no gradient.
        train_g: ``False`` freezes g; only the direction is trained.

    A lazy layer is normalized when its first input gives it a shape. Build the optimizer after
    this call: it has new parameters to train. To initialize a normalized weight use ``init_``,
    since ``nn.init.*_(layer.weight)`` would fill a temporary tensor.

    >>> from weightnorm import parts
    >>> layer = weight_norm(nn.Linear(20, 40))
    >>> parts(layer).v.shape, parts(layer).g.shape
    (torch.Size([40, 20]), torch.Size([40, 1]))
    """
    names = (name,) if name is not None else layers.weight_names(layer) or ("weight",)
    _apply([_plan(layer, n, dim, scale, mask, eps, train_g) for n in names])
    return layer


def weight_norm_model(
    model: nn.Module,
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    dim: Dim = "auto",
    scale: Scale = "linear",
    eps: float = EPS,
    train_g: bool = True,
) -> list[str]:
    """Apply ``weight_norm`` throughout a model; returns the names of the weights it normalized.

    By default every linear, bilinear, convolutional, recurrent and attention layer that is not
    normalized yet. ``where(name, module)`` narrows the choice, or widens it to embeddings. Tied
    weights stay tied. Finding nothing to normalize is an error.

    >>> weight_norm_model(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    ['0.weight', '2.weight']
    """
    plans, names, already = [], [], 0
    for path, module, name in layers.chosen_weights(model, where):
        if is_weight_normed(module, name):
            already += 1
        else:
            plans.append(_plan(module, name, dim, scale, None, eps, train_g))
            names.append(path)
    if not plans:
        found = sum(bool(layers.weight_names(m)) for m in model.modules())
        reason = (
            f"all {already} weights are normalized already"
            if already
            else f"`where` selected none of its {found} layers"
            if found
            else "it has no layer torch knows; name the tensor with weight_norm(module, name, dim)"
        )
        raise ValueError(f"nothing to normalize in {type(model).__name__}: {reason}")
    _apply(plans)
    return names


@torch.no_grad()
def init_(layer: M, fn: Callable[[Tensor], object], name: str = "weight") -> M:
    """Initialize a weight in place with `fn`, normalized or not: the weight itself, not a copy.

    >>> layer = init_(weight_norm(nn.Linear(2, 3)), nn.init.ones_)
    >>> bool((layer.weight == 1).all())
    True
    """
    if is_weight_normed(layer, name):
        site = normalized_weight(layer, name)
        weight = torch.empty_like(site.stored.v)
        fn(weight)
        site.write(weight)
    else:
        fn(_parameter(layer, name))
    return layer


@dataclass(frozen=True)
class _Plan:
    """One tensor to normalize, checked: carrying it out cannot fail on bad input."""

    layer: nn.Module
    name: str
    dim: Dim
    train_g: bool
    options: dict[str, Any]

    @property
    def axis(self) -> tuple[int | None, int]:
        """The axis that is kept, and the groups axis 0 splits into."""
        if self.dim == "auto":
            return layers.unit_axis(self.layer, self.name)
        return functional.resolve_dim(self.dim, _parameter(self.layer, self.name).ndim), 1

    def carry_out(self) -> parametrization.Originals:
        weight = _parameter(self.layer, self.name)
        dim, groups = self.axis
        map_ = WeightNorm(dim, groups=groups, **self.options)
        originals = parametrization.attach(self.layer, self.name, map_)
        originals.original0.requires_grad_(self.train_g and weight.requires_grad)
        return originals


def _plan(
    layer: nn.Module,
    name: str,
    dim: Dim,
    scale: Scale,
    mask: Tensor | None,
    eps: float,
    train_g: bool,
) -> _Plan:
    if scale not in SCALES:
        near = get_close_matches(str(scale), SCALES, 1) or SCALES
        raise ValueError(f"scale={scale!r} is unknown; expected one of {SCALES}: {near[0]!r}?")
    weight, where = _parameter(layer, name), f"{type(layer).__name__}.{name}"
    if (reason := layers.refusal(layer, name)) is not None:
        raise ValueError(f"{where} cannot be weight-normalized: {reason}")
    if not weight.is_floating_point():
        raise TypeError(
            f"{where} is {weight.dtype}; weight norm needs real floating-point weights"
            + (" (view a complex weight as two real ones)" if weight.is_complex() else "")
        )
    refuse_partitioned(weight, where)
    if is_sharded(weight):
        raise ValueError(
            f"{where} is sharded over ranks already: normalize first, then fully_shard; or leave "
            "the model plain and use WeightNormOptimizer, which takes sharded weights"
        )
    if weight.layout is not torch.strided:
        raise TypeError(f"{where} has layout {weight.layout}; weight norm needs a dense weight")
    if isinstance(dim, str) and dim != "auto":
        raise ValueError(f'dim={dim!r} is unknown; expected "auto", an integer or None')
    if not isinstance(weight, UninitializedParameter):
        if dim == "auto" and weight.ndim < 2:
            raise ValueError(
                f"{where} has {weight.ndim} dimension{'s' * (weight.ndim != 1)}, so it holds no "
                "vector per unit to normalize; pass dim=None for one g for the whole tensor"
            )
        if dim != "auto":
            functional.resolve_dim(dim, weight.ndim)
        if mask is not None:
            functional.check_mask(mask, weight.shape)
    if mask is not None:
        if weight.is_meta:
            raise ValueError(
                f"{where} is on the meta device, where a mask would lose its values; give the "
                "layer memory with to_empty first"
            )
        mask = mask.to(weight.device, weight.dtype)
    return _Plan(layer, name, dim, train_g, {"scale": scale, "mask": mask, "eps": eps})


def _parameter(layer: nn.Module, name: str) -> nn.Parameter:
    """A plain parameter of the layer, or an error that says why there is none."""
    where = f"{type(layer).__name__}.{name}"
    if is_weight_normed(layer, name):
        raise ValueError(f"{where} is weight-normalized already; remove_weight_norm takes it off")
    if name in parametrization.parametrizations_of(layer):
        raise ValueError(f"{where} has another parametrization; apply weight norm before it")
    parameter = layer._parameters.get(name)
    if parameter is None:
        reason = layers.refusal(layer, name)
        own = [n for n, p in layer._parameters.items() if p is not None]
        near = get_close_matches(name, own, 1)
        hint = reason or (f"did you mean {near[0]!r}?" if near else f"it has {own or 'none'}")
        raise ValueError(f"{type(layer).__name__} has no parameter {name!r}: {hint}")
    return parameter


def _apply(plans: list[_Plan]) -> None:
    """Carry out all plans or none."""
    tied: dict[int, tuple[parametrization.Originals, _Plan]] = {}
    done: list[tuple[_Plan, nn.Parameter]] = []
    try:
        for plan in plans:
            weight = _parameter(plan.layer, plan.name)
            if isinstance(weight, UninitializedParameter):
                plan.layer.register_forward_pre_hook(_WhenMaterialized(plan))
            elif id(weight) in tied:
                originals, first = tied[id(weight)]
                if plan.axis != first.axis:
                    raise ValueError(
                        f"one weight is tied between {type(first.layer).__name__} and "
                        f"{type(plan.layer).__name__}, whose units lie along different axes; "
                        "leave one of them out with `where`"
                    )
                parametrization.share(plan.layer, plan.name, originals)
            else:
                tied[id(weight)] = plan.carry_out(), plan
            done.append((plan, weight))
    except BaseException:
        for plan, weight in reversed(done):
            if is_weight_normed(plan.layer, plan.name):
                parametrization.detach(plan.layer, {plan.name: weight})
        raise


class _WhenMaterialized:
    """Forward pre-hook that normalizes a lazy layer's weight once it has a shape."""

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan

    def __call__(self, layer: nn.Module, inputs: object) -> None:
        for key, hook in list(layer._forward_pre_hooks.items()):
            if hook is self:
                del layer._forward_pre_hooks[key]
        _apply([self.plan])
