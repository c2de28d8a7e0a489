"""W = g·v/‖v‖ alone, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weightnorm._kernels import compose, formula
from weightnorm._torch_private import torch_weight_norm
from weightnorm._units import Units
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, Work
from weightnorm.lab.bench.goals import AtMost
from weightnorm.lab.interleaved import Call

SHAPES = ((64, 32, 3, 3), (192, 192, 3, 3), (512, 512, 7), (4096, 1024))
OURS, TORCH, FORMULA, COPY = "ours", "torch", "formula by autograd", "copy of the weight"
LARGE = 192 * 192 * 3 * 3
BOUND = 5 / 2
"""Least work in copies of the weight (a read and a write each): v and w; then ∇w, v and ∇v."""


def cases(settings: Settings) -> Iterator[Case]:
    for full in SHAPES:
        shape = torch.Size(min(size, settings.size(size, 4)) for size in full)
        for dim in sorted({0, 1, len(shape) - 1}):
            yield case(shape, dim, settings)


def case(shape: torch.Size, dim: int, settings: Settings) -> Case:
    fused = dim in (0, len(shape) - 1)  # else torch composes the formula from smaller operations
    v = torch.randn(shape, device=settings.device, requires_grad=True)
    g = torch.rand(Units(dim).shape(shape), device=settings.device, requires_grad=True)
    grad, target = torch.randn_like(v), torch.empty_like(v)

    def both(w: Tensor) -> None:
        torch.autograd.grad(w, (v, g), grad)

    def copy() -> None:
        with torch.no_grad():
            target.copy_(v)

    peers: dict[str, Call] = {
        TORCH: lambda: both(torch_weight_norm(v, g, dim)),
        OURS: lambda: both(compose(v, g, Units(dim))),
        FORMULA: lambda: both(formula(v, g, Units(dim))),
        COPY: copy,
    }
    name = f"{'×'.join(map(str, shape))}, dim {dim}, torch {'fused' if fused else 'composes'}"
    limit = 1.0 if fused else 0.5
    if dim == 0:  # torch's fastest kernel; call overhead matters for small weights
        limit = 1.15 if v.numel() < LARGE else 1.03
    return Case(name, peers, TORCH, (AtMost(OURS, limit, TORCH),), Work(BOUND, COPY, OURS))


BENCHMARK = Benchmark("op", "w = g·v/‖v‖, forward and backward", cases)
