"""Row 5: w = g·v/‖v‖ alone, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weightnorm.kernels import compose, formula, unit_shape
from weightnorm.lab.benchmarks.benchmark import Case, Row, Setting, Work
from weightnorm.lab.benchmarks.goals import AtMost
from weightnorm.lab.benchmarks.interleaved import Call

SHAPES = ((64, 32, 3, 3), (192, 192, 3, 3), (512, 512, 7), (4096, 1024))
OURS, TORCH, FORMULA, COPY = "ours", "torch", "formula by autograd", "a copy of the weight"
BOUND = 5 / 2
"""In copies, each of which reads a weight and writes one: here v and w, then ∇w, v and ∇v."""


def cases(setting: Setting) -> Iterator[Case]:
    for full in SHAPES:
        shape = torch.Size(min(size, setting.size(size, 4)) for size in full)
        for dim in sorted({0, 1, len(shape) - 1}):
            yield case(shape, dim, setting)


def case(shape: torch.Size, dim: int, setting: Setting) -> Case:
    fused = dim in (0, len(shape) - 1)  # else torch composes it of smaller operations
    v = torch.randn(shape, device=setting.device, requires_grad=True)
    g = torch.rand(unit_shape(shape, dim), device=setting.device, requires_grad=True)
    grad, target = torch.randn_like(v), torch.empty_like(v)

    def both(w: Tensor) -> None:
        torch.autograd.grad(w, (v, g), grad)

    def copy() -> None:
        with torch.no_grad():
            target.copy_(v)

    peers: dict[str, Call] = {
        TORCH: lambda: both(torch._weight_norm(v, g, dim)),
        OURS: lambda: both(compose(v, g, dim)),
        FORMULA: lambda: both(formula(v, g, dim)),
        COPY: copy,
    }
    words = f"{'×'.join(map(str, shape))}, dim {dim}, torch {'fused' if fused else 'composes'}"
    goal = AtMost(OURS, 1.0 if fused else 0.5, TORCH)
    return Case(words, peers, TORCH, (goal,), Work(BOUND, COPY, OURS))


ROW = Row("op", "w = g·v/‖v‖, forward and backward", cases)
