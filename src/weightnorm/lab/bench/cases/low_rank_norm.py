"""Norms of the rows of W + s·B·A, as DoRA needs them: without building the matrix, and naive."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weightnorm.functional import norm, row_norm_low_rank
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings
from weightnorm.lab.bench.goals import AtMost
from weightnorm.lab.interleaved import Call

OURS, NAIVE = "row_norm_low_rank", "norm of W + s·B·A"


def cases(settings: Settings) -> Iterator[Case]:
    size, rank, s = settings.size(4096, 32), settings.size(16, 2), 0.5
    W = torch.randn(size, size, device=settings.device)
    A = torch.randn(rank, size, device=settings.device, requires_grad=True)
    B = torch.randn(size, rank, device=settings.device, requires_grad=True)
    grad = torch.randn(size, 1, device=settings.device)

    def both(row_norm: Tensor) -> None:
        torch.autograd.grad(row_norm, (A, B), grad)

    peers: dict[str, Call] = {
        NAIVE: lambda: both(norm(W + s * (B @ A))),
        OURS: lambda: both(row_norm_low_rank(W, A, B, s)),
    }
    yield Case(f"{size}×{size}, rank {rank}", peers, NAIVE, (AtMost(OURS, 0.7, NAIVE),))


BENCHMARK = Benchmark("low-rank-norm", "‖W + s·B·A‖ per row, forward and backward", cases)
