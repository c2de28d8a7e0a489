"""Compute w = g·v/‖v‖: one kernel per device, and the formula for everything else.

- CPU (cpu.py): torch's fused kernel, where units are rows.
- accelerators (triton.py): kernels of our own.
- any device (formula.py): eq. 3 as the backward pass in eager mode; under compilers, tracers and
  function transforms plain differentiable operations.

All agree to rounding, and on zero units:

Note [zero units]
    At v = 0 the direction v/‖v‖ does not exist. A unit with ‖v‖ ≤ eps counts as zero: w = 0, and no
    gradient reaches v or g (the only choice symmetric in v). NaN is not zero: it propagates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from weightnorm._dtensor import is_sharded, local, placed_like
from weightnorm._kernels import cpu
from weightnorm._kernels.formula import closed_form, formula
from weightnorm._kernels.formula import gradients as _gradients
from weightnorm._torch_private import (
    are_functorch_transforms_active,
    get_tracing_state,
    len_torch_dispatch_stack,
)
from weightnorm._units import EPS, Parts, Units

__all__ = ["closed_form", "compose", "formula", "gradients", "norm"]


def compose(v: Tensor, g: Tensor, units: Units, eps: float = EPS) -> Tensor:
    """Return w = g·v/‖v‖ by the kernel of this device."""
    units.check(v, g)
    if not is_differentiated_by_autograd(v):
        w = _compose_shard(v, g, units, eps) if is_sharded(v) and _only_autograd() else None
        return formula(v, g, units, eps) if w is None else w
    w = None
    if on_accelerator(v):
        from weightnorm._kernels import triton

        w = triton.compose(v, g, units, eps)
    elif is_eager(v) and cpu.serves(v, g, units):
        w = cpu.compose(v, g, eps)
    if w is not None:
        return w
    if torch.is_grad_enabled() and (v.requires_grad or g.requires_grad):
        return closed_form(v, g, units, eps)
    return formula(v, g, units, eps)


def _compose_shard(v: Any, g: Tensor, units: Units, eps: float) -> Tensor | None:
    """Return w from this rank's shard of v and g; None if a unit lies on several ranks."""
    kept = units.kept(v.ndim)
    whole = (p.is_replicate() or (p.is_shard() and p.dim in kept) for p in v.placements)
    if units.groups > 1 or not is_sharded(g) or not all(whole):
        return None
    w = compose(local(v), local(placed_like(g, v)), units, eps)
    sharded: Tensor = type(v).from_local(
        w, v.device_mesh, v.placements, run_check=False, shape=v.shape, stride=v.stride()
    )
    return sharded


def norm(v: Tensor, units: Units) -> Tensor:
    """Return ‖v‖ of each unit: where a kernel serves, to the bit as `compose` takes it."""
    if (torch.is_grad_enabled() and v.requires_grad) or not is_eager(v):
        return units.norm(v)
    if not on_accelerator(v):
        return cpu.norm(v) if cpu.serves(v, v, units) else units.norm(v)
    from weightnorm._kernels import triton

    found = triton.norm(v, units)
    return units.norm(v) if found is None else found


def gradients(grad_w: Tensor, v: Tensor, g: Tensor, units: Units, eps: float = EPS) -> Parts:
    """Return ∇v and ∇g of eq. 3."""
    units.check(v, g)
    is_plain = not torch.is_grad_enabled() and is_eager(v) and not on_accelerator(v)
    if is_plain and grad_w.dtype is v.dtype and v.is_contiguous() and cpu.serves(v, g, units):
        length = cpu.norm(v)
        if length.min().item() > eps:
            return Parts(*cpu.backward(grad_w, v, g, length))
    return _gradients(grad_w, v, g, units, units.divisor(v, eps))


def on_accelerator(v: Tensor) -> bool:
    """Return whether reading a value of this tensor would wait for a device."""
    return (_assume_accelerator or not v.is_cpu) and not v.is_meta


_assume_accelerator = False


@contextmanager
def assume_accelerator() -> Iterator[None]:
    """Take the path of an accelerator on any device, to count or test what it would launch."""
    global _assume_accelerator
    before, _assume_accelerator = _assume_accelerator, True
    try:
        yield
    finally:
        _assume_accelerator = before


def is_eager(v: Tensor) -> bool:
    """Return whether values are real and can be read, and only reverse-mode autograd is active."""
    return is_differentiated_by_autograd(v) and len_torch_dispatch_stack() == 0


def is_differentiated_by_autograd(v: Tensor) -> bool:
    """Return whether only reverse-mode autograd is active: no compiler, function transform or
    tracer. Forms with a hand-written backward pass need it."""
    return type(v) in _PLAIN and not v.is_meta and _only_autograd()


def _only_autograd() -> bool:
    return (
        not torch.compiler.is_compiling()
        and not are_functorch_transforms_active()
        and get_tracing_state() is None
        and forward_ad._current_level < 0
    )


_PLAIN = (Tensor, torch.nn.Parameter)


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Compute in the tensors' own types: autocast would round sums and products of matrices."""
    kind = x.device.type
    # torch 2.9 cannot compile `is_autocast_available`. Only devices that have it are compiled for.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    if available and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
