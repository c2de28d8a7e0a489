"""The machine's own limits, measured: how fast it copies, multiplies and convolves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from weightnorm.lab.benchmarks.benchmark import Setting
from weightnorm.lab.benchmarks.interleaved import Call, interleaved


@dataclass(frozen=True)
class Roofline:
    """Bytes or floating-point operations a second."""

    memory: float
    matrix: float
    convolution: float

    def share(self, amount: float, limit: str, seconds: float) -> float:
        """How much of the machine's limit was reached.

        >>> Roofline(100.0, 1.0, 1.0).share(50.0, "memory", 1.0)
        0.5
        """
        peak: float = getattr(self, limit)
        return amount / peak / seconds


class RooflineProbe:
    """A copy, a matrix product and a convolution, at sizes where each is at its best."""

    def __init__(self, setting: Setting) -> None:
        self.setting, device = setting, setting.device
        self.source = torch.ones(setting.size(1 << 25, 1 << 10), device=device)  # 128 MB
        self.target = torch.empty_like(self.source)
        n = setting.size(2048, 32)
        self.matrices = torch.randn(2, n, n, device=device)
        batch, c = setting.size(32, 1), setting.size(96, 4)
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
        """Bytes moved, read and written; operations, a multiplication and an addition being two."""
        n = self.matrices.shape[1]
        return {
            "memory": 2 * self.source.numel() * self.source.element_size(),
            "matrix": 2 * n**3,
            "convolution": 2 * 9 * self.images.shape[1] * self.images.numel(),
        }

    def measure(self) -> Roofline:
        """The best of the rounds: a limit is what nothing disturbed."""
        taken = interleaved(self.calls(), self.setting.rounds, self.setting.least)
        return Roofline(**{n: amount / min(taken[n]) for n, amount in self.amounts().items()})


def operations(call: Call) -> int:
    """Floating-point operations of a call, in its matrix products and convolutions."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())
