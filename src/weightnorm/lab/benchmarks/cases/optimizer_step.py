"""A training step with weight norm in the optimizer and in the modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import WeightNormOptimizer
from weightnorm.lab.benchmarks.benchmark import Benchmark, Case, Settings, Summary, Work
from weightnorm.lab.benchmarks.cases.vocoder import CHANNELS, Residuals
from weightnorm.lab.benchmarks.goals import AtMost
from weightnorm.lab.benchmarks.peers import NORMALIZATIONS, OURS, PLAIN, build
from weightnorm.lab.benchmarks.roofline import operations
from weightnorm.lab.interleaved import Call
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN

MODULE, OPTIMIZER = "module form", "optimizer form"


def steps(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor], device: torch.device
) -> dict[str, Call]:
    """Training steps with Adam, in each form."""

    def step(name: str) -> Call:
        model = build(make, NORMALIZATIONS[OURS if name == MODULE else PLAIN], device)
        optimizer: torch.optim.Optimizer
        if name == OPTIMIZER:
            optimizer = WeightNormOptimizer(model, torch.optim.Adam, lr=1e-3)
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def run() -> None:
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()

        return run

    return {name: step(name) for name in (PLAIN, MODULE, OPTIMIZER)}


def cases(settings: Settings) -> Iterator[Case]:
    x = torch.randn(settings.size(100, 4), 3, 32, 32, device=settings.device)
    y = torch.arange(len(x), device=settings.device) % 10
    width, layers = settings.size(0.25, 0.03), settings.size(60, 2)
    signal = torch.randn(4, CHANNELS, settings.size(512, 16), device=settings.device)
    workloads: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
        "ConvPool-CNN-C at ¼ width": (
            lambda: ConvPoolCNN(lambda layer: layer, width=width),
            lambda model: F.cross_entropy(model(x), y),
        ),
        "60 small conv1d layers": (
            lambda: Residuals(layers),
            lambda model: model(signal).square().mean(),
        ),
    }
    for name, (make, loss) in workloads.items():
        peers = steps(make, loss, settings.device)
        yield Case(
            name,
            peers,
            base=PLAIN,
            goals=(AtMost(OPTIMIZER, 1.0, MODULE),),
            work=Work(operations(peers[PLAIN]), "convolution", OPTIMIZER),
            summary=(Summary(f"optimizer form, {name}", OPTIMIZER),),
            at_least_base=(MODULE, OPTIMIZER),
        )


BENCHMARK = Benchmark(
    "optimizer", "Training step, weight norm in the modules or the optimizer", cases
)
