"""w = g·v/‖v‖ on an accelerator: one Triton kernel forward, one backward, for any units.

A contiguous weight is seen as (outer, before, units, after): a unit is one index along the first
and third of these, and its norm runs over the other two. Sums are taken in float32 or wider,
offsets in int64, and zero units are handled inside, so nothing is read back and nothing else is
launched.

The kernels are operators of torch (``weightnorm::compose`` and ``weightnorm::compose_backward``)
with an implementation in plain operations for devices that Triton does not serve. This module is
imported when a tensor on an accelerator arrives, and triton itself when one on a device that it
serves does.

Note [tiles]
    A program handles BU units and runs over their elements BE at a time, twice: for the sum and for
    the result. Where a unit's elements lie one after the other (long rows) it takes one unit; else
    neighboring units, so that a warp reads whole cache lines.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weightnorm._kernels.blocks import BLOCKS, Blocks, blocks_of, in_memory_order
from weightnorm._kernels.formula import gradients
from weightnorm._units import EPS, Units, wide_dtype

SERVED = ("cuda", "xpu")
"""Devices that Triton has a backend for; "cuda" is also AMD's."""

is_enabled = os.environ.get("WEIGHTNORM_TRITON", "1") != "0"
"""Set by ``functional.use_triton``."""


def compose(v: Tensor, g: Tensor, units: Units, eps: float = EPS) -> Tensor | None:
    """Return w = g·v/‖v‖, or None if the kernels do not serve this weight."""
    moved, there, back = in_memory_order(v, units)
    blocks = blocks_of(moved.shape, there)
    if blocks is None or not moved.is_contiguous() or not v.numel():
        return None
    w: Tensor = _Compose.apply(moved, g, there, blocks, eps)
    return w if moved is v else w.permute(back)


def norm(v: Tensor, units: Units) -> Tensor | None:
    """Return ‖v‖ to the bit as `compose` takes it; None if the kernels do not serve this weight."""
    moved, there, _ = in_memory_order(v, units)
    blocks = blocks_of(moved.shape, there)
    if blocks is None or not moved.is_contiguous() or not v.numel():
        return None
    shape = units.shape(v.shape)
    found = torch.ops.weightnorm.compose(moved, v.new_ones(shape), blocks, -1.0)[1]
    return found.view(shape)  # type: ignore[no-any-return]


class _Compose(torch.autograd.Function):
    """One kernel forward and one backward; v, g and ‖v‖ are kept."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, g: Tensor, units: Units, blocks: Blocks, eps: float) -> Tensor:
        w, norm = torch.ops.weightnorm.compose(v, g.contiguous(), blocks, eps)
        ctx.save_for_backward(v, g, norm)
        ctx.units, ctx.blocks, ctx.eps = units, blocks, eps
        return w  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_w: Tensor) -> tuple[Tensor | None, ...]:
        v, g, norm = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward: ‖v‖ must carry its own gradient
            units, as_moved = ctx.units, g.reshape(ctx.units.shape(v.shape))
            grad_v, grad_g = gradients(grad_w, v, as_moved, units, units.divisor(v, ctx.eps))
            return grad_v, grad_g.reshape(g.shape), *_NO
        grads = torch.ops.weightnorm.compose_backward(
            grad_w.contiguous(), v, g.contiguous(), norm, ctx.blocks
        )
        return *grads, *_NO


_NO = (None, None, None)

# — operators —

_LIBRARY = torch.library.Library("weightnorm", "DEF")
_LIBRARY.define("compose(Tensor v, Tensor g, SymInt[] blocks, float eps) -> (Tensor, Tensor)")
_LIBRARY.define(
    "compose_backward(Tensor grad_w, Tensor v, Tensor g, Tensor norm, SymInt[] blocks)"
    " -> (Tensor, Tensor)"
)


def _compose_by_operations(
    v: Tensor, g: Tensor, blocks: Blocks, eps: float
) -> tuple[Tensor, Tensor]:
    rows = v.reshape(blocks)
    norm = BLOCKS.divisor(rows, eps)
    w = rows * (g.reshape(norm.shape) / norm)
    return w.to(v.dtype).view(v.shape), norm.flatten()


def _backward_by_operations(
    grad_w: Tensor, v: Tensor, g: Tensor, norm: Tensor, blocks: Blocks
) -> tuple[Tensor, Tensor]:
    norm = norm.view(BLOCKS.shape(tuple(blocks)))
    grad_v, grad_g = BLOCKS.gradients(
        grad_w.reshape(blocks), v.reshape(blocks), g.reshape(norm.shape), norm
    )
    return grad_v.to(v.dtype).view(v.shape), grad_g.to(g.dtype).view(g.shape)


def _fake_compose(v: Tensor, g: Tensor, blocks: Blocks, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), v.new_empty(blocks[0] * blocks[2], dtype=wide_dtype(v.dtype))


def _fake_backward(
    grad_w: Tensor, v: Tensor, g: Tensor, norm: Tensor, blocks: Blocks
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), torch.empty_like(g)


def _launch_compose(v: Tensor, g: Tensor, blocks: Blocks, eps: float) -> tuple[Tensor, Tensor]:
    from weightnorm._kernels import triton_kernels

    return triton_kernels.compose(v, g, blocks, eps)


def _launch_backward(
    grad_w: Tensor, v: Tensor, g: Tensor, norm: Tensor, blocks: Blocks
) -> tuple[Tensor, Tensor]:
    from weightnorm._kernels import triton_kernels

    return triton_kernels.backward(grad_w, v, g, norm, blocks)


def or_operations(launch: Callable[..., Any], operations: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that launches a kernel or, where that is off or fails, uses operations."""

    @functools.wraps(operations)
    def call(*args: Any) -> Any:
        if is_enabled:
            try:
                return launch(*args)
            except Exception as error:
                _give_up(error)
        return operations(*args)

    return call


def _give_up(error: Exception) -> None:
    """Use torch's operations from now on, with one warning; raise if memory has run out."""
    global is_enabled
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    if not (isinstance(error, ModuleNotFoundError) and error.name == "triton"):
        warnings.warn(
            f"weight norm's Triton kernels failed ({type(error).__name__}: {error}); torch's "
            "operations take over",
            stacklevel=3,
        )
    is_enabled = False


for _name, _operations, _fake, _launch in (
    ("compose", _compose_by_operations, _fake_compose, _launch_compose),
    ("compose_backward", _backward_by_operations, _fake_backward, _launch_backward),
):
    _LIBRARY.impl(_name, _operations, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weightnorm::{_name}", _fake, lib=_LIBRARY)
    for _device in SERVED:
        _LIBRARY.impl(_name, or_operations(_launch, _operations), _device.upper())
