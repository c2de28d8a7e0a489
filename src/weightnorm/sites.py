"""A normalized weight: the map that makes it, and where in a model it lives, in any flavour."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm as TorchWeightNorm

from weightnorm import functional, kernels, mechanism
from weightnorm.functional import EPS, Parts
from weightnorm.sharding import on_mesh_of, placed_like

Scale = Literal["linear", "log"]
SCALES = ("linear", "log")


class WeightNorm(nn.Module):
    """The map (g, v) → w = g·v/‖v‖ that torch's parametrization mechanism evaluates.

    With ``scale="log"`` the stored scalar is s and g = eˢ.
    """

    mask: Tensor | None

    def __init__(
        self,
        dim: int | None,
        *,
        groups: int = 1,
        scale: Scale = "linear",
        mask: Tensor | None = None,
        eps: float = EPS,
    ) -> None:
        super().__init__()
        self.dim, self.groups, self.scale, self.eps = dim, groups, scale, eps
        self.register_buffer("mask", mask, persistent=False)
        self.plain = mask is None and scale == "linear"
        if scale == "log":
            # A key of its own in the state dict: s must never be loaded as g, or g as s.
            self.register_buffer("log_scale", torch.tensor(True))

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        if not self.plain:
            g = self.length(g)
            v = v if self.mask is None else v * on_mesh_of(self.mask, v)
        return kernels.compose(v, g, self.dim, self.groups, self.eps)

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        v, g = functional.decompose(w, self.dim, groups=self.groups, mask=self.mask, eps=self.eps)
        return self.stored(g), v

    def length(self, stored: Tensor) -> Tensor:
        """g from what is stored: itself, or eˢ."""
        return stored.exp() if self.scale == "log" else stored

    def stored(self, g: Tensor) -> Tensor:
        """What is stored for g. A log-scale cannot say 0: it says the least number instead."""
        return g.clamp_min(torch.finfo(g.dtype).tiny).log() if self.scale == "log" else g

    def extra_repr(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return f"dim={self.dim}{groups}, scale={self.scale!r}{', masked' * (self.mask is not None)}"


@dataclass(frozen=True)
class Site:
    """One normalized tensor of one module: this library's, or either of torch's flavours."""

    path: str
    """Dotted name of the tensor in the model that was searched."""
    module: nn.Module
    name: str

    @property
    def chain(self) -> Any:
        """The tensor's parametrizations, weight norm first; empty for torch's hooked flavour."""
        found = mechanism.parametrizations_of(self.module)
        return found[self.name] if self.name in found else ()  # noqa: SIM401 (it has no get)

    @property
    def map(self) -> Any:
        """WeightNorm, or torch's equivalent; None for torch's hooked flavour."""
        return self.chain[0] if self.chain else None

    @property
    def is_log(self) -> bool:
        return isinstance(self.map, WeightNorm) and self.map.scale == "log"

    @property
    def stored(self) -> Parts:
        """The parameters themselves: v, and g or s."""
        if self.map is None:
            return Parts(*(getattr(self.module, f"{self.name}_{part}") for part in "vg"))
        return Parts(self.chain.original1, self.chain.original0)

    @property
    def axis(self) -> tuple[int | None, int]:
        """The axis that is kept, and the groups axis 0 is split into."""
        if isinstance(self.map, WeightNorm):
            return self.map.dim, self.map.groups
        dim = (mechanism.hook_of(self.module, self.name) or self.map).dim
        return (None if dim == -1 else dim), 1  # torch says −1 for no axis

    def parts(self) -> Parts:
        """v and g; for a log-scale g is eˢ."""
        v, g = self.stored
        return Parts(v, self.map.length(g)) if isinstance(self.map, WeightNorm) else Parts(v, g)

    def v_norm(self) -> Tensor:
        """‖v‖ of each unit, shaped like g; under the mask, if there is one."""
        v, hook = self.stored.v, mechanism.hook_of(self.module, self.name)
        if not isinstance(self.map, WeightNorm):
            norm: Tensor = torch.norm_except_dim(v, 2, (hook or self.map).dim)
            return norm
        v = v if self.map.mask is None else v * on_mesh_of(self.map.mask, v)
        return functional.norm(v, self.map.dim, groups=self.map.groups)

    def weight(self) -> Tensor:
        """w as it is now. (A hooked flavour's attribute may be stale: it is set at forward.)"""
        hook = mechanism.hook_of(self.module, self.name)
        w: Tensor = hook.compute_weight(self.module) if hook else getattr(self.module, self.name)
        return w

    @torch.no_grad()
    def decomposed(self, weight: Tensor) -> Parts:
        """What to store so that the weight has this value."""
        if isinstance(self.map, WeightNorm):
            g, v = self.map.right_inverse(weight)
            return Parts(v, g)
        dim = (mechanism.hook_of(self.module, self.name) or self.map).dim
        return Parts(weight.clone(), torch.norm_except_dim(weight, 2, dim))

    @torch.no_grad()
    def write(self, weight: Tensor) -> None:
        """Set v and g so that the weight has this value."""
        if weight.shape != self.stored.v.shape:
            got, expected = tuple(weight.shape), tuple(self.stored.v.shape)
            raise ValueError(f"got a weight of shape {got}, expected {expected}")
        for stored, value in zip(self.stored, self.decomposed(weight), strict=True):
            stored.copy_(placed_like(value, stored))
        if self.map is None:  # the attribute that its hook sets at forward
            setattr(self.module, self.name, self.weight())


def sites(model: nn.Module, *, recurse: bool = True) -> Iterator[Site]:
    """Every normalized tensor of a model, in the order of its modules."""
    for path, module in model.named_modules() if recurse else [("", model)]:
        names = [
            name
            for name, originals in mechanism.parametrizations_of(module).items()
            if isinstance(originals[0], (WeightNorm, TorchWeightNorm))
        ]
        for name in names + mechanism.hooked_names(module):
            yield Site(f"{path}.{name}".lstrip("."), module, name)


def parts(layer: nn.Module, name: str = "weight") -> Parts:
    """The direction v and the length g of a normalized weight: the parameters themselves.

    (For ``scale="log"``, g is computed as eˢ.) Reads torch's own two flavours as well.
    """
    return site_of(layer, name).parts()


def site_of(layer: nn.Module, name: str) -> Site:
    """The normalized tensor of that name, or an error that says which there are."""
    present = {site.name: site for site in sites(layer, recurse=False)}
    if name in present:
        return present[name]
    hint = f"normalized here: {', '.join(present)}" if present else "apply weight_norm first"
    raise ValueError(f"{type(layer).__name__} has no weight-normalized tensor {name!r}; {hint}")


def is_weight_normed(layer: nn.Module, name: str | None = None) -> bool:
    """Whether the layer itself has a weight-normalized tensor (of that name), in any flavour."""
    return any(name in (None, site.name) for site in sites(layer, recurse=False))


def normalized_weights(model: nn.Module) -> dict[str, Parts]:
    """Every normalized weight of a model by its name, as parts (v, g).

    >>> from weightnorm import weight_norm
    >>> normalized_weights(weight_norm(nn.Linear(2, 3)))["weight"].g.shape
    torch.Size([3, 1])
    """
    return {site.path: site.parts() for site in sites(model)}
