"""Find the normalized weights of a model, and read and write their v and g.

Recognizes three flavours of weight norm: this library's, torch's parametrization
(``torch.nn.utils.parametrizations.weight_norm``) and torch's older hook
(``torch.nn.utils.weight_norm``).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from weightnorm import functional
from weightnorm._dtensor import placed_like
from weightnorm._parametrize import parametrizations_of, torch_hooks
from weightnorm._torch_private import TorchWeightNorm
from weightnorm._units import Parts, Units, in_float64
from weightnorm._weight_norm import WeightNorm


@dataclass(frozen=True)
class NormalizedWeight:
    """A normalized weight of a module, in any flavour."""

    path: str
    """Name of the weight in the model that was searched, as in ``encoder.0.weight``."""
    module: nn.Module
    name: str

    @property
    def parametrizations(self) -> Any:
        """Its ParametrizationList, weight norm first; empty for torch's hook."""
        found = parametrizations_of(self.module)
        return found[self.name] if self.name in found else ()  # noqa: SIM401 (it has no get)

    @property
    def parametrization(self) -> Any:
        """WeightNorm, or torch's equivalent; None for torch's hook."""
        parametrizations = self.parametrizations
        return parametrizations[0] if parametrizations else None

    @property
    def is_torchs(self) -> bool:
        """Whether torch's weight norm was applied, in either flavour, and not this library's."""
        return not isinstance(self.parametrization, WeightNorm)

    @property
    def is_log(self) -> bool:
        """Whether s = log g is stored."""
        return isinstance(self.parametrization, WeightNorm) and self.parametrization.scale == "log"

    @property
    def mask(self) -> Tensor | None:
        """The mask of v, if it has one."""
        return getattr(self.parametrization, "mask", None)

    @property
    def stored(self) -> Parts:
        """The parameters themselves: v, and g or s."""
        if not (parametrizations := self.parametrizations):
            v, g = (getattr(self.module, f"{self.name}_{part}") for part in "vg")
            return Parts(v=v, g=g)
        return Parts(v=parametrizations.original1, g=parametrizations.original0)

    @property
    def identity(self) -> Hashable:
        """Equal for weights that are computed in the same way from the same v and g."""
        first, *further = self.parametrizations or [None]
        settings = (first.scale, id(first.mask)) if isinstance(first, WeightNorm) else ()
        return *map(id, self.stored), self.units, settings, *map(id, further)

    @property
    def units(self) -> Units:
        """The units, each with a length of its own."""
        parametrization = self.parametrization
        if isinstance(parametrization, WeightNorm):
            return parametrization.units
        dim: int = (parametrization or torch_hooks(self.module)[self.name]).dim
        return Units(None if dim == -1 else dim)  # torch stores dim=None as −1

    def parts(self) -> Parts:
        """Return v and g; for a log-scale, g is computed as eˢ."""
        (v, g), parametrization = self.stored, self.parametrization
        if isinstance(parametrization, WeightNorm):
            g = parametrization.length(g)
        return Parts(v=v, g=g)

    def v_norm(self) -> Tensor:
        """Return ‖v‖ of each unit, shaped like g, with the mask applied if there is one."""
        return functional.norm(functional.masked(self.stored.v, self.mask), self.units)

    def weight(self) -> Tensor:
        """Compute w from the current v and g.

        (The attribute that torch's hook sets is only updated by a forward pass.)
        """
        hook = torch_hooks(self.module).get(self.name)
        w: Tensor = hook.compute_weight(self.module) if hook else getattr(self.module, self.name)
        return w

    @torch.no_grad()
    def folded(self) -> Tensor:
        """Compute w as the plain weight that replaces v and g: see ``functional.fold``."""
        v, g = self.stored
        g, mask = (
            in_float64(g).exp() if self.is_log else g,
            getattr(self.parametrization, "mask", None),
        )
        w = functional.fold(v=v, g=g, units=self.units, mask=mask)
        for further in [*self.parametrizations][1:]:
            w = further(w)
        return w

    @torch.no_grad()
    def write(self, weight: Tensor) -> None:
        """Set v and g so that w equals `weight`."""
        if isinstance(self.parametrization, WeightNorm):
            self.parametrizations.right_inverse(weight)
            return
        for further in reversed([*self.parametrizations][1:]):
            weight = further.right_inverse(weight)
        # torch's own inverse gives a zero row no direction, and the weight would be NaN.
        for stored, value in zip(
            self.stored, functional.decompose(weight, self.units), strict=True
        ):
            stored.copy_(placed_like(value, stored))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the attribute that torch's hook sets, after v or g was written."""
        if self.parametrization is None:
            setattr(self.module, self.name, self.weight())


def find_normalized(
    model: nn.Module, *, recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[NormalizedWeight]:
    """Yield every normalized weight of a model, in the order of its modules.

    A module that is used twice is visited once, or under each of its names.
    """
    modules = model.named_modules(remove_duplicate=remove_duplicate)
    for path, module in modules if recurse else [("", model)]:
        names = [
            name
            for name, parametrizations in parametrizations_of(module).items()
            if isinstance(parametrizations[0], (WeightNorm, TorchWeightNorm))
        ]
        for name in [*names, *torch_hooks(module)]:
            yield NormalizedWeight(f"{path}.{name}".lstrip("."), module, name)


def parts(module: nn.Module, name: str = "weight") -> Parts:
    """Return the direction v and the length g of a normalized weight.

    They are the parameters themselves, so writing to them changes the weight. Only with
    ``scale="log"`` is g a new tensor, eˢ, and writing to it changes nothing. Both flavours of
    torch's weight norm are supported.

    >>> from weightnorm import weight_norm
    >>> v, g = parts(weight_norm(nn.Linear(2, 3)))
    >>> v.shape, g.shape
    (torch.Size([3, 2]), torch.Size([3, 1]))
    """
    return normalized_weight(module, name).parts()


def normalized_weight(module: nn.Module, name: str) -> NormalizedWeight:
    """Return the normalized weight of that name; raise an error that lists the names otherwise."""
    found = {weight.name: weight for weight in find_normalized(module, recurse=False)}
    if name in found:
        return found[name]
    if found:
        hint = f"normalized here: {', '.join(found)}"
    elif next(find_normalized(module), None):
        hint = "normalized_weights returns v and g of the layers inside it"
    else:
        hint = "apply weight_norm first"
    raise ValueError(f"{type(module).__name__} has no weight-normalized tensor {name!r}; {hint}")


def is_weight_normed(module: nn.Module, name: str | None = None) -> bool:
    """Return whether the module itself has a normalized weight (of that name), in any flavour."""
    return any(name in (None, weight.name) for weight in find_normalized(module, recurse=False))


def normalized_weights(model: nn.Module) -> dict[str, Parts]:
    """Return v and g of every normalized weight of a model, by the name of the weight.

    >>> from weightnorm import weight_norm
    >>> normalized_weights(weight_norm(nn.Linear(2, 3)))["weight"].g.shape
    torch.Size([3, 1])
    """
    return {weight.path: weight.parts() for weight in find_normalized(model)}


def unnormalized_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter of two or more dimensions that is not normalized, by name.

    Shows what ``weight_norm_model`` left out: embeddings, and weights of modules whose output axis
    is unknown, such as transformers' ``Conv1D``. Normalize those with ``weight_norm(module, name,
    dim)``.

    >>> from weightnorm import weight_norm_model
    >>> model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 3))
    >>> _ = weight_norm_model(model)
    >>> list(unnormalized_weights(model))
    ['0.weight']
    """
    parts_ = {id(part) for weight in find_normalized(model) for part in weight.stored}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in parts_
        and not isinstance(parameter, UninitializedParameter)
        and parameter.ndim > 1
    }
