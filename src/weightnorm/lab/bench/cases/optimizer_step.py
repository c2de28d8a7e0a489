"""The optimizer form beside the module form, plain Adam and Muon.

Whole training steps, the optimizer's step alone, and the memory that a step takes.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import WeightNormOptimizer
from weightnorm._torch_private import foreach_mul_, fused_weight_norm_backward
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, Summary, Work
from weightnorm.lab.bench.cases.vocoder import CHANNELS, Residuals
from weightnorm.lab.bench.goals import AtMost, CopiesAtMost
from weightnorm.lab.bench.peak_memory import peak_bytes
from weightnorm.lab.bench.peers import NORMALIZATIONS, OURS, PLAIN, build
from weightnorm.lab.bench.roofline import operations
from weightnorm.lab.interleaved import Call, seconds
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN
from weightnorm.layers import layer_weights

MODULE, OPTIMIZER = "module form", "optimizer form"
MUON, MUOWN = "Muon", "optimizer form, Muon"
FUSED = "fused Adam"
BARE = "optimizer form, kernels only"
STEPS = 8
"""Steps of the optimizer alone of which one measurement is the median."""

adam = partial(torch.optim.Adam, lr=1e-3, fused=True)
muon = partial(torch.optim.Muon, lr=1e-3, weight_decay=0.0)


@dataclass(frozen=True)
class Workload:
    """A network, its loss, and how much slower than plain Adam the optimizer form may be."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    limit: float
    bound: str = "convolution"
    """What its passes are bound by."""


class MuonOfMatrices:
    """Muon on every weight as a matrix, Adam on the rest: what Muon alone costs."""

    def __init__(self, model: nn.Module) -> None:
        weights = {module._parameters[name] for _, module, name in layer_weights(model)}
        self.weights = [p for p in model.parameters() if p in weights]
        self.matrices = [nn.Parameter(p.detach().flatten(1)) for p in self.weights]
        self.muon = muon(self.matrices)
        self.adam = adam([p for p in model.parameters() if p not in weights])

    def step(self) -> None:
        for weight, matrix in zip(self.weights, self.matrices, strict=True):
            matrix.grad = None if weight.grad is None else weight.grad.flatten(1)
        self.muon.step()
        self.adam.step()


class KernelsOnly:
    """The optimizer form's calls of torch, without checks: no zero rows, no weight written to."""

    def __init__(self, model: nn.Module) -> None:
        self.weights: list[Any] = [getattr(m, name) for _, m, name in layer_weights(model)]
        self.rows = [w.detach().flatten(1) for w in self.weights]
        self.counts = [len(x) for x in self.rows]
        self.norm = self.norms()
        self.g = self.norm.clone()
        columns = zip(self.g.split(self.counts), self.weights, strict=True)
        self.lengths = [nn.Parameter(c.view(-1, *[1] * (w.ndim - 1))) for c, w in columns]
        self.adam = adam([*model.parameters(), *self.lengths])

    def norms(self) -> Tensor:
        norm = torch.empty(sum(self.counts), 1, device=self.rows[0].device)
        for x, column in zip(self.rows, norm.split(self.counts), strict=True):
            torch.linalg.vector_norm(x, 2, 1, True, out=column)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        length = self.norms()
        factor = self.norm / length
        columns = ((self.g / factor).split(self.counts), length.split(self.counts))
        for w, x, g, gain, norm in zip(
            self.weights, self.rows, self.lengths, *columns, strict=True
        ):
            grad_v, grad_g = fused_weight_norm_backward(w.grad.view(x.shape), x, gain, norm, 0)
            w.grad, g.grad = grad_v.view(w.shape), grad_g.view(g.shape)
        foreach_mul_(self.rows, factor.split(self.counts))
        self.adam.step()
        self.norm = self.norms()
        foreach_mul_(self.rows, (self.g / self.norm).split(self.counts))
        for w, g in zip(self.weights, self.lengths, strict=True):
            w.grad = g.grad = None


def optimizer_of(
    name: str, model: nn.Module
) -> MuonOfMatrices | KernelsOnly | torch.optim.Optimizer:
    if name == MUON:
        return MuonOfMatrices(model)
    if name == BARE:
        return KernelsOnly(model)
    if name == MUOWN:
        return WeightNormOptimizer(model, muon, lengths=adam)
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


def step_alone(make: Callable[[], nn.Module], name: str, device: torch.device) -> Call:
    """A step of the optimizer, on gradients that are made for it and released after it."""
    model = build(make, NORMALIZATIONS[PLAIN], device)
    optimizer = optimizer_of(name, model)
    gradients = [torch.randn_like(p) for p in model.parameters()]

    def run() -> None:
        for p, grad in zip(model.parameters(), gradients, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        model.zero_grad()

    return run


def seconds_alone(make: Callable[[], nn.Module], name: str, device: torch.device) -> Call:
    """Seconds that a step of the optimizer takes, without making copies of the gradients.

    (The same ones again would not do: the optimizer form overwrites them, and after a hundred steps
    they are denormal or infinite.)
    """
    model = build(make, NORMALIZATIONS[PLAIN], device)
    optimizer = optimizer_of(name, model)
    gradients = [torch.randn_like(p) for p in model.parameters()]

    def run() -> float:
        taken = []
        for _ in range(STEPS):
            for p, grad in zip(model.parameters(), gradients, strict=True):
                p.grad = grad.clone()
            taken.append(seconds(optimizer.step))
        return statistics.median(taken)

    return run


def transformer_block(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.0, batch_first=True)


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
    signal = torch.randn(4, CHANNELS, settings.size(512, 16), device=settings.device)
    model_width = settings.size(1024, 32)
    tokens = torch.randn(settings.size(8, 1), settings.size(256, 4), model_width)
    tokens = tokens.to(settings.device)
    return {
        "ConvPool-CNN-C at ¼ width": Workload(
            lambda: ConvPoolCNN(lambda layer: layer, width=width),
            lambda model: F.cross_entropy(model(x), y),
            limit=1.02,
        ),
        "transformer block of width 1024": Workload(
            lambda: transformer_block(model_width),
            lambda model: model(tokens).square().mean(),
            limit=1.03,
            bound="matrix",
        ),
        "60 small conv1d layers": Workload(
            lambda: Residuals(layers),
            lambda model: model(signal).square().mean(),
            limit=1.05,
        ),
    }


def cases(settings: Settings) -> Iterator[Case]:
    device = settings.device
    found = workloads(settings)
    for name, workload in found.items():
        names = (PLAIN, MODULE, OPTIMIZER)
        peers = {each: training_step(workload, each, device) for each in names}
        yield Case(
            name,
            peers,
            base=PLAIN,
            goals=(AtMost(OPTIMIZER, workload.limit, PLAIN), AtMost(OPTIMIZER, 1.0, MODULE)),
            work=Work(operations(peers[PLAIN]), workload.bound, OPTIMIZER),
            summary=(Summary(f"optimizer form, {name}", OPTIMIZER),),
            at_least_base=(MODULE, OPTIMIZER),
        )
    for name, workload in found.items():
        peers = {each: training_step(workload, each, device) for each in (PLAIN, MUON, MUOWN)}
        goals = (AtMost(MUOWN, workload.limit, MUON),)
        yield Case(f"Muon: {name}", peers, base=MUON, goals=goals, at_least_base=(MUOWN,))
    for name, workload in found.items():
        names = (FUSED, OPTIMIZER, BARE)
        alone = {each: seconds_alone(workload.make, each, device) for each in names}
        yield Case(f"step alone: {name}", alone, base=FUSED, goals=(AtMost(OPTIMIZER, 2.5, FUSED),))
    for name, workload in found.items():
        # The memory profiler does not see the release of gradients that were made before.
        alone = {each: step_alone(workload.make, each, device) for each in (FUSED, OPTIMIZER)}
        for call in alone.values():
            call()  # the inner optimizers' state is not counted
        yield Case(
            f"peak memory of a step: {name}",
            {each: memory_of(call, device) for each, call in alone.items()},
            base=FUSED,
            goals=(
                CopiesAtMost(
                    OPTIMIZER,
                    1.0,
                    FUSED,
                    largest_group(workload.make()),
                    "the largest group of equal shape",
                ),
            ),
            unit="B",
            rounds=1,  # the same bytes every time
        )


def memory_of(call: Call, device: torch.device) -> Call:
    return lambda: float(peak_bytes(call, device))


BENCHMARK = Benchmark(
    "optimizer", "Training step, weight norm in the modules or the optimizer", cases
)
