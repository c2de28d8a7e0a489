"""Overhead of the training monitor.

It measures the model every so many steps: its share of training is the time of a measurement over
that of the steps in between. The share is largest for networks whose step is cheap compared with
the number of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from weightnorm import weight_norm_model
from weightnorm.diagnostics import TrainingMonitor
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings
from weightnorm.lab.bench.goals import AtMost
from weightnorm.lab.interleaved import Call
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN

STEP, MEASURE = "training step", "monitor.measure()"
SHARE = 0.01
"""Largest share of the training time."""


def dense(width: int) -> nn.Sequential:
    hidden = [m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def convnet(settings: Settings) -> tuple[nn.Module, Tensor]:
    width, batch = settings.size(0.25, 0.03), settings.size(100, 4)
    return ConvPoolCNN(lambda layer: layer, width=width), torch.randn(batch, 3, 32, 32)


NETWORKS: dict[str, Callable[[Settings], tuple[nn.Module, Tensor]]] = {
    "ConvPool-CNN-C at ¼ width, batch 100": convnet,
    "dense, 1024 units, batch 64": lambda _: (dense(1024), torch.randn(64, 1024)),
    "dense, 64 units, batch 32": lambda _: (dense(64), torch.randn(32, 64)),
}


def calls(model: nn.Module, x: Tensor) -> tuple[dict[str, Call], int]:
    """A training step with a monitor attached, and a measurement of that monitor; and the number of
    steps between measurements."""
    weight_norm_model(model)
    optimizer = torch.optim.Adam(model.parameters())
    monitor = TrainingMonitor(model, optimizer, lambda tag, value, step: None)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return {STEP: step, MEASURE: monitor.measure}, monitor.every


def cases(settings: Settings) -> Iterator[Case]:
    for name, build in NETWORKS.items():
        peers, every = calls(*build(settings))
        goal = AtMost(MEASURE, SHARE * every, STEP)
        yield Case(f"{name}, measured every {every} steps", peers, base=STEP, goals=(goal,))


BENCHMARK = Benchmark("monitor", "Measurement of the training monitor beside a step", cases)
