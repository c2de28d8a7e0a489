"""Mean-only batch norm after a convolution, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor, nn

from weightnorm import mean_only_batch_norm
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, Summary, Work
from weightnorm.lab.bench.goals import AtMost, ExtraAtMost, Goal
from weightnorm.lab.bench.peers import build
from weightnorm.lab.interleaved import Call

ALONE, BATCH_NORM, BY_HAND = "convolution alone", "batch norm", "t − t.mean() + b"
OURS = "mean-only"
LAYOUTS = {"NCHW": torch.contiguous_format, "channels-last": torch.channels_last}


class CenteredByHand(nn.Module):
    """Eq. 7 in plain operations."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features, 1, 1))
        self.register_buffer("running_mean", torch.zeros(features, 1, 1))

    def forward(self, t: Tensor) -> Tensor:
        mean = t.mean((0, 2, 3), keepdim=True)
        self.running_mean.lerp_(mean.detach()[0], 0.1)  # type: ignore[operator]
        return t - mean + self.bias


def layers(channels: int, kernel: int) -> dict[str, nn.Module]:
    """The convolution alone and with each normalization."""

    def conv(bias: bool = False) -> nn.Module:
        return nn.Conv2d(channels, channels, kernel, padding="same", bias=bias)

    return {
        ALONE: conv(bias=True),
        OURS: mean_only_batch_norm(conv(bias=True)),
        BY_HAND: nn.Sequential(conv(), CenteredByHand(channels)),
        BATCH_NORM: nn.Sequential(conv(), nn.BatchNorm2d(channels)),
    }


SIZES = ((96, 32, 3), (96, 32, 1), (96, 100, 3), (24, 100, 3))
"""Channels, images, kernel. Relative to a cheap convolution the extra cost is measured better."""


def cases(settings: Settings) -> Iterator[Case]:
    for (layout, memory_format), size in product(LAYOUTS.items(), SIZES):
        channels, batch = (settings.size(full, min(full, 4)) for full in size[:2])
        kernel = size[2]
        x = torch.randn(batch, channels, 32, 32, device=settings.device)
        x = x.contiguous(memory_format=memory_format).requires_grad_()
        grad = torch.randn_like(x)

        def passes(layer: nn.Module, x: Tensor = x, grad: Tensor = grad) -> Call:
            leaves = [x, *layer.parameters()]

            def run() -> None:
                torch.autograd.grad(layer(x), leaves, grad)

            return run

        def convert(
            layer: nn.Module, memory_format: torch.memory_format = memory_format
        ) -> nn.Module:
            return build(lambda: layer, lambda _: None, settings.device).to(  # type: ignore
                memory_format=memory_format
            )

        yield Case(
            f"{size[0]} channels, {size[1]} images, {kernel}×{kernel}, {layout}",
            {name: passes(convert(layer)) for name, layer in layers(channels, kernel).items()},
            base=ALONE,
            goals=goals(layout, size),
            work=Work(3 * 2 * kernel**2 * channels * x.numel(), "convolution", OURS),
            summary=summary(layout, size),
            at_least_base=(OURS, BY_HAND, BATCH_NORM),
        )


def goals(layout: str, size: tuple[int, int, int]) -> tuple[Goal, ...]:
    """Extra cost at most 0.4 of batch norm's in NCHW and 0.6 in channels-last, where it applies;
    never above batch norm by more than 2 %."""
    channels, images, _ = size
    bound: tuple[Goal, ...] = (AtMost(OURS, 1.02, BATCH_NORM),)
    if layout == "NCHW":
        return (ExtraAtMost(OURS, 0.4, BATCH_NORM, ALONE), *bound)
    if channels == 24 or images == 100:
        return (ExtraAtMost(OURS, 0.6, BATCH_NORM, ALONE), *bound)
    return bound


def summary(layout: str, size: tuple[int, int, int]) -> tuple[Summary, ...]:
    """Only the paper's first layers are in the summary: 96 channels, 100 images."""
    name = f"mean-only BN, {layout}"
    return (Summary(name, OURS, batch_norm=BATCH_NORM),) if size == (96, 100, 3) else ()


BENCHMARK = Benchmark("mean-only", "Mean-only batch norm after a convolution", cases)
