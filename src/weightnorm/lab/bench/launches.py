"""Kernel launches of weight norm on an accelerator, forward and backward, counted.

Runs on the CPU, on the path that the library takes on an accelerator. Every operation that reaches
the backend counts as one launch, except those that only make views or allocate memory. The counts
are deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from weightnorm import WeightNormOptimizer
from weightnorm._kernels import assume_accelerator
from weightnorm._torch_private import TorchDispatchMode
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, added_at_most
from weightnorm.lab.bench.peers import OURS, PLAIN, peer_models
from weightnorm.lab.interleaved import Call

OUTPUT_UNITS = "torch, parametrization, dim=1"
_NO_LAUNCH = {
    "_unsafe_view",
    "_local_scalar_dense",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


class LaunchCounter(TorchDispatchMode):
    """Count operations that launch a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in _NO_LAUNCH and not _makes_view(func):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _makes_view(func: Any) -> bool:
    """Whether an operation returns a view of an argument and writes nothing."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def count_launches(call: Callable[[], object]) -> Counter[str]:
    """Count the kernels that `call` would launch on an accelerator, by operation.

    >>> x = torch.ones(2, 3)
    >>> count_launches(lambda: (x.t() * 2).sum())
    Counter({'mul': 1, 'sum': 1})
    """
    counter = LaunchCounter()
    with assume_accelerator(), counter:
        call()
    return counter.counts


def passes(model: nn.Module, x: Tensor) -> Call:
    """Launches of a forward and backward pass whose gradients replace none."""

    def step() -> None:
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()

    def count() -> float:
        model.zero_grad()
        return float(count_launches(step).total())

    return count


def layer_case(name: str, make: Callable[[], nn.Module], x: Tensor, most: int) -> Case:
    models = peer_models(make, torch.device("cpu"))
    if isinstance(models[PLAIN], nn.ConvTranspose1d):  # by default torch takes the input units
        models[OUTPUT_UNITS] = make()
        parametrizations.weight_norm(models[OUTPUT_UNITS], dim=1)
    return _case(name, {peer: passes(model, x) for peer, model in models.items()}, most)


def cases(settings: Settings) -> Iterator[Case]:
    sequence = torch.randn(2, 8, 16)
    yield layer_case("Linear", lambda: nn.Linear(16, 6), sequence, 2)
    yield layer_case("Conv1d", lambda: nn.Conv1d(8, 6, 3), sequence, 2)
    yield layer_case("ConvTranspose1d", lambda: nn.ConvTranspose1d(8, 6, 3), sequence, 2)
    yield layer_case("LSTM", lambda: nn.LSTM(16, 6), sequence, 4)
    for layers in (12, 60):
        yield optimizer_case(settings.size(layers, layers // 6))


def optimizer_case(layers: int) -> Case:
    """The step of the optimizer alone: two launches more, and g's share of the inner optimizer."""
    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)]), torch.randn(4, 8)
    optimizers = {
        PLAIN: torch.optim.Adam(model.parameters(), fused=True),
        OURS: WeightNormOptimizer(model, torch.optim.Adam, fused=True),
    }

    def step(optimizer: torch.optim.Optimizer) -> Call:
        def count() -> float:
            model(x).sum().backward()
            return float(count_launches(optimizer.step).total())

        return count

    name = f"optimizer step, {layers} Linear"
    return _case(name, {name: step(each) for name, each in optimizers.items()}, 4)


def _case(name: str, peers: dict[str, Call], most: int) -> Case:
    limits = (added_at_most(OURS, most, PLAIN, 1, "launches"),)
    return Case(name, peers, base=PLAIN, limits=limits, unit="launches", rounds=1)


BENCHMARK = Benchmark("launches", "Kernel launches on an accelerator, counted", cases)
