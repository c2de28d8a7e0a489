"""The passes of step.py on an accelerator: two launches, however many weights there are.

``weightnorm::to_directions_`` turns every w into v and every ∇w into ∇v, and sets ∇g;
``weightnorm::to_weights_`` turns every v into w and updates ‖v‖. Both take weights as rows or
blocks. As the operators in triton.py, they have an implementation in torch's operations for devices
that Triton does not serve.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weightnorm._kernels import step
from weightnorm._kernels import triton as module_form
from weightnorm._kernels.blocks import BLOCKS
from weightnorm._units import EPS, SHORTEST, Units


def serves(w: step.Weights) -> bool:
    """Return whether the kernels take these weights: all are rows or blocks."""
    return all(
        x.is_contiguous()
        and x.numel() > 0
        and fan_in < 2**31
        and (x.ndim, units) in ((2, Units()), (4, BLOCKS))
        for x, units, fan_in in zip(w.x, w.units, w.fan_in, strict=True)
    )


def _weights(
    w: list[Tensor], narrow: list[Tensor], first: list[int], fan_in: list[int]
) -> step.Weights:
    return step.Weights(w, [Units() if x.ndim == 2 else BLOCKS for x in w], narrow, first, fan_in)


def _sums_by_operations(
    w: list[Tensor], narrow: list[Tensor], grad: list[Tensor], first: list[int], out: Tensor
) -> None:
    step.unit_sums(_weights(w, [], first, []), narrow, grad, out)


def _to_directions_by_operations(
    w: list[Tensor], narrow: list[Tensor], grad: list[Tensor], grad_v: list[Tensor],
    g: Tensor, norm: Tensor, grad_g: Tensor, was_zero: Tensor, sums: Tensor | None,
    first: list[int], fan_in: list[int], log: bool, project: bool,
) -> None:  # fmt: skip
    found: list[Tensor | None] = [*grad]
    step.to_directions(
        _weights(w, narrow, first, fan_in), found, g, norm, grad_g, was_zero, sums,
        log=log, project=project,
    )  # fmt: skip
    for out, new in zip(grad_v, found, strict=True):
        if new is not None:
            out.copy_(new)


def _to_weights_by_operations(
    w: list[Tensor], narrow: list[Tensor], g: Tensor, norm: Tensor, was_zero: Tensor,
    squares: Tensor | None, first: list[int], log: bool,
) -> None:  # fmt: skip
    step.to_weights(_weights(w, narrow, first, []), g, norm, was_zero, squares, log=log)


_LIBRARY = torch.library.Library("weightnorm", "FRAGMENT")
_LIBRARY.define(
    "to_directions_(Tensor(a!)[] w, Tensor[] narrow, Tensor[] grad, Tensor(b!)[] grad_v,"
    " Tensor(c!) g, Tensor norm, Tensor(d!) grad_g, Tensor(e!) was_zero, Tensor? sums,"
    " int[] first, int[] fan_in, bool log, bool project) -> ()"
)
_LIBRARY.define(
    "to_weights_(Tensor(a!)[] w, Tensor(b!)[] narrow, Tensor g, Tensor(c!) norm, Tensor was_zero,"
    " Tensor? squares, int[] first, bool log) -> ()"
)
_LIBRARY.define(
    "unit_sums_(Tensor[] w, Tensor[] narrow, Tensor[] grad, int[] first, Tensor(a!) out) -> ()"
)


def _launch_sums(
    w: list[Tensor], narrow: list[Tensor], grad: list[Tensor], first: list[int], out: Tensor
) -> None:
    from weightnorm._kernels import triton_step_kernels as kernels

    weights, units = kernels.table(w, narrow, grad, [], first, [])
    kernels.sums_kernel[(len(units),)](
        weights, units, out,
        WIDE=kernels.TYPES[w[0].dtype], NARROW_TYPE=kernels.TYPES[grad[0].dtype],
        BE=kernels.tile(w),
    )  # fmt: skip


def _launch_to_directions(
    w: list[Tensor], narrow: list[Tensor], grad: list[Tensor], grad_v: list[Tensor],
    g: Tensor, norm: Tensor, grad_g: Tensor, was_zero: Tensor, sums: Tensor | None,
    first: list[int], fan_in: list[int], log: bool, project: bool,
) -> None:  # fmt: skip
    from weightnorm._kernels import triton_step_kernels as kernels

    weights, units = kernels.table(w, narrow, grad, grad_v, first, fan_in)
    info = torch.finfo(g.dtype)
    kernels.directions_kernel[(len(units),)](
        weights, units, g, norm, grad_g, was_zero, g if sums is None else sums,
        SHORTEST, EPS, 64 * info.eps, info.tiny,
        LOG=log, PROJECT=project, GIVEN=sums is not None,
        WIDE=kernels.TYPES[g.dtype], NARROW_TYPE=kernels.TYPES[grad[0].dtype],
        BE=kernels.tile(w),
    )  # fmt: skip


def _launch_to_weights(
    w: list[Tensor], narrow: list[Tensor], g: Tensor, norm: Tensor, was_zero: Tensor,
    squares: Tensor | None, first: list[int], log: bool,
) -> None:  # fmt: skip
    from weightnorm._kernels import triton_step_kernels as kernels

    weights, units = kernels.table(w, narrow, [], [], first, [])
    kernels.weights_kernel[(len(units),)](
        weights, units, g, norm, was_zero, g if squares is None else squares, SHORTEST, EPS,
        LOG=log, GIVEN=squares is not None,
        WIDE=kernels.TYPES[g.dtype],
        NARROW_TYPE=kernels.TYPES[(narrow or w)[0].dtype],
        BE=kernels.tile(w),
    )  # fmt: skip


IMPLEMENTATIONS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "unit_sums_": (_sums_by_operations, _launch_sums),
    "to_directions_": (_to_directions_by_operations, _launch_to_directions),
    "to_weights_": (_to_weights_by_operations, _launch_to_weights),
}
for _name, (_operations, _launch) in IMPLEMENTATIONS.items():
    _LIBRARY.impl(_name, _operations, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weightnorm::{_name}", lambda *args: None, lib=_LIBRARY)
    for _device in module_form.SERVED:
        _LIBRARY.impl(_name, module_form.or_operations(_launch, _operations), _device.upper())
