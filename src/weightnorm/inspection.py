"""A normalized weight: the map that makes it, and where in a model it lives, in any flavour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm as TorchWeightNorm

from weightnorm import functional
from weightnorm.dtensor import on_mesh_of, placed_like
from weightnorm.functional import Parts
from weightnorm.parametrization import WeightNorm, hook_of, hooked_names, parametrizations_of


@dataclass(frozen=True)
class NormalizedWeight:
    """One normalized tensor of one module: this library's, or either of torch's flavours."""

    path: str
    """Dotted name of the tensor in the model that was searched."""
    module: nn.Module
    name: str

    @property
    def parametrizations(self) -> Any:
        """The tensor's parametrizations, weight norm first; empty for torch's hooked flavour."""
        found = parametrizations_of(self.module)
        return found[self.name] if self.name in found else ()  # noqa: SIM401 (it has no get)

    @property
    def parametrization(self) -> Any:
        """WeightNorm, or torch's equivalent; None for torch's hooked flavour."""
        chain = self.parametrizations
        return chain[0] if chain else None

    @property
    def is_log(self) -> bool:
        return isinstance(self.parametrization, WeightNorm) and self.parametrization.scale == "log"

    @property
    def stored(self) -> Parts:
        """The parameters themselves: v, and g or s."""
        if not (chain := self.parametrizations):
            return Parts(*(getattr(self.module, f"{self.name}_{part}") for part in "vg"))
        return Parts(chain.original1, chain.original0)

    @property
    def axis(self) -> tuple[int | None, int]:
        """The axis that is kept, and the groups axis 0 is split into."""
        map = self.parametrization
        if isinstance(map, WeightNorm):
            return map.dim, map.groups
        dim = (hook_of(self.module, self.name) or map).dim
        return (None if dim == -1 else dim), 1  # torch says −1 for no axis

    def parts(self) -> Parts:
        """v and g; for a log-scale g is eˢ."""
        (v, g), map = self.stored, self.parametrization
        return Parts(v, map.length(g)) if isinstance(map, WeightNorm) else Parts(v, g)

    def v_norm(self) -> Tensor:
        """‖v‖ of each unit, shaped like g; under the mask, if there is one."""
        v, map = self.stored.v, self.parametrization
        if not isinstance(map, WeightNorm):
            hook = hook_of(self.module, self.name)
            norm: Tensor = torch.norm_except_dim(v, 2, (hook or map).dim)
            return norm
        v = v if map.mask is None else v * on_mesh_of(map.mask, v)
        return functional.norm(v, map.dim, groups=map.groups)

    def weight(self) -> Tensor:
        """w as it is now. (A hooked flavour's attribute may be stale: it is set at forward.)"""
        hook = hook_of(self.module, self.name)
        w: Tensor = hook.compute_weight(self.module) if hook else getattr(self.module, self.name)
        return w

    @torch.no_grad()
    def decomposed(self, weight: Tensor) -> Parts:
        """What to store so that the weight has this value."""
        if isinstance(self.parametrization, WeightNorm):
            g, v = self.parametrization.right_inverse(weight)
            return Parts(v, g)
        dim = (hook_of(self.module, self.name) or self.parametrization).dim
        return Parts(weight.clone(), torch.norm_except_dim(weight, 2, dim))

    @torch.no_grad()
    def write(self, weight: Tensor) -> None:
        """Set v and g so that the weight has this value."""
        if weight.shape != self.stored.v.shape:
            got, expected = tuple(weight.shape), tuple(self.stored.v.shape)
            raise ValueError(f"got a weight of shape {got}, expected {expected}")
        for stored, value in zip(self.stored, self.decomposed(weight), strict=True):
            stored.copy_(placed_like(value, stored))
        if self.parametrization is None:  # the attribute that its hook sets at forward
            setattr(self.module, self.name, self.weight())


def find_normalized(model: nn.Module, *, recurse: bool = True) -> Iterator[NormalizedWeight]:
    """Every normalized tensor of a model, in the order of its modules."""
    for path, module in model.named_modules() if recurse else [("", model)]:
        names = [
            name
            for name, originals in parametrizations_of(module).items()
            if isinstance(originals[0], (WeightNorm, TorchWeightNorm))
        ]
        for name in names + hooked_names(module):
            yield NormalizedWeight(f"{path}.{name}".lstrip("."), module, name)


def parts(layer: nn.Module, name: str = "weight") -> Parts:
    """The direction v and the length g of a normalized weight: the parameters themselves.

    (For ``scale="log"``, g is computed as eˢ.) Reads torch's own two flavours as well.
    """
    return normalized_weight(layer, name).parts()


def normalized_weight(layer: nn.Module, name: str) -> NormalizedWeight:
    """The normalized tensor of that name, or an error that says which there are."""
    present = {site.name: site for site in find_normalized(layer, recurse=False)}
    if name in present:
        return present[name]
    hint = f"normalized here: {', '.join(present)}" if present else "apply weight_norm first"
    raise ValueError(f"{type(layer).__name__} has no weight-normalized tensor {name!r}; {hint}")


def is_weight_normed(layer: nn.Module, name: str | None = None) -> bool:
    """Whether the layer itself has a weight-normalized tensor (of that name), in any flavour."""
    return any(name in (None, site.name) for site in find_normalized(layer, recurse=False))


def normalized_weights(model: nn.Module) -> dict[str, Parts]:
    """Every normalized weight of a model by its name, as parts (v, g).

    >>> from weightnorm import weight_norm
    >>> normalized_weights(weight_norm(nn.Linear(2, 3)))["weight"].g.shape
    torch.Size([3, 1])
    """
    return {site.path: site.parts() for site in find_normalized(model)}
