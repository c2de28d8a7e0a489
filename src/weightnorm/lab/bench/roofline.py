"""Measures how fast the machine copies memory, multiplies matrices and convolves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from weightnorm.lab.bench.benchmark import Settings
from weightnorm.lab.interleaved import Call, interleaved


@dataclass(frozen=True)
class Roofline:
    """Limits of the machine, in bytes or floating-point operations per second."""

    memory: float
    matrix: float
    convolution: float

    def share(self, amount: float, limit: str, seconds: float) -> float:
        """The share of a limit that was reached.

        >>> Roofline(100.0, 1.0, 1.0).share(50.0, "memory", 1.0)
        0.5
        """
        peak: float = getattr(self, limit)
        return amount / peak / seconds


class RooflineProbe:
    """Times a copy, a matrix product and a convolution at sizes where each is fast."""

    def __init__(self, settings: Settings) -> None:
        self.settings, device = settings, settings.device
        self.source = torch.ones(settings.size(1 << 25, 1 << 10), device=device)  # 128 MB
        self.target = torch.empty_like(self.source)
        n = settings.size(2048, 32)
        self.matrices = torch.randn(2, n, n, device=device)
        batch, c = settings.size(32, 1), settings.size(96, 4)
        images = torch.randn(batch, c, 32, 32, device=device)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.kernel = torch.randn(c, c, 3, 3, device=device)

    def calls(self) -> dict[str, Call]:
        def convolve() -> None:
            with torch.no_grad():
                F.conv2d(self.images, self.kernel, padding=1)

        def multiply() -> None:
            torch.mm(self.matrices[0], self.matrices[1])

        def copy() -> None:
            self.target.copy_(self.source)

        return {"memory": copy, "matrix": multiply, "convolution": convolve}

    def amounts(self) -> dict[str, float]:
        """Bytes read and written; floating-point operations."""
        n = self.matrices.shape[1]
        return {
            "memory": 2 * self.source.numel() * self.source.element_size(),
            "matrix": 2 * n**3,
            "convolution": 2 * 9 * self.images.shape[1] * self.images.numel(),
        }

    def measure(self) -> Roofline:
        """The fastest of the rounds, which was disturbed least."""
        taken = interleaved(self.calls(), self.settings.rounds, shortest=self.settings.shortest)
        return Roofline(**{n: amount / min(taken[n]) for n, amount in self.amounts().items()})


def operations(call: Call) -> int:
    """Count the floating-point operations in a call's matrix products and convolutions."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())
