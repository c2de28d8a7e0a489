"""Weight normalization as pure functions: w = g·v/‖v‖, its inverse, gradients and projection.

`dim` is the axis that is kept: one g for each index along it, the norm over all other axes.
``dim=None`` means one g for the whole tensor. `groups` splits axis 0 first, as in a grouped
transposed convolution: one g for each (group, index along `dim`).

v and g are passed by keyword: torch's parametrization stores them in the order (g, v).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from weightnorm import kernels
from weightnorm.dtensor import gathered, is_sharded, on_mesh_of, placed_like, resolve_partial
from weightnorm.kernels import EPS

__all__ = [
    "EPS",
    "Parts",
    "compose",
    "decompose",
    "gradients",
    "norm",
    "project",
    "row_norm_low_rank",
]


class Parts(NamedTuple):
    """Direction v and signed length g of a normalized weight."""

    v: Tensor
    """The direction, of the shape of w."""
    g: Tensor
    """The length, of size 1 along every axis but the kept one."""


def norm(v: Tensor, dim: int | None = 0, *, groups: int = 1) -> Tensor:
    """Return ‖v‖ over every axis but `dim`, in float32 or wider.

    >>> norm(torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
    tensor([[ 5.],
            [10.]])
    """
    dim = _checked_dim(v, dim, groups)
    units = resolve_partial(kernels.block_norm(kernels.as_blocks(v, dim, groups)))
    return units.reshape(kernels.unit_shape(v.shape, dim, groups))


def compose(
    *,
    v: Tensor,
    g: Tensor,
    dim: int | None = 0,
    groups: int = 1,
    mask: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """Return w = g·v/‖v‖ (eq. 2): the direction of v with length ``|g|``.

    With a `mask` m, v is masked before it is normalized: w = g·(m⊙v)/‖m⊙v‖. A row with
    ‖v‖ ≤ `eps`, such as a fully masked one, gives w = 0 and receives no gradient.

    Shapes: w has the shape of v; g has size 1 along every axis but `dim`.

    >>> compose(v=torch.tensor([[3.0, 4.0]]), g=torch.tensor([[10.0]]))
    tensor([[6., 8.]])
    """
    dim = _checked_dim(v, dim, groups)
    _check_g(v, g, dim, groups)
    return kernels.compose(_masked(v, mask), g, dim, groups, eps)


def decompose(
    w: Tensor,
    dim: int | None = 0,
    *,
    groups: int = 1,
    mask: Tensor | None = None,
    eps: float = EPS,
) -> Parts:
    """Return Parts(v, g) with compose(v=v, g=g) = w, namely v = w and g = ‖w‖.

    A zero row has no direction, so it gets the diagonal one and g = 0: w stays 0, but the row
    receives a gradient through g. v never shares memory with w.

    >>> decompose(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    Parts(v=tensor([[3.0000, 4.0000],
            [0.7071, 0.7071]]), g=tensor([[5.],
            [0.]]))
    """
    dim = _checked_dim(w, dim, groups)
    masked = _masked(w, mask)
    g = norm(masked, dim, groups=groups)
    if masked.device.type == "meta" or not masked.numel():
        return Parts(v=w.clone(), g=g.to(w.dtype))
    diagonal = _masked(torch.ones_like(w), mask)
    diagonal = kernels.formula(diagonal, torch.ones_like(g), dim, groups)
    v = torch.where(per_weight(g <= eps, w, dim, groups), diagonal, masked)
    if v.stride() != w.stride() and not (v.requires_grad or is_sharded(w)):
        v = torch.empty_like(w).copy_(v)  # channels-last, for example
    return Parts(v=v, g=g.to(w.dtype))


def gradients(
    grad_w: Tensor,
    *,
    v: Tensor,
    g: Tensor,
    dim: int | None = 0,
    groups: int = 1,
    eps: float = EPS,
) -> Parts:
    """Return Parts(∇v, ∇g) of eq. 3: ∇g = ∇w·v/‖v‖ and ∇v = (g/‖v‖)∇w − (g∇g/‖v‖²)v.

    >>> v, g = torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0]])
    >>> gradients(torch.tensor([[1.0, 0.0]]), v=v, g=g)
    Parts(v=tensor([[ 0.6400, -0.4800]]), g=tensor([[0.6000]]))
    """
    dim = _checked_dim(v, dim, groups)
    _check_g(v, g, dim, groups)
    if grad_w.shape != v.shape:
        raise ValueError(
            f"grad_w has shape {tuple(grad_w.shape)}, v has {tuple(v.shape)}; expected equal shapes"
        )
    grad_v, grad_g = kernels.gradients(grad_w, v, g, dim, groups, eps)
    return Parts(v=placed_like(grad_v, v), g=placed_like(grad_g, g))


def project(x: Tensor, w: Tensor, dim: int | None = 0, *, groups: int = 1) -> Tensor:
    """Return M_w x with M_w = I − ww′/‖w‖² (eq. 4): x minus its component along w, per unit.

    >>> project(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 0.0]]))
    tensor([[0., 1.]])
    """
    dim = _checked_dim(w, dim, groups)
    unit = torch.ones_like(norm(w, dim, groups=groups))
    direction = kernels.formula(w, unit, dim, groups)
    along = kernels.as_blocks(direction * x, dim, groups).sum((1, 3), keepdim=True)
    return x - (kernels.as_blocks(direction, dim, groups) * along).reshape(w.shape)


def row_norm_low_rank(W: Tensor, A: Tensor, B: Tensor, s: float | Tensor = 1.0) -> Tensor:
    """Return ‖W + s·B·A‖ of each row without building the matrix, as DoRA needs it.

    ‖W + sBA‖² = ‖W‖² + 2s·rowsum((WAᵀ)⊙B) + s²·rowsum((BAAᵀ)⊙B). With a frozen W in float32 the
    largest temporary has the size of B, where W + sBA has the size of W. (W in half precision is
    copied to float32.)

    Differentiable in all arguments; a zero row receives no gradient. Computed in float32 or wider.
    Where W and s·B·A cancel, the absolute error is about √ε·‖W‖, with ε the machine epsilon.

    Shapes: W is (out, in), A is (rank, in), B is (out, rank); the result is (out, 1), like g.

    >>> W, A, B = torch.eye(2), torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0], [0.0]])
    >>> row_norm_low_rank(W, A, B)
    tensor([[4.1231],
            [1.0000]])
    """
    if (
        not (W.ndim == A.ndim == B.ndim == 2)
        or W.shape != (len(B), A.shape[1])
        or (len(A) != B.shape[1])
    ):
        raise ValueError(
            f"got W {tuple(W.shape)}, A {tuple(A.shape)}, B {tuple(B.shape)}; "
            "expected (out, in), (rank, in), (out, rank)"
        )
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in (W, A, B)), torch.float32)
    W, A, B = (x.to(dtype) for x in (W, A, B))
    with kernels.no_autocast(W):
        cross = ((W @ A.T) * B).sum(1, keepdim=True)
        square = ((B @ (A @ A.T)) * B).sum(1, keepdim=True)
    if W.requires_grad or not kernels.is_eager(W):
        own = W.square().sum(1, keepdim=True)
    else:  # no temporary; but its second derivative is wrong where a row of W is 0
        own = torch.linalg.vector_norm(W, dim=1, keepdim=True).square()
    squares = own + 2 * s * cross + s**2 * square
    zero = squares <= 0  # cancelled, up to rounding
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt())


def unit_rows(w: Tensor, dim: int | None = 0, groups: int = 1) -> Tensor:
    """Return the weight as a matrix with one row per unit, in the order of g.

    >>> unit_rows(torch.zeros(4, 3, 5), 1, groups=2).shape
    torch.Size([6, 10])
    """
    dim = _checked_dim(w, dim, groups)
    if dim == 0:
        return w.reshape(w.shape[0], math.prod(w.shape[1:]))
    blocks = kernels.as_blocks(gathered(w), dim, groups)
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)


def resolve_dim(dim: int | None, ndim: int) -> int | None:
    """Return `dim` as a non-negative axis (None stays None), or raise IndexError."""
    if dim is None:
        return None
    if not -ndim <= dim < ndim:
        span = f"−{ndim} … {ndim - 1}" if ndim else "None"
        raise IndexError(
            f"dim={dim} is out of range for a weight of {ndim} dimension{'s' * (ndim != 1)}; "
            f"expected {span}, or None for one g for the whole tensor"
        )
    return dim % ndim


def _checked_dim(v: Tensor, dim: int | None, groups: int) -> int | None:
    dim = resolve_dim(dim, v.ndim)
    if groups != 1 and (dim in (None, 0) or groups < 1 or v.shape[0] % groups):
        raise ValueError(
            f"groups={groups} must divide axis 0 of a weight of shape {tuple(v.shape)}, "
            f"and the kept axis must be another one; got dim={dim}"
        )
    return dim


def _check_g(v: Tensor, g: Tensor, dim: int | None, groups: int) -> None:
    if g.shape != kernels.unit_shape(v.shape, dim, groups):
        raise ValueError(kernels.wrong_shape(v, g, dim, groups))


def _masked(v: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return v
    check_mask(mask, v.shape)
    return v * on_mesh_of(mask, v)


def check_mask(mask: Tensor, shape: torch.Size) -> None:
    """Raise ValueError unless the mask broadcasts to `shape`."""
    try:
        fits = torch.broadcast_shapes(mask.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, which does not broadcast to the weight's "
            f"{tuple(shape)}; give one value per weight, or 1 along the axes it does not vary on"
        )


def per_weight(units: Tensor, w: Tensor, dim: int | None, groups: int) -> Tensor:
    """Expand one value per unit to the shape of `w`."""
    g, before, n, after = kernels.block_shape(w.shape, dim, groups)
    return units.reshape(g, 1, n, 1).expand(g, before, n, after).reshape(w.shape)
