"""The optimizer form's step on an accelerator: two launches, however many weights there are.

``weightnorm::to_directions_`` turns every w into v and every ∇w into ∇v, and sets ∇g;
``weightnorm::to_weights_`` turns every v into w and updates ‖v‖. Both take lists of weights and g,
‖v‖ and ∇g as columns with one number for each unit of all of them. As the operators in triton.py,
they have an implementation in torch's operations for devices that Triton does not serve.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weightnorm._kernels import triton as module_form
from weightnorm._kernels.triton import BLOCKS
from weightnorm._units import EPS, SHORTEST, agree


def unit_sums(
    w: list[Tensor], grad: list[Tensor], blocks: list[int], first: list[int], out: Tensor
) -> None:
    """Write Σw², Σ∇w·w and Σ∇w of every unit to the columns of `out`."""
    for k, x in enumerate(w):
        outer, before, units, after = blocks[4 * k : 4 * k + 4]
        rows = x.view(outer, before, units, after)
        slope = grad[k].to(x.dtype).view(rows.shape)
        part = out[first[k] : first[k] + outer * units]
        for i, term in enumerate((rows * rows, slope * rows, slope)):
            part[:, i] = BLOCKS.sum(term).flatten()


def _to_directions_by_operations(
    w: list[Tensor], narrow: list[Tensor], grad: list[Tensor], grad_v: list[Tensor],
    g: Tensor, norm: Tensor, grad_g: Tensor, was_zero: Tensor, sums: Tensor | None,
    blocks: list[int], first: list[int], fan_in: list[int], log: bool, project: bool,
) -> None:  # fmt: skip
    for x, now in zip(w, narrow, strict=False):
        x.copy_(torch.where(x.to(now.dtype) == now, x, now.to(x.dtype)))
    if sums is None:
        sums = g.new_empty(len(g), 3)
        unit_sums(w, grad, blocks, first, sums)
    for k, x in enumerate(w):
        outer, before, units, after = blocks[4 * k : 4 * k + 4]
        part = slice(first[k], first[k] + outer * units)
        shape = (outer, 1, units, 1)
        square, product, total = (column.view(shape) for column in sums[part].unbind(1))
        stored, length = g[part].view(shape), square.sqrt()
        length = torch.where(length.isinf(), torch.nan, length)
        old = stored.exp() if log else stored
        same, zero = agree(old, length), length <= EPS
        sign = torch.where(old < 0, -1.0, 1.0)
        new = torch.where(same, old, sign * length)
        signed = sign * torch.where(zero, 1.0, length)
        diagonal = fan_in[k] ** -0.5
        dot = torch.where(zero, total * diagonal, product) / signed
        rows = x.view(outer, before, units, after)
        rows.copy_(torch.where(zero, diagonal, rows))
        slope = grad[k].to(x.dtype).view(rows.shape)
        slope = slope - rows * (dot / signed) if project else slope
        held = norm[part].view(shape)
        grad_v[k].view(rows.shape).copy_(slope * (new / held))
        grad_g[part] = (dot * new if log else dot).view(-1, 1)
        tiny = torch.finfo(g.dtype).tiny
        written = length.clamp_min(tiny).log() if log else new
        g[part] = torch.where(same, stored, written).view(-1, 1)
        was_zero[part] = (zero & ~same).view(-1, 1)
        rows.mul_(held / signed)


def _to_weights_by_operations(
    w: list[Tensor], narrow: list[Tensor], g: Tensor, norm: Tensor, was_zero: Tensor,
    squares: Tensor | None, blocks: list[int], first: list[int], log: bool,
) -> None:  # fmt: skip
    for k, x in enumerate(w):
        outer, before, units, after = blocks[4 * k : 4 * k + 4]
        part, shape = slice(first[k], first[k] + outer * units), (outer, 1, units, 1)
        rows = x.view(outer, before, units, after)
        square = BLOCKS.sum(rows * rows) if squares is None else squares[part].view(shape)
        length = square.sqrt()
        length = torch.where(length.isinf(), torch.nan, length)
        own = g[part].view(shape).exp() if log else g[part].view(shape)
        zero = length <= EPS
        gone = zero | (was_zero[part].view(shape) & (own == 0))
        factor = torch.where(own < 0, -1.0, 1.0) * own.abs().clamp_min(SHORTEST) / length
        rows.mul_(torch.where(gone, 0.0, factor))
        norm[part] = torch.where(zero, norm[part].view(shape), length).view(-1, 1)
        if narrow:
            narrow[k].copy_(x)


_LIBRARY = torch.library.Library("weightnorm", "FRAGMENT")
_LIBRARY.define(
    "to_directions_(Tensor(a!)[] w, Tensor[] narrow, Tensor[] grad, Tensor(b!)[] grad_v,"
    " Tensor(c!) g, Tensor norm, Tensor(d!) grad_g, Tensor(e!) was_zero, Tensor? sums,"
    " int[] blocks, int[] first, int[] fan_in, bool log, bool project) -> ()"
)
_LIBRARY.define(
    "to_weights_(Tensor(a!)[] w, Tensor(b!)[] narrow, Tensor g, Tensor(c!) norm, Tensor was_zero,"
    " Tensor? squares, int[] blocks, int[] first, bool log) -> ()"
)
_LIBRARY.define(
    "unit_sums_(Tensor[] w, Tensor[] grad, int[] blocks, int[] first, Tensor(a!) out) -> ()"
)


def _launch_sums(
    w: list[Tensor], grad: list[Tensor], blocks: list[int], first: list[int], out: Tensor
) -> None:
    from weightnorm._kernels import triton_step_kernels as kernels

    weights, units = kernels.table(w, [], grad, [], blocks, first, [])
    kernels.sums_kernel[(len(units),)](
        weights, units, out,
        WIDE=kernels.TYPES[w[0].dtype], NARROW_TYPE=kernels.TYPES[grad[0].dtype],
        BE=kernels.tile(blocks),
    )  # fmt: skip


def _launch_to_directions(
    w: list[Tensor], narrow: list[Tensor], grad: list[Tensor], grad_v: list[Tensor],
    g: Tensor, norm: Tensor, grad_g: Tensor, was_zero: Tensor, sums: Tensor | None,
    blocks: list[int], first: list[int], fan_in: list[int], log: bool, project: bool,
) -> None:  # fmt: skip
    from weightnorm._kernels import triton_step_kernels as kernels

    weights, units = kernels.table(w, narrow, grad, grad_v, blocks, first, fan_in)
    info = torch.finfo(g.dtype)
    kernels.directions_kernel[(len(units),)](
        weights, units, g, norm, grad_g, was_zero, g if sums is None else sums,
        SHORTEST, EPS, 64 * info.eps, info.tiny,
        LOG=log, PROJECT=project, GIVEN=sums is not None,
        WIDE=kernels.TYPES[g.dtype], NARROW_TYPE=kernels.TYPES[grad[0].dtype],
        BE=kernels.tile(blocks),
    )  # fmt: skip


def _launch_to_weights(
    w: list[Tensor], narrow: list[Tensor], g: Tensor, norm: Tensor, was_zero: Tensor,
    squares: Tensor | None, blocks: list[int], first: list[int], log: bool,
) -> None:  # fmt: skip
    from weightnorm._kernels import triton_step_kernels as kernels

    weights, units = kernels.table(w, narrow, [], [], blocks, first, [])
    kernels.weights_kernel[(len(units),)](
        weights, units, g, norm, was_zero, g if squares is None else squares, SHORTEST, EPS,
        LOG=log, GIVEN=squares is not None,
        WIDE=kernels.TYPES[g.dtype],
        NARROW_TYPE=kernels.TYPES[(narrow or w)[0].dtype],
        BE=kernels.tile(blocks),
    )  # fmt: skip


IMPLEMENTATIONS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "unit_sums_": (unit_sums, _launch_sums),
    "to_directions_": (_to_directions_by_operations, _launch_to_directions),
    "to_weights_": (_to_weights_by_operations, _launch_to_weights),
}
for _name, (_operations, _launch) in IMPLEMENTATIONS.items():
    _LIBRARY.impl(_name, _operations, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weightnorm::{_name}", lambda *args: None, lib=_LIBRARY)
    for _device in module_form.SERVED:
        _LIBRARY.impl(_name, module_form.or_operations(_launch, _operations), _device.upper())
