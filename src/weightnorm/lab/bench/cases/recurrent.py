"""Recurrent layers, which use one weight at every step of a sequence."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached

from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, Summary, Work
from weightnorm.lab.bench.goals import AtMost
from weightnorm.lab.bench.peers import (
    HOOK,
    NORMALIZATIONS,
    OURS,
    PARAMETRIZATION,
    PLAIN,
    build,
    peer_models,
    training_step,
)
from weightnorm.lab.interleaved import Call

BATCH = 32


def cases(settings: Settings) -> Iterator[Case]:
    steps, hidden = settings.size(64, 3), settings.size(256, 8)
    x = torch.randn(steps, BATCH, hidden, device=settings.device)
    work = Work(3 * 2 * x.numel() * 2 * 4 * hidden, "matrix", OURS)
    goals = (AtMost(OURS, 1.02, PLAIN),)

    def layer(model: nn.Module) -> Call:
        return training_step(model, lambda: model(x)[0].square().mean())

    models = peer_models(lambda: nn.LSTM(hidden, hidden), settings.device)
    peers = {name: layer(model) for name, model in models.items()}
    yield Case(
        "LSTM",
        peers,
        PLAIN,
        goals,
        work,
        summary=(Summary("LSTM", OURS, PARAMETRIZATION, HOOK),),
        at_least_base=(OURS, PARAMETRIZATION, HOOK),
    )

    def unrolled(cell: nn.Module) -> Tensor:
        state = None
        for each in x:
            state = cell(each, state)
        assert state is not None
        return state[0].square().mean()  # type: ignore[no-any-return]

    def cell(model: nn.Module) -> Call:
        return training_step(model, lambda: unrolled(model))

    def cell_cached(model: nn.Module) -> Call:
        def loss() -> Tensor:
            with cached():  # one weight computation per sequence
                return unrolled(model)

        return training_step(model, loss)

    models = peer_models(lambda: nn.LSTMCell(hidden, hidden), settings.device)
    torch_cached = build(
        lambda: nn.LSTMCell(hidden, hidden), NORMALIZATIONS[PARAMETRIZATION], settings.device
    )
    peers = {name: (cell_cached if name == OURS else cell)(m) for name, m in models.items()}
    peers[f"{PARAMETRIZATION}, cached"] = cell_cached(torch_cached)
    yield Case(
        "LSTMCell unrolled, in parametrize.cached()",
        peers,
        PLAIN,
        goals,
        work,
        summary=(Summary("LSTMCell, cached", OURS, f"{PARAMETRIZATION}, cached"),),
        at_least_base=(OURS, PARAMETRIZATION, HOOK),
    )


BENCHMARK = Benchmark("recurrent", "Training step on 64 steps of 256 units", cases)
