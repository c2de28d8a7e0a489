"""Many small one-dimensional convolutions, as in vocoders."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from weightnorm import folded
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, Summary, Work
from weightnorm.lab.bench.goals import AtMost
from weightnorm.lab.bench.peers import (
    HOOK,
    OURS,
    PARAMETRIZATION,
    PLAIN,
    peer_models,
    training_step,
)
from weightnorm.lab.interleaved import Call

LAYERS, CHANNELS, LENGTH, BATCH = 60, 32, 512, 4
DILATIONS = (1, 3, 5)
FOLDED = "weight norm, folded"


class Residuals(nn.Module):
    """A stack of x + conv(φ(x)) with alternating dilations."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(CHANNELS, CHANNELS, 3, padding="same", dilation=DILATIONS[i % 3])
            for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + conv(nn.functional.leaky_relu(x, 0.1))
        return x


def cases(settings: Settings) -> Iterator[Case]:
    layers = settings.size(LAYERS, 2)
    x = torch.randn(BATCH, CHANNELS, settings.size(LENGTH, 16), device=settings.device)
    models = peer_models(lambda: Residuals(layers), settings.device)
    operations = 2 * 3 * CHANNELS * x.numel() * layers

    def train(model: nn.Module) -> Call:
        return training_step(model, lambda: model(x).square().mean())

    yield Case(
        "training step",
        {name: train(model) for name, model in models.items()},
        base=PLAIN,
        goals=(AtMost(OURS, 1.0, PARAMETRIZATION),),
        work=Work(3 * operations, "convolution", OURS),
        summary=(Summary("60 conv1d layers", OURS, PARAMETRIZATION, HOOK),),
        at_least_base=(OURS, PARAMETRIZATION, HOOK),
    )

    def infer(model: nn.Module) -> Call:
        def run() -> None:
            with torch.no_grad():
                model(x)

        return run

    with folded(models[OURS]):
        names = {OURS: FOLDED}
        yield Case(
            "inference",
            {names.get(name, name): infer(model) for name, model in models.items()},
            base=PLAIN,
            goals=(AtMost(FOLDED, 1.0, PLAIN),),
            work=Work(operations, "convolution", FOLDED),
            summary=(Summary("60 conv1d layers, folded inference", FOLDED, PARAMETRIZATION, HOOK),),
            at_least_base=(FOLDED, PARAMETRIZATION, HOOK),
        )


BENCHMARK = Benchmark("vocoder", "60 small conv1d layers", cases)
