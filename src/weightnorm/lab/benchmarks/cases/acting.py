"""Row 4: an agent's forward pass, one observation at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from weightnorm import folded
from weightnorm.lab.benchmarks.benchmark import Case, Row, Setting, Work
from weightnorm.lab.benchmarks.goals import AtMost
from weightnorm.lab.benchmarks.interleaved import Call
from weightnorm.lab.benchmarks.peers import OURS, PLAIN, flavours

FOLDED = "weight norm, folded"


def nature_network() -> nn.Sequential:
    """The network of Mnih et al. (2015)."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, stride=4),  # (B, 32, 20, 20)
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),  # (B, 64, 9, 9)
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),  # (B, 64, 7, 7)
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 49, 512),
        nn.ReLU(),
        nn.Linear(512, 18),
    )


WEIGHTS = 4 * (4 * 32 * 64 + 32 * 64 * 16 + 64 * 64 * 9 + 64 * 49 * 512 + 512 * 18)
"""Bytes, all of which are read."""


def cases(setting: Setting) -> Iterator[Case]:
    x = torch.rand(1, 4, 84, 84, device=setting.device)
    models = flavours(nature_network, setting.device)

    def act(model: nn.Module) -> Call:
        def run() -> None:
            with torch.no_grad():
                model(x).argmax()

        return run

    with folded(models[OURS]):
        names = {OURS: FOLDED}
        yield Case(
            "batch of 1",
            {names.get(name, name): act(model) for name, model in models.items()},
            base=PLAIN,
            goals=(AtMost(FOLDED, 1.0, PLAIN),),
            work=Work(WEIGHTS, "memory", FOLDED),
        )


ROW = Row("acting", "An agent acts, Nature network", cases)
