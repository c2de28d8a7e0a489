"""w = g·v/‖v‖ as torch.nn.utils.parametrize evaluates it: the map, and what holds its g and v."""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from weightnorm import _kernels, functional
from weightnorm._dtensor import any_true, placed_like
from weightnorm._units import Units

Scale = Literal["linear", "log"]


class WeightNorm(nn.Module):
    """Compute w = g·v/‖v‖: the module that torch.nn.utils.parametrize evaluates.

    ``forward(g, v)`` returns w, and ``right_inverse(w)`` returns (g, v). With ``scale="log"`` the
    first of the two is s, with g = eˢ. Arguments as in ``weight_norm``; `units` instead of `dim`.
    """

    mask: Tensor | None

    def __init__(
        self,
        units: Units,
        *,
        scale: Scale = "linear",
        mask: Tensor | None = None,
    ) -> None:
        super().__init__()
        if scale not in get_args(Scale):
            raise ValueError(
                f"scale={scale!r} is unknown; expected 'linear', which trains g, or 'log', which "
                "trains s with g = eˢ"
            )
        self.units, self.scale = units, scale
        self.register_buffer("mask", mask, persistent=False)
        self.plain = mask is None and scale == "linear"
        if scale == "log":
            # A key of its own in the state dict, so that s is never loaded as g, or g as s. Not a
            # bool: averages of buffers must leave it as it is.
            self.register_buffer("log_scale", torch.tensor(1.0))

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        if not self.plain:
            g, v = self.length(g), functional.masked(v, self.mask)
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            return self._traced(g=g, v=v)
        return _kernels.compose(v, g, self.units)

    def _traced(self, *, g: Tensor, v: Tensor) -> Tensor:
        """The same for torch.jit.trace, which must record one graph with and without gradients."""
        with torch.enable_grad(), warnings.catch_warnings():
            # The formula branches on the weight's shape, which is a constant.
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
            return _kernels.formula(v, g, self.units)

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        v, g = functional.decompose(w, self.units, mask=self.mask)
        return self.stored(g), v

    def length(self, stored: Tensor) -> Tensor:
        """Compute g from the stored parameter: the parameter itself, or eˢ."""
        return stored.exp() if self.scale == "log" else stored

    def stored(self, g: Tensor) -> Tensor:
        """Compute the parameter to store for g: g itself, or s = log g.

        A log-scale cannot represent g = 0, and stores the smallest normal number instead.
        """
        return g.clamp_min(torch.finfo(g.dtype).tiny).log() if self.scale == "log" else g

    def extra_repr(self) -> str:
        groups = f", groups={self.units.groups}" if self.units.groups > 1 else ""
        masked = ", masked" * (self.mask is not None)
        return f"dim={self.units.dim}{groups}, scale={self.scale!r}{masked}"


class WeightNormParametrizationList(ParametrizationList):
    """Hold original0 = g (or s) and original1 = v of one normalized weight."""

    original0: Tensor
    original1: Tensor

    def forward(self) -> Tensor:
        return compute(self) if is_plain(self) else super().forward()

    @torch.no_grad()
    def right_inverse(self, value: Tensor) -> None:
        """Set v and g by copying, so that they never share memory with `value`, as torch's do."""
        if value.shape != self.original1.shape:
            raise ValueError(
                f"got a weight of shape {tuple(value.shape)}, "
                f"expected {tuple(self.original1.shape)}"
            )
        for original, part in zip(
            (self.original0, self.original1), self._inverted(value), strict=True
        ):
            original.copy_(placed_like(part, original))

    def _inverted(self, weight: Tensor) -> Any:
        """Return the values of original0 and original1 that give this weight."""
        inverse: Any = weight
        for parametrization in reversed(list[Any](self)):
            inverse = parametrization.right_inverse(inverse)
        return inverse

    def loaded(self, stored: list[Tensor], *, is_log: bool, assign: bool) -> tuple[Tensor, Tensor]:
        """Return the values of original0 and original1 for [w], [g, v] or [s, v] of a checkpoint.

        v is masked, so that the state dict alone determines w. With `assign` the type and device
        stay those of the checkpoint.
        """
        weight_norm: Any = self[0]
        own_g, own_v, mask = self.original0, self.original1, weight_norm.mask
        _check_weight(stored[-1], own_v)
        if not (assign or own_v.is_meta):
            stored = [x.to(own_v.device, own_v.dtype) for x in stored]
        if len(stored) == 1:
            g, v = self._inverted(stored[0])
            if not g.is_meta and any_true(g.isfinite().logical_not()):
                raise ValueError("‖w‖ is not finite, so w cannot be represented by v and g")
            return placed_like(g, own_g), placed_like(v, own_v)
        g, v = stored
        if g.shape != own_g.shape and not (own_g.ndim == 0 and g.shape == (1,)):
            raise ValueError(
                f"g has shape {tuple(g.shape)} in the checkpoint and {tuple(own_g.shape)} here: "
                "its units lie along another axis. To load the weight itself, pass "
                'convert_state_dict(state, to="folded"); to keep v and g, apply weight norm with '
                "the checkpoint's dim (torch's is 0, also for transposed convolutions)"
            )
        if is_log and weight_norm.scale != "log":
            g = g.exp()
        if weight_norm.scale == "log" and not is_log:  # w stays the same: g is positive
            v = torch.where(weight_norm.units.spread(g < 0, v), -v, v)
            g = weight_norm.stored(g.abs())
        if mask is not None:
            v = functional.masked(v, mask.to(v.device))
        return placed_like(g, own_g), placed_like(v, own_v)


def _check_weight(w: Any, own_v: Tensor) -> None:
    """Raise unless this value of a checkpoint, w or v, is a tensor of the shape of v."""
    if not (isinstance(w, Tensor) and w.is_floating_point()):
        kind = w.dtype if isinstance(w, Tensor) else type(w).__name__
        raise TypeError(f"is {kind} in the checkpoint; expected a floating-point tensor")
    if w.shape != own_v.shape:
        raise ValueError(f"has shape {tuple(w.shape)} in the checkpoint, {tuple(own_v.shape)} here")


def is_plain(parametrizations: Any) -> bool:
    """Return whether the weight is g·v/‖v‖ of its own v and g and nothing else.

    False with a further parametrization, a hook, another ``forward`` (accelerate's, for offloaded
    parameters), a part that is pruned, and in the replicas of ``nn.DataParallel``: torch's
    implementation serves them.
    """
    if type(parametrizations) is not WeightNormParametrizationList:
        return False
    parameters, modules = parametrizations._parameters, parametrizations._modules
    if len(modules) != 1 or "original1" not in parameters:
        return False
    if "original0" not in parameters and "original0" not in parametrizations._buffers:
        return False
    weight_norm: Any = modules["0"]
    return not (
        "forward" in parametrizations.__dict__
        or parametrizations._forward_pre_hooks
        or parametrizations._forward_hooks
        or weight_norm._forward_pre_hooks
        or weight_norm._forward_hooks
    )


def compute(parametrizations: Any) -> Tensor:
    """Compute a weight that `is_plain`."""
    parameters = parametrizations._parameters
    g = parameters.get("original0")
    w: Tensor = parametrizations._modules["0"].forward(
        parametrizations._buffers["original0"] if g is None else g, parameters["original1"]
    )
    return w


def freeze_length(parametrizations: WeightNormParametrizationList) -> None:
    """Make g a buffer: ``requires_grad_(True)`` on the model does not train it."""
    g = parametrizations._parameters.pop("original0")
    assert g is not None
    parametrizations.register_buffer("original0", g.detach())
