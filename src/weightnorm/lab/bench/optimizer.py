"""The optimizer form beside the module form and plain Adam.

Whole training steps, the optimizer's step alone, and the memory that a step takes.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import WeightNormOptimizer
from weightnorm.lab.bench.benchmark import (
    Benchmark,
    Case,
    Settings,
    Summary,
    added_at_most,
    at_most,
)
from weightnorm.lab.bench.layers import Residuals, signal
from weightnorm.lab.bench.memory import peak_bytes
from weightnorm.lab.bench.peers import NORMALIZATIONS, OPTIMIZER, OURS, PLAIN, adam, build
from weightnorm.lab.classify import ConvPoolCNN
from weightnorm.lab.interleaved import Call, seconds

MODULE = "module form"
FUSED = "fused Adam"
STEPS = 8
"""Steps of the optimizer alone of which one measurement is the median."""


@dataclass(frozen=True)
class Workload:
    """A network, its loss, and how much slower than plain Adam the optimizer form may be."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    limit: float


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return WeightNormOptimizer(model, adam) if name == OPTIMIZER else adam(model.parameters())


def training_step(workload: Workload, name: str, device: torch.device) -> Call:
    """Passes and a step of the named optimizer."""
    model = build(workload.make, NORMALIZATIONS[OURS if name == MODULE else PLAIN], device)
    optimizer = optimizer_of(name, model)

    def run() -> None:
        model.zero_grad()
        workload.loss(model).backward()
        optimizer.step()

    return run


class StepAlone:
    """Steps of an optimizer on gradients that are made for it.

    Copies, because the same gradients again would not do: the optimizer form overwrites them, and
    after a hundred steps they are denormal or infinite.
    """

    def __init__(self, make: Callable[[], nn.Module], name: str, device: torch.device) -> None:
        self.model = build(make, NORMALIZATIONS[PLAIN], device)
        self.optimizer = optimizer_of(name, self.model)
        self.gradients = [torch.randn_like(p) for p in self.model.parameters()]
        self.device = device

    def set_gradients(self) -> None:
        for p, grad in zip(self.model.parameters(), self.gradients, strict=True):
            p.grad = grad.clone()

    def seconds(self) -> float:
        """Median time of a step, without making the gradients."""
        taken = []
        for _ in range(STEPS):
            self.set_gradients()
            taken.append(seconds(self.optimizer.step))
        return statistics.median(taken)

    def peak(self) -> float:
        """Bytes that a step allocates, those of its gradients included: the memory profiler does
        not see the release of gradients that were made before."""

        def run() -> None:
            self.set_gradients()
            self.optimizer.step()
            self.model.zero_grad()

        run()  # the inner optimizers' state is not counted
        return float(peak_bytes(run, self.device))


def largest_group(model: nn.Module) -> int:
    """Bytes of the weights of equal shape that take most memory."""
    sizes: Counter[torch.Size] = Counter()
    for p in model.parameters():
        sizes[p.shape] += p.numel() * p.element_size()
    return max(sizes.values())


def workloads(settings: Settings) -> dict[str, Workload]:
    x = torch.randn(settings.size(100, 4), 3, 32, 32, device=settings.device)
    y = torch.arange(len(x), device=settings.device) % 10
    width, layers = settings.size(0.25, 0.03), settings.size(60, 2)
    waves = signal(settings)
    model_width = settings.size(1024, 32)
    tokens = torch.randn(settings.size(8, 1), settings.size(256, 4), model_width)
    tokens = tokens.to(settings.device)

    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(
            model_width, 16, 4 * model_width, dropout=0.0, batch_first=True
        )

    return {
        "ConvPool-CNN-C at ¼ width": Workload(
            lambda: ConvPoolCNN(lambda layer: layer, width=width),
            lambda model: F.cross_entropy(model(x), y),
            limit=1.02,
        ),
        "transformer block of width 1024": Workload(
            block, lambda model: model(tokens).square().mean(), limit=1.03
        ),
        "60 small conv1d layers": Workload(
            lambda: Residuals(layers), lambda model: model(waves).square().mean(), limit=1.05
        ),
    }


def cases(settings: Settings) -> Iterator[Case]:
    device = settings.device
    found = workloads(settings)
    for name, workload in found.items():
        peers = {each: training_step(workload, each, device) for each in (PLAIN, MODULE, OPTIMIZER)}
        yield Case(
            name,
            peers,
            base=PLAIN,
            limits=(at_most(OPTIMIZER, workload.limit, PLAIN), at_most(OPTIMIZER, 1.0, MODULE)),
            summary=(Summary(f"optimizer form, {name}", OPTIMIZER),),
            at_least_base=(MODULE, OPTIMIZER),
        )
    for name, workload in found.items():
        alone = {each: StepAlone(workload.make, each, device) for each in (FUSED, OPTIMIZER)}
        yield Case(
            f"step alone: {name}",
            {each: step.seconds for each, step in alone.items()},
            base=FUSED,
            limits=(at_most(OPTIMIZER, 2.5, FUSED),),
        )
        size = largest_group(workload.make())
        yield Case(
            f"peak memory of a step: {name}",
            {each: step.peak for each, step in alone.items()},
            base=FUSED,
            limits=(
                added_at_most(OPTIMIZER, 1.0, FUSED, size, "the largest group of equal shape"),
            ),
            unit="B",
            rounds=1,  # the same bytes every time
        )


BENCHMARK = Benchmark(
    "optimizer", "Training step, weight norm in the modules or the optimizer", cases
)
