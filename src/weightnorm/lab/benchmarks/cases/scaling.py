"""Row 10: how the cost of weight norm grows: with layers, width, batch and ranks."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from weightnorm import parts, weight_norm
from weightnorm.lab.benchmarks.benchmark import Case, Row, Setting, Work
from weightnorm.lab.benchmarks.cases.traffic import FeedForward
from weightnorm.lab.benchmarks.goals import GrowthAtMost, RelativelyAtMost
from weightnorm.lab.benchmarks.interleaved import Call, interleaved
from weightnorm.lab.benchmarks.peers import FLAVOURS, OURS, PLAIN, flavour
from weightnorm.lab.runs.ranks import Ranks
from weightnorm.lab.runs.records import write_json

LINEAR, CONSTANT = 1.1, 0.1
"""Powers of growth that count as linear and as constant, overhead and caches allowed for."""
WIDTH = 64
LAYERS, WIDTHS, BATCHES, RANKS = (1, 4, 16, 64, 256), (8, 64, 512, 4096), (1, 4, 16, 64), (1, 2, 4)


def reading(layers: list[nn.Linear]) -> Call:
    """Compute every weight, and every ∇v and ∇g."""
    sources = [part for layer in layers for part in parts(layer)]
    grads = [torch.ones_like(parts(layer).v) for layer in layers]

    def run() -> None:
        torch.autograd.grad([layer.weight for layer in layers], sources, grads)

    return run


def cases(setting: Setting) -> Iterator[Case]:
    def linear(width: int) -> nn.Linear:
        return weight_norm(nn.Linear(width, width, device=setting.device))

    counts = LAYERS[: setting.size(None, 2)]
    yield grown(
        "layers of 64×64, the weights alone",
        {f"{n} layers": (n, reading([linear(WIDTH) for _ in range(n)])) for n in counts},
        GrowthAtMost("cost", LINEAR, "layers", {n: (f"{n} layers", None) for n in counts}),
        weights=counts[-1] * WIDTH**2,
    )
    widths = WIDTHS[: setting.size(None, 2)]
    yield grown(
        "a layer of n×n, the weight alone",
        {f"n = {n}": (n, reading([linear(n)])) for n in widths},
        GrowthAtMost("cost", LINEAR, "weights", {n**2: (f"n = {n}", None) for n in widths}),
        weights=widths[-1] ** 2,
    )
    yield batches(setting)
    yield ranks(setting)


def grown(
    name: str, peers: Mapping[str, tuple[int, Call]], goal: GrowthAtMost, weights: int
) -> Case:
    calls = {name: call for name, (_, call) in peers.items()}
    largest = list(calls)[-1]
    return Case(name, calls, next(iter(calls)), (goal,), Work(5 * 4 * weights, "memory", largest))


def batches(setting: Setting) -> Case:
    """Extra cost of the passes of eight layers over batches of different size."""
    width, peers = setting.size(512, 8), {}
    for normalized in (PLAIN, OURS):
        model = flavour(
            lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(8))),
            FLAVOURS[normalized],
            setting.device,
        )
        for batch in BATCHES:
            x = torch.randn(batch, width, device=setting.device)
            peers[f"{normalized}, {batch}"] = partial(passes, model, x)
    pairs = {n: (f"{OURS}, {n}", f"{PLAIN}, {n}") for n in BATCHES}
    goal = GrowthAtMost("extra cost", CONSTANT, "batch", pairs)
    return Case("batch, passes of 8 layers of 512×512", peers, f"{PLAIN}, 1", (goal,))


def passes(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def ranks(setting: Setting) -> Case:
    """A training step on gloo ranks of one thread each; what the first of them measured."""
    peers: dict[str, Call] = {}
    worlds = RANKS[: setting.size(None, 2)]
    for world in worlds:
        for name, samples in measured_on(world, setting).items():
            peers[f"{name}, {world}"] = partial(next, iter(samples))
    pairs = {n: (f"{OURS}, {n}", f"{PLAIN}, {n}") for n in worlds}
    goals = tuple(RelativelyAtMost(pairs[n], 1.05, pairs[1]) for n in worlds[1:])
    name, rounds = "ranks, step of a feed-forward network", setting.rounds
    return Case(name, peers, f"{PLAIN}, 1", goals, rounds=rounds)


def measured_on(world: int, setting: Setting) -> dict[str, list[float]]:
    """One sample more than rounds: the first is not counted."""
    size = setting.size((256, 1024, 4), (8, 16, 1))
    with tempfile.TemporaryDirectory() as folder:
        spawn(_on_rank, (world, folder, size, setting.rounds + 1), nprocs=world)
        samples: dict[str, list[float]] = json.loads(Path(folder, "samples.json").read_text())
    return samples


def _on_rank(rank: int, world: int, folder: str, size: tuple[int, int, int], rounds: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world
    )
    here = Ranks(rank, world)

    def step(normalized: str) -> Call:
        model = flavour(
            lambda: FeedForward(lambda layer: layer, *size),
            FLAVOURS[normalized],
            torch.device("cpu"),
        )
        x = torch.randn(64, size[0])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

        def run() -> None:
            passes(model, x)
            here.sum_gradients(model)
            optimizer.step()

        return run

    samples = interleaved({name: step(name) for name in (PLAIN, OURS)}, rounds)
    if rank == 0:
        write_json(Path(folder, "samples.json"), samples)
    dist.destroy_process_group()


ROW = Row("growth", "How the cost of weight norm grows", cases)
