"""Apply weight normalization to a layer or a model, and initialize normalized weights.

Salimans & Kingma (2016), section 2: each weight vector is expressed as w = g·v/‖v‖, and training
updates v and g. Applying it does not change the output of the layer: v = w and g = ‖w‖.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from weightnorm import _parametrize, functional, layers
from weightnorm._dtensor import is_sharded
from weightnorm._kernels import is_eager
from weightnorm._parametrize import NormalizeWhenMaterialized
from weightnorm._units import EPS
from weightnorm._weight_norm import (
    Scale,
    WeightNorm,
    WeightNormParametrizationList,
    freeze_length,
)
from weightnorm.folding import refuse_folded
from weightnorm.inspection import find_normalized, is_weight_normed, normalized_weight
from weightnorm.layers import Dim, PlainWeight, Where

M = TypeVar("M", bound=nn.Module)
Length = float | Tensor | Callable[[torch.Size], float | Tensor]
"""An initial g: a number, a tensor that broadcasts to it, or a function of the weight's shape."""


def weight_norm(
    module: M,
    name: str | None = None,
    dim: Dim = "auto",
    *,
    g: Length | None = None,
    scale: Scale = "linear",
    mask: Tensor | None = None,
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
            ``None``: one g for the whole tensor. Several axes, as ``(0, 1)`` of a stack of
            matrices, as a tuple. Negative axes count from the end.
        g: the initial length. ``None``: ‖w‖, which keeps the initial weight. A number sets every g;
            a tensor must broadcast to the shape of g; a function gets the weight's shape and
            returns either. Must be positive with ``scale="log"`` and with ``train_g=False``. Zero
            units get random directions then, drawn by a generator that is seeded with the name of
            the parameter. (Without `g` their direction is the diagonal, and w stays 0.)
        scale: train g itself (``"linear"``) or s with g = eˢ (``"log"``).
        mask: of 0 and 1, multiplied into v before the norm is taken, as autoregressive layers need.
        train_g: ``False`` makes g a buffer; only the direction is trained.

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
    names = (name,) if name is not None else layers.weight_names(module) or ("weight",)
    options = Options(g, scale, mask, train_g)
    _apply([layers.plain_weight(module, n, dim) for n in names], options)
    return module


def weight_norm_model(
    model: M,
    *,
    where: Where | None = None,
    dim: Dim | Callable[[str, nn.Module], Dim] = "auto",
    g: Length | None = None,
    scale: Scale = "linear",
    train_g: bool = True,
) -> M:
    """Apply ``weight_norm`` to the layers of a model; return the model.

    By default all linear, bilinear, convolutional, recurrent and attention layers are normalized,
    except those that are already. ``normalized_weights(model)`` has the names of the weights that
    are, ``unnormalized_weights(model)`` those of the weights left out.

    Args:
        model: a model or a layer. It is changed in place, completely or (on an error) not at all.
        where: ``where(name, module)`` returns whether to normalize the parameter of this name, as
            ``"head.weight"``, which the module has. It can also choose embeddings and, if `dim` is
            given, any parameter of two or more dimensions.
        dim: as in ``weight_norm``, or a function of the same two arguments that returns it.
        g, scale, train_g: as in ``weight_norm``.

    A weight that several modules share stays shared: it is normalized in all of them if it is in
    one. Finding nothing to normalize is an error.

    >>> from weightnorm import normalized_weights
    >>> model = weight_norm_model(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> list(normalized_weights(model))
    ['0.weight', '2.weight']
    """
    _check_changeable(model, "weight_norm_model")
    _apply(layers.select(model, where, dim), Options(g, scale, None, train_g))
    return model


@torch.no_grad()
def init_(module: M, fn: Callable[[Tensor], object], name: str = "weight") -> M:
    """Initialize a weight in place with `fn`, whether it is normalized or not.

    For a normalized weight v and g are set so that w has the value that `fn` fills in, or changes
    in place.

    >>> layer = init_(weight_norm(nn.Linear(2, 3)), nn.init.ones_)
    >>> bool((layer.weight == 1).all())
    True
    """
    refuse_folded(module, f"initialize {name!r}")
    if is_weight_normed(module, name):
        normalized = normalized_weight(module, name)
        weight = normalized.weight().clone()
        fn(weight)
        normalized.write(weight)
    else:
        fn(module.get_parameter(name))
    return module


def param_groups(
    model: nn.Module,
    *,
    v: dict[str, Any] | None = None,
    g: dict[str, Any] | None = None,
    others: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for v, g and all other parameters of a model, for any optimizer.

    Args:
        model: a model with normalized weights.
        v, g, others: options of each group, such as ``{"weight_decay": 0.1}``. v and g have no
            weight decay unless it is given: on v it does not change the function of the layer, and
            on g it is weight decay of the weight itself.

    >>> model = weight_norm(nn.Linear(2, 3))
    >>> groups = param_groups(model, g={"lr": 0.01}, others={"weight_decay": 0.1})
    >>> optimizer = torch.optim.AdamW(groups, lr=0.001)
    >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    [(0.001, 0.0), (0.01, 0.0), (0.001, 0.1)]
    """
    stored = [weight.stored for weight in find_normalized(model)]
    roles = {id(part): role for parts in stored for role, part in zip("vg", parts, strict=True)}
    found: dict[str, list[nn.Parameter]] = {"v": [], "g": [], "others": []}
    for parameter in model.parameters():
        found[roles.get(id(parameter), "others")].append(parameter)
    options = {
        "v": {"weight_decay": 0.0, **(v or {})},
        "g": {"weight_decay": 0.0, **(g or {})},
        "others": others or {},
    }
    return [{"params": params, **options[role]} for role, params in found.items() if params]


@dataclass(frozen=True)
class Options:
    """The options of ``weight_norm`` but for the choice of the weight."""

    g: Length | None
    scale: Scale
    mask: Tensor | None
    train_g: bool

    def __post_init__(self) -> None:
        mask = self.mask
        if mask is not None and is_eager(mask) and not ((mask == 0) | (mask == 1)).all():
            raise ValueError("mask must hold 0 and 1: it is multiplied into v more than once")
        if self.g is not None and not callable(self.g):
            self._as_length(self.g)

    def _as_length(self, value: Any, source: str = "") -> Tensor:
        """Return an initial length as a tensor; raise if no weight can have it."""
        got = f"g={value}{source}"
        # Not on the default device, which may be "meta": from_pretrained builds models there.
        g = value.detach() if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
        if not g.isfinite().all():
            raise ValueError(f"{got} must be finite")
        if self.scale == "log" and not (g > 0).all():
            raise ValueError(f'{got} must be positive with scale="log", where g = eˢ')
        if not (self.train_g or (g > 0).all()):
            raise ValueError(f"{got} must be positive with train_g=False, which keeps it")
        return g

    def check(self, weight: PlainWeight) -> None:
        """Raise if the weight cannot have these options."""
        parameter, path = weight.parameter, weight.path
        refuse_folded(weight.module, "apply weight norm to a weight")
        if is_sharded(parameter):
            raise ValueError(
                f"{path} is sharded over ranks already: normalize first, then fully_shard; or "
                "leave the model plain and use WeightNormOptimizer, which takes sharded weights"
            )
        for argument in ("mask", "g"):
            if parameter.is_meta and getattr(self, argument) is not None:
                raise ValueError(
                    f"{path} is on the meta device, where {argument} would lose its values; give "
                    "the layer memory with to_empty first"
                )
        if not is_lazy(parameter):
            self.initial_g(weight)
            if self.mask is not None:
                self.mask.broadcast_to(parameter.shape)  # raises if it does not fit

    def initial_g(self, weight: PlainWeight) -> Tensor | None:
        """Return the initial g in its shape, or raise if it does not broadcast to it."""
        if self.g is None:
            return None
        full = weight.parameter.shape
        if callable(self.g):
            value = self._as_length(self.g(full), f" for {weight.path} of shape {tuple(full)}")
        else:
            value = self._as_length(self.g)
        shape = weight.units.shape(full)
        try:
            return value.broadcast_to(shape)
        except RuntimeError as error:
            got = f"g has shape {tuple(value.shape)}, which does not broadcast to {shape}"
            raise ValueError(got) from error

    def directions(self, weight: PlainWeight, mask: Tensor | None) -> Tensor:
        """Return the weight with a random direction of norm 1 in place of every zero unit."""
        w, units = functional.masked(weight.parameter.detach(), mask), weight.units
        zero = units.spread(units.norm(w) <= EPS, w)
        if not zero.any():
            return w
        random = units.random_directions(w.shape, weight.path).to(w)
        ones = w.new_ones(units.shape(w.shape))
        unit = functional.compose(v=random, g=ones, units=units, mask=mask)
        return torch.where(zero, unit, w)

    def weight_norm(self, weight: PlainWeight) -> WeightNorm:
        """Return the map from v and g to this weight."""
        parameter = weight.parameter
        mask = None if self.mask is None else self.mask.to(parameter, copy=True)
        made = WeightNorm(weight.units, scale=self.scale, mask=mask)
        return made.to(parameter.device)

    @torch.no_grad()
    def initialize(self, registered: WeightNormParametrizationList, weight: PlainWeight) -> None:
        """Set g to its initial value, and freeze it if it is not trained."""
        g, weight_norm = self.initial_g(weight), cast(WeightNorm, registered[0])
        if g is not None:
            registered.original0.copy_(weight_norm.stored(g.to(registered.original0)))
            registered.original1.copy_(self.directions(weight, weight_norm.mask))
        if not self.train_g:
            freeze_length(registered)


def _check_changeable(module: nn.Module, function: str) -> None:
    """Check that the parameters of a module can be replaced."""
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise ValueError(
            "DistributedDataParallel has registered the parameters already, and would not send the "
            f"gradients of new ones; call {function} first, then wrap the model"
        )


Tied = dict[nn.Parameter, WeightNormParametrizationList]
"""v and g by the parameter that they have replaced."""


def _apply(weights: list[PlainWeight], options: Options, tied: Tied | None = None) -> None:
    """Normalize all weights or none; lazy ones when their module is materialized."""
    for weight in weights:
        options.check(weight)
    tied = {} if tied is None else tied
    undo: list[Callable[[], object]] = []
    try:
        for weight in weights:
            module, name, parameter = weight.module, weight.name, weight.parameter
            if is_lazy(parameter):
                hook = NormalizeWhenMaterialized(name, partial(_apply, [weight], options, tied))
                module.register_forward_pre_hook(hook)
                undo.append(partial(hook.remove, module))
                continue
            order, shared = dict(module._parameters), tied.get(parameter)
            new = options.weight_norm(weight) if shared is None else shared
            registered = _parametrize.register(module, name, new)
            undo.append(partial(_parametrize.unregister, module, name, order))
            if shared is None:
                options.initialize(registered, weight)
                tied[parameter] = registered
    except BaseException:
        for step in reversed(undo):
            step()
        raise
