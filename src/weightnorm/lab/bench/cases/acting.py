"""Forward pass of a Q-network on one observation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from weightnorm import folded
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, Summary, Work
from weightnorm.lab.bench.goals import AtMost
from weightnorm.lab.bench.peers import HOOK, OURS, PARAMETRIZATION, PLAIN, peer_models
from weightnorm.lab.interleaved import Call

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
"""Bytes of the weights, all of which are read."""


def cases(settings: Settings) -> Iterator[Case]:
    x = torch.rand(1, 4, 84, 84, device=settings.device)
    models = peer_models(nature_network, settings.device)

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
            summary=(Summary("agent acting, folded", FOLDED, PARAMETRIZATION, HOOK),),
            at_least_base=(FOLDED, PARAMETRIZATION, HOOK),
        )


BENCHMARK = Benchmark("acting", "Forward pass of the DQN network on one observation", cases)
