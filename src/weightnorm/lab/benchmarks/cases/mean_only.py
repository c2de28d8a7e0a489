"""Row 6: mean-only batch norm behind a convolution, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor, nn

from weightnorm import mean_only_batch_norm
from weightnorm.lab.benchmarks.benchmark import Case, Row, Setting, Work
from weightnorm.lab.benchmarks.goals import ExtraAtMost
from weightnorm.lab.benchmarks.interleaved import Call
from weightnorm.lab.benchmarks.peers import flavour

ALONE, BATCH_NORM, BY_HAND = "convolution alone", "batch norm", "t − t.mean() + b"
OURS = "mean-only"
LAYOUTS = {"NCHW": torch.contiguous_format, "channels-last": torch.channels_last}


class CenteredByHand(nn.Module):
    """Eq. 7 as one would first write it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features, 1, 1))
        self.register_buffer("running_mean", torch.zeros(features, 1, 1))

    def forward(self, t: Tensor) -> Tensor:
        mean = t.mean((0, 2, 3), keepdim=True)
        self.running_mean.lerp_(mean.detach()[0], 0.1)  # type: ignore[operator]
        return t - mean + self.bias


def layers(channels: int, kernel: int) -> dict[str, nn.Module]:
    def conv(bias: bool = False) -> nn.Module:
        return nn.Conv2d(channels, channels, kernel, padding="same", bias=bias)

    return {
        ALONE: conv(bias=True),
        OURS: mean_only_batch_norm(conv(bias=True)),
        BY_HAND: nn.Sequential(conv(), CenteredByHand(channels)),
        BATCH_NORM: nn.Sequential(conv(), nn.BatchNorm2d(channels)),
    }


def cases(setting: Setting) -> Iterator[Case]:
    channels, batch = setting.size(96, 4), setting.size(32, 2)
    # Beside a convolution of one pixel, which takes a ninth of the time, the extra cost is clearer.
    for (layout, memory_format), kernel in product(LAYOUTS.items(), (3, 1)):
        x = torch.randn(batch, channels, 32, 32, device=setting.device)
        x = x.contiguous(memory_format=memory_format).requires_grad_()
        grad = torch.randn_like(x)

        def passes(layer: nn.Module, x: Tensor = x, grad: Tensor = grad) -> Call:
            wanted = [x, *layer.parameters()]

            def run() -> None:
                torch.autograd.grad(layer(x), wanted, grad)

            return run

        def placed(
            layer: nn.Module, memory_format: torch.memory_format = memory_format
        ) -> nn.Module:
            return flavour(lambda: layer, lambda _: None, setting.device).to(  # type: ignore
                memory_format=memory_format
            )

        yield Case(
            f"{kernel}×{kernel}, {layout}",
            {name: passes(placed(layer)) for name, layer in layers(channels, kernel).items()},
            base=ALONE,
            goals=(ExtraAtMost(OURS, 0.5, BATCH_NORM, ALONE),),
            work=Work(3 * 2 * kernel**2 * channels * x.numel(), "convolution", OURS),
        )


ROW = Row("mean-only", "Mean-only batch norm at a convolution, 96 channels, 32 images", cases)
