"""Row 3: recurrent layers, whose weights serve every step of a sequence."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached

from weightnorm.lab.benchmarks.benchmark import Case, Row, Setting, Work
from weightnorm.lab.benchmarks.goals import AtMost
from weightnorm.lab.benchmarks.interleaved import Call
from weightnorm.lab.benchmarks.peers import (
    FLAVOURS,
    OURS,
    PARAMETRIZATION,
    PLAIN,
    flavour,
    flavours,
    training_step,
)

BATCH = 32


def cases(setting: Setting) -> Iterator[Case]:
    steps, hidden = setting.size(64, 3), setting.size(256, 8)
    x = torch.randn(steps, BATCH, hidden, device=setting.device)
    work = Work(3 * 2 * x.numel() * 2 * 4 * hidden, "matrix", OURS)
    goals = (AtMost(OURS, 1.02, PLAIN),)

    def layer(model: nn.Module) -> Call:
        return training_step(model, lambda: model(x)[0].square().mean())

    models = flavours(lambda: nn.LSTM(hidden, hidden), setting.device)
    peers = {name: layer(model) for name, model in models.items()}
    yield Case("LSTM", peers, PLAIN, goals, work)

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
            with cached():  # one weight for the whole sequence
                return unrolled(model)

        return training_step(model, loss)

    models = flavours(lambda: nn.LSTMCell(hidden, hidden), setting.device)
    theirs = flavour(lambda: nn.LSTMCell(hidden, hidden), FLAVOURS[PARAMETRIZATION], setting.device)
    peers = {name: (cell_cached if name == OURS else cell)(m) for name, m in models.items()}
    peers[f"{PARAMETRIZATION}, cached"] = cell_cached(theirs)
    yield Case("LSTMCell unrolled, in parametrize.cached()", peers, PLAIN, goals, work)


ROW = Row("recurrent", "Training step on 64 steps of 256 units", cases)
