"""Norms of the rows of W + s·B·A, as DoRA needs them: without building the matrix, and naive."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weightnorm.functional import norm, row_norm_low_rank
from weightnorm.lab.benchmarks.benchmark import Case, Row, Setting
from weightnorm.lab.benchmarks.goals import AtMost
from weightnorm.lab.benchmarks.interleaved import Call

OURS, NAIVE = "row_norm_low_rank", "norm of W + s·B·A"


def cases(setting: Setting) -> Iterator[Case]:
    size, rank, s = setting.size(4096, 32), setting.size(16, 2), 0.5
    W = torch.randn(size, size, device=setting.device)
    A = torch.randn(rank, size, device=setting.device, requires_grad=True)
    B = torch.randn(size, rank, device=setting.device, requires_grad=True)
    grad = torch.randn(size, 1, device=setting.device)

    def both(row_norm: Tensor) -> None:
        torch.autograd.grad(row_norm, (A, B), grad)

    peers: dict[str, Call] = {
        NAIVE: lambda: both(norm(W + s * (B @ A))),
        OURS: lambda: both(row_norm_low_rank(W, A, B, s)),
    }
    yield Case(f"{size}×{size}, rank {rank}", peers, NAIVE, (AtMost(OURS, 0.7, NAIVE),))


ROW = Row("low-rank-norm", "‖W + s·B·A‖ per row, forward and backward in A and B", cases)
