"""Kernel launches of weight norm on an accelerator, forward and backward; see `count_launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from weightnorm import WeightNormOptimizer
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings
from weightnorm.lab.bench.goals import CopiesAtMost
from weightnorm.lab.bench.launches import count_launches
from weightnorm.lab.bench.peers import OURS, PLAIN, peer_models
from weightnorm.lab.interleaved import Call

CPU = torch.device("cpu")
OUTPUT_UNITS = "torch, parametrization, dim=1"


def passes(run: Callable[[], Tensor], model: nn.Module) -> Call:
    """Launches of a forward and backward pass whose gradients replace none."""

    def step() -> None:
        run().sum().backward()

    def count() -> float:
        model.zero_grad()
        return float(count_launches(step).total())

    return count


def output(model: nn.Module, x: Tensor) -> Tensor:
    """The first output, where a layer has several."""
    y = model(x)
    first: Tensor = y[0] if isinstance(y, tuple) else y
    return first


def layer_case(name: str, make: Callable[[], nn.Module], x: Tensor, most: float) -> Case:
    models = peer_models(make, CPU)
    if isinstance(models[PLAIN], nn.ConvTranspose1d):  # by default torch takes the input units
        models[OUTPUT_UNITS] = make()
        parametrizations.weight_norm(models[OUTPUT_UNITS], dim=1)
    return _case(
        name,
        {peer: passes(partial(output, model, x), model) for peer, model in models.items()},
        CopiesAtMost(OURS, most, PLAIN, 1, "launches"),
    )


def cases(settings: Settings) -> Iterator[Case]:
    sequence = torch.randn(2, 8, 16)
    yield layer_case("Linear", lambda: nn.Linear(16, 6), sequence, 6)
    yield layer_case("Conv1d", lambda: nn.Conv1d(8, 6, 3), sequence, 6)
    yield layer_case("ConvTranspose1d", lambda: nn.ConvTranspose1d(8, 6, 3), sequence, 17)
    yield layer_case("LSTM", lambda: nn.LSTM(16, 6), sequence, 12)

    yield optimizer_case(settings.size(12, 2))


def optimizer_case(layers: int) -> Case:
    """The step of the optimizer alone, per weight."""
    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)]), torch.randn(4, 8)
    optimizers = {
        PLAIN: torch.optim.Adam(model.parameters(), fused=True),
        OURS: WeightNormOptimizer(model, torch.optim.Adam, fused=True),
    }

    def step(optimizer: torch.optim.Optimizer) -> Call:
        def count() -> float:
            model(x).sum().backward()
            return count_launches(optimizer.step).total() / layers

        return count

    return _case(
        f"optimizer step, {layers} Linear, per weight",
        {name: step(optimizer) for name, optimizer in optimizers.items()},
        CopiesAtMost(OURS, 8, PLAIN, 1, "launches"),
    )


def _case(name: str, peers: dict[str, Call], goal: CopiesAtMost) -> Case:
    return Case(name, peers, base=PLAIN, goals=(goal,), unit="launches", rounds=1)


BENCHMARK = Benchmark("launches", "Kernel launches on an accelerator, counted", cases)
