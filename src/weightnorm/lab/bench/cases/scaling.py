"""Cost of weight norm against the number of layers, width, batch size and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from weightnorm import parts, weight_norm
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, Work
from weightnorm.lab.bench.cases.traffic import FeedForward
from weightnorm.lab.bench.goals import GrowthAtMost, RelativelyAtMost
from weightnorm.lab.bench.peers import NORMALIZATIONS, OURS, PLAIN, build
from weightnorm.lab.bench.processes import Step, call_all, on_ranks
from weightnorm.lab.interleaved import Call
from weightnorm.lab.pool import Worker
from weightnorm.lab.runs.ranks import Ranks

LINEAR, CONSTANT = 1.1, 0.1
"""Exponents that count as linear and constant growth; overhead and caches are allowed for."""
WIDTH = 64
LAYERS, WIDTHS, BATCHES, RANKS = (1, 4, 16, 64, 256), (8, 64, 512, 4096), (1, 4, 16, 64), (1, 2, 4)


def weights_and_gradients(layers: list[nn.Linear]) -> Call:
    """Compute every weight from v and g, and ∇v and ∇g from ∇w."""
    sources = [part for layer in layers for part in parts(layer)]
    grads = [torch.ones_like(parts(layer).v) for layer in layers]

    def run() -> None:
        torch.autograd.grad([layer.weight for layer in layers], sources, grads)

    return run


def cases(settings: Settings) -> Iterator[Case]:
    def linear(width: int) -> nn.Linear:
        return weight_norm(nn.Linear(width, width, device=settings.device))

    counts = LAYERS[: settings.size(None, 2)]
    yield growth(
        "layers of 64×64, weights only",
        {
            f"{n} layers": (n, weights_and_gradients([linear(WIDTH) for _ in range(n)]))
            for n in counts
        },
        GrowthAtMost("cost", LINEAR, "layers", {n: (f"{n} layers", None) for n in counts}),
        weights=counts[-1] * WIDTH**2,
    )
    widths = WIDTHS[: settings.size(None, 2)]
    yield growth(
        "a layer of n×n, weight only",
        {f"n = {n}": (n, weights_and_gradients([linear(n)])) for n in widths},
        GrowthAtMost("cost", LINEAR, "weights", {n**2: (f"n = {n}", None) for n in widths}),
        weights=widths[-1] ** 2,
    )
    yield batches(settings)
    with ranks(settings) as case:
        yield case


def growth(
    name: str, peers: Mapping[str, tuple[int, Call]], goal: GrowthAtMost, weights: int
) -> Case:
    calls = {name: call for name, (_, call) in peers.items()}
    largest = list(calls)[-1]
    return Case(name, calls, next(iter(calls)), (goal,), Work(5 * 4 * weights, "memory", largest))


def batches(settings: Settings) -> Case:
    """Forward and backward of eight layers at several batch sizes."""
    width, peers = settings.size(512, 8), {}
    for normalized in (PLAIN, OURS):
        model = build(
            lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(8))),
            NORMALIZATIONS[normalized],
            settings.device,
        )
        for batch in BATCHES:
            x = torch.randn(batch, width, device=settings.device)
            peers[f"{normalized}, {batch}"] = partial(passes, model, x)
    pairs = {n: (f"{OURS}, {n}", f"{PLAIN}, {n}") for n in BATCHES}
    goal = GrowthAtMost("extra cost", CONSTANT, "batch size", pairs)
    return Case(
        "batch size, forward and backward of 8 layers of 512×512", peers, f"{PLAIN}, 1", (goal,)
    )


def passes(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


@contextmanager
def ranks(settings: Settings) -> Iterator[Case]:
    """A training step on gloo ranks of one thread each. All process groups exist at the same time,
    so that their steps can be measured in alternation."""
    size, worlds = settings.size((256, 1024, 4), (8, 16, 1)), RANKS[: settings.size(None, 2)]
    with ExitStack() as stack:
        calls: dict[str, Call] = {}
        for world in worlds:
            workers = stack.enter_context(on_ranks(world, rank_steps, size))
            for name in (PLAIN, OURS):
                calls[f"{name}, {world}"] = partial(_step_on_all, workers, name)
        pairs = {n: (f"{OURS}, {n}", f"{PLAIN}, {n}") for n in worlds}
        goals = tuple(RelativelyAtMost(pairs[n], 1.05, pairs[1]) for n in worlds[1:])
        yield Case("ranks, step of a feed-forward network", calls, f"{PLAIN}, 1", goals)


def rank_steps(ranks: Ranks, size: tuple[int, int, int]) -> dict[str, Step]:
    """A rank's training steps, plain and weight-normalized."""

    def step(normalized: str) -> Step:
        model = build(
            lambda: FeedForward(lambda layer: layer, *size),
            NORMALIZATIONS[normalized],
            torch.device("cpu"),
        )
        x = torch.randn(64, size[0])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

        def run() -> None:
            passes(model, x)
            ranks.sum_gradients(model)
            optimizer.step()

        return run

    return {name: step(name) for name in (PLAIN, OURS)}


def _step_on_all(workers: list[Worker], name: str) -> None:
    call_all(workers, _step, name)


def _step(steps: dict[str, Step], name: str) -> None:
    steps[name]()


BENCHMARK = Benchmark("scaling", "Cost against layers, width, batch size and ranks", cases)
