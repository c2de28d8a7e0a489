"""Weight normalization as pure functions: w = g·v/‖v‖, its inverse, gradients and projection.

`units` says which parts of a weight have a length of their own: ``Units(0)``, the default, one for
each index along the first axis.

v and g are passed by keyword: torch's parametrization stores them in the order (g, v).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from weightnorm import _kernels
from weightnorm._dtensor import is_sharded, on_mesh_of, placed_like
from weightnorm._kernels.cpu import correct_torch_second_derivative
from weightnorm._units import EPS, Parts, Units, in_float64

__all__ = [
    "EPS",
    "Parts",
    "Units",
    "compose",
    "correct_torch_second_derivative",
    "decompose",
    "fold",
    "gradients",
    "norm",
    "project",
    "row_norm_low_rank",
    "use_triton",
]

ROWS = Units()


def use_triton(enabled: bool = True) -> None:
    """Choose whether Triton kernels compute weights on accelerators, as they do by default.

    Without them torch's operations do. The environment variable ``WEIGHTNORM_TRITON=0`` has the
    same effect. If a kernel cannot be compiled, a warning is issued once and torch's operations
    take over.
    """
    from weightnorm._kernels import triton

    triton.is_enabled = enabled


def norm(v: Tensor, units: Units = ROWS) -> Tensor:
    """Return ‖v‖ of every unit in the shape of g, in float32 or wider.

    >>> norm(torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
    tensor([[ 5.],
            [10.]])
    """
    return _kernels.norm(v, units.of(v.shape))


def compose(
    *,
    v: Tensor,
    g: Tensor,
    units: Units = ROWS,
    mask: Tensor | None = None,
) -> Tensor:
    """Return w = g·v/‖v‖ (eq. 2): the direction of v with length ``|g|``.

    With a `mask` m, v is masked before it is normalized: w = g·(m⊙v)/‖m⊙v‖. A unit with
    ‖v‖ ≤ `EPS`, such as a fully masked one, gives w = 0 and receives no gradient.

    Shapes: w has the shape of v; g has size 1 along every axis that is not kept.

    >>> compose(v=torch.tensor([[3.0, 4.0]]), g=torch.tensor([[10.0]]))
    tensor([[6., 8.]])
    """
    return _kernels.compose(masked(v, mask), g, units.of(v.shape))


@torch.no_grad()
def fold(
    *,
    v: Tensor,
    g: Tensor,
    units: Units = ROWS,
    mask: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """Return w = g·v/‖v‖ for good: computed in float64 and rounded once, without a gradient.

    Units with g = ‖v‖ give v exactly, so that folding undoes `decompose`. For all others the result
    is the same on every device, to the bit. (`decompose` stores ‖v‖ as its device sums it up: on
    another device that g may count as any other number.)

    >>> fold(v=torch.tensor([[3.0, 4.0]]), g=torch.tensor([[10.0]]))
    tensor([[6., 8.]])
    """
    units, v = units.of(v.shape), masked(v, mask)
    units.check(v, g)
    norm = units.exact_norm(v)
    zero = norm <= eps
    divisor = torch.where(zero, torch.inf, torch.where(norm.isinf(), torch.nan, norm))
    w = in_float64(v) * units.spread(in_float64(g) / divisor, v)
    here = _kernels.norm(v, units)
    unchanged = (g == norm.to(g)) | (g == here.to(g)) | (g.isnan() & here.isnan())
    if eps > 0:
        unchanged &= zero.to(g.device).logical_not()
    return torch.where(units.spread(unchanged, v), v, placed_like(w, v).to(v))


@torch.no_grad()
def _diagonal(w: Tensor, mask: Tensor | None, units: Units) -> Tensor:
    """Return the weight whose units all have the same number in every place, and norm 1."""
    ones = masked(torch.ones_like(w), mask)
    return ones * units.spread(1 / units.divisor(ones), ones).to(w.dtype)


def decompose(w: Tensor, units: Units = ROWS, *, mask: Tensor | None = None) -> Parts:
    """Return Parts(v, g) with compose(v=v, g=g) = w, namely v = w and g = ‖w‖.

    A zero unit has no direction, so it gets the diagonal one and g = 0: w stays 0, but the unit
    receives a gradient through g. v never shares memory with w.

    >>> decompose(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    Parts(v=tensor([[3.0000, 4.0000],
            [0.7071, 0.7071]]), g=tensor([[5.],
            [0.]]))
    """
    units = units.of(w.shape)
    v = masked(w, mask)
    g = _kernels.norm(v, units)
    if not (v.is_meta or v.numel() == 0):
        v = torch.where(units.spread(g <= EPS, w), _diagonal(w, mask, units), v)
    else:
        v = v.clone()
    if v.stride() != w.stride() and not (v.requires_grad or is_sharded(w)):
        v = torch.empty_like(w).copy_(v)  # channels-last, for example
    return Parts(v=v, g=g.to(w.dtype))


def gradients(grad_w: Tensor, *, v: Tensor, g: Tensor, units: Units = ROWS) -> Parts:
    """Return Parts(∇v, ∇g) of eq. 3: ∇g = ∇w·v/‖v‖ and ∇v = (g/‖v‖)∇w − (g∇g/‖v‖²)v.

    >>> v, g = torch.tensor([[3.0, 4.0]]), torch.tensor([[5.0]])
    >>> gradients(torch.tensor([[1.0, 0.0]]), v=v, g=g)
    Parts(v=tensor([[ 0.6400, -0.4800]]), g=tensor([[0.6000]]))
    """
    if grad_w.shape != v.shape:
        raise ValueError(
            f"grad_w has shape {tuple(grad_w.shape)}, v has {tuple(v.shape)}; expected equal shapes"
        )
    grad_v, grad_g = _kernels.gradients(grad_w, v, g, units.of(v.shape))
    return Parts(v=placed_like(grad_v, v), g=placed_like(grad_g, g))


def project(x: Tensor, w: Tensor, units: Units = ROWS) -> Tensor:
    """Return M_w x with M_w = I − ww′/‖w‖² (eq. 4): x minus its component along w, per unit.

    >>> project(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 0.0]]))
    tensor([[0., 1.]])
    """
    units = units.of(w.shape)
    direction = w / units.spread(units.divisor(w), w)
    return x - direction * units.spread(units.sum(direction * x), w)


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
    with _kernels.no_autocast(W):
        cross = ((W @ A.T) * B).sum(1, keepdim=True)
        square = ((B @ (A @ A.T)) * B).sum(1, keepdim=True)
    if W.requires_grad or not _kernels.is_eager(W):
        own = W.square().sum(1, keepdim=True)
    else:  # no temporary; but its second derivative is wrong where a row of W is 0
        own = torch.linalg.vector_norm(W, dim=1, keepdim=True).square()
    squares = own + 2 * s * cross + s**2 * square
    zero = squares <= 0  # cancelled, up to rounding
    return torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt())


def masked(v: Tensor, mask: Tensor | None) -> Tensor:
    """Return m⊙v, or v without a mask, which must broadcast to it."""
    return v if mask is None else v * on_mesh_of(mask.broadcast_to(v.shape), v)
