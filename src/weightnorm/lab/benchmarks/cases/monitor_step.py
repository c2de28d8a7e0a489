"""What the training monitor costs.

It looks at the model once in so many steps, so its share of training is the time of a look over
that of the steps from one look to the next. Networks whose step is cheap beside their weights are
the hard ones. The step and the look take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from weightnorm import weight_norm_model
from weightnorm.diagnostics import TrainingMonitor
from weightnorm.lab.benchmarks.benchmark import Case, Row, Setting
from weightnorm.lab.benchmarks.goals import AtMost
from weightnorm.lab.benchmarks.interleaved import Call
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN

STEP, LOOK = "step", "look"
SHARE = 0.01
"""Of training, at most."""


def dense(width: int) -> nn.Sequential:
    hidden = [m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def convnet(setting: Setting) -> tuple[nn.Module, Tensor]:
    width, batch = setting.size(0.25, 0.03), setting.size(100, 4)
    return ConvPoolCNN(lambda layer: layer, width=width), torch.randn(batch, 3, 32, 32)


NETWORKS: dict[str, Callable[[Setting], tuple[nn.Module, Tensor]]] = {
    "ConvPool-CNN-C, a quarter of the width, batch 100": convnet,
    "dense, 1024 units, batch 64": lambda _: (dense(1024), torch.randn(64, 1024)),
    "dense, 64 units, batch 32": lambda _: (dense(64), torch.randn(32, 64)),
}


def calls(model: nn.Module, x: Tensor) -> tuple[dict[str, Call], int]:
    """A training step with a monitor attached, and a look of that monitor; and how many steps pass
    from one look to the next."""
    weight_norm_model(model)
    optimizer = torch.optim.Adam(model.parameters())
    monitor = TrainingMonitor(model, optimizer, lambda tag, value, step: None)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return {STEP: step, LOOK: monitor.measure}, monitor.every


def cases(setting: Setting) -> Iterator[Case]:
    for name, build in NETWORKS.items():
        peers, every = calls(*build(setting))
        goal = AtMost(LOOK, SHARE * every, STEP)
        yield Case(f"{name}, a look every {every} steps", peers, base=STEP, goals=(goal,))


ROW = Row("monitor", "A look of the training monitor beside a step", cases)
