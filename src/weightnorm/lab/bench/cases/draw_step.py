"""A training step of DRAW.

Four networks that compute the same function: the lab's, standard and weight-normalized; and a
straightforward one that calls every layer at every time step, standard and with torch's
parametrization, which then recomputes every weight at every time step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, Summary, Work
from weightnorm.lab.bench.goals import AtMost
from weightnorm.lab.bench.peers import (
    NORMALIZATIONS,
    OURS,
    PARAMETRIZATION,
    PLAIN,
    build,
)
from weightnorm.lab.bench.roofline import operations
from weightnorm.lab.interleaved import Call
from weightnorm.lab.models.draw import DRAW, Bound, LSTMState, apply_gates, kl_from_standard_normal


class LayerByLayer(DRAW):
    """DRAW as one would first write it: every layer is called at every time step."""

    def forward(self, x: Tensor, noise: Tensor) -> Bound:
        assert self.attention
        canvas, kl = torch.zeros_like(x), x.new_zeros(len(x))
        encoder = decoder = LSTMState(*x.new_zeros(2, len(x), self.hidden))
        for u in noise:
            window = self.reader.window(self.read_window(decoder.h))
            glimpse = self.reader.read((x, x - canvas.sigmoid()), window)
            t = self.encoder.input(torch.cat([glimpse, decoder.h], 1))
            t = t + self.encoder.recurrent(encoder.h)
            encoder = apply_gates(t, self.encoder.peepholes, encoder.c)
            mean, log_sigma = self.mean(encoder.h), self.log_sigma(encoder.h)
            kl = kl + kl_from_standard_normal(mean, log_sigma).sum(1)
            t = self.decoder.input(mean + log_sigma.exp() * u) + self.decoder.recurrent(decoder.h)
            decoder = apply_gates(t, self.decoder.peepholes, decoder.c)
            window = self.writer.window(self.write_window(decoder.h))
            canvas = canvas + self.writer.write(self.ink(decoder.h), window)
        return Bound(F.binary_cross_entropy_with_logits(canvas, x, reduction="none").sum(1), kl)


BY_HAND, STANDARD = "layer by layer", "standard"
LAYER_BY_LAYER_TORCH = f"{BY_HAND}, {PARAMETRIZATION}"
NETWORKS: dict[str, tuple[type[DRAW], str]] = {
    BY_HAND: (LayerByLayer, PLAIN),
    STANDARD: (DRAW, PLAIN),
    OURS: (DRAW, OURS),
    LAYER_BY_LAYER_TORCH: (LayerByLayer, PARAMETRIZATION),
}


def networks(hidden: int, device: torch.device) -> dict[str, DRAW]:
    """The four networks, from the same random state."""
    made = {}
    for name, (kind, normalized) in NETWORKS.items():
        model = build(partial(kind, hidden=hidden), NORMALIZATIONS[normalized], device)
        assert isinstance(model, DRAW)
        made[name] = model
    return made


def training_step(model: DRAW, x: Tensor, noise: Tensor) -> Call:
    """A training step of the experiment: bound, gradient, clipping, Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0003, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x, noise).negative_elbo.mean().backward()
        clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()

    return step


def cases(settings: Settings) -> Iterator[Case]:
    batch, hidden = settings.size(100, 2), settings.size(256, 4)
    for steps in settings.size((16, 64), (2,)):  # the preset `cpu`, the paper
        x = torch.rand(batch, 28 * 28, device=settings.device).round()
        noise = torch.randn(steps, batch, 100, device=settings.device)
        models = networks(hidden, settings.device)
        peers = {name: training_step(model, x, noise) for name, model in models.items()}
        yield Case(
            f"{steps} steps of {hidden} units, batch of {batch}",
            peers,
            base=STANDARD,
            goals=(AtMost(OURS, 1.03, STANDARD), AtMost(STANDARD, 1.02, BY_HAND)),
            work=Work(operations(peers[BY_HAND]), "matrix", OURS),
            examples=batch,
            summary=(Summary(f"DRAW, {steps} steps", OURS, LAYER_BY_LAYER_TORCH),),
            at_least_base=(OURS,),
        )


BENCHMARK = Benchmark("draw", "Training step of DRAW, sequences per second", cases)
