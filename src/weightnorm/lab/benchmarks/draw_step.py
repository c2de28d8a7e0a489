"""What a training step of DRAW costs: `python -m weightnorm.lab.benchmarks.draw_step`.

Four networks that compute the same take turns, so that whatever else the machine does meets all of
them: the lab's own, standard and weight-normalized; and the same written layer by layer, standard
and with torch's parametrization, which then computes every weight anew at each step of a drawing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations

from weightnorm import weight_norm_model
from weightnorm.lab.benchmarks.side_by_side import interleaved
from weightnorm.lab.models.draw import DRAW, Bound, Cell, gated, kl_from_standard_normal


class LayerByLayer(DRAW):
    """The same function as one would first write it: at every step, each layer in turn."""

    def forward(self, x: Tensor, noise: Tensor) -> Bound:
        assert self.attention
        canvas, kl = torch.zeros_like(x), x.new_zeros(len(x))
        encoder = decoder = Cell(*x.new_zeros(2, len(x), self.hidden))
        for u in noise:
            window = self.reader.window(self.read_window(decoder.h))
            glimpse = self.reader.read((x, x - canvas.sigmoid()), window)
            t = self.encoder.input(torch.cat([glimpse, decoder.h], 1))
            t = t + self.encoder.recurrent(encoder.h)
            encoder = gated(t, self.encoder.peepholes, encoder.c)
            mean, log_sigma = self.mean(encoder.h), self.log_sigma(encoder.h)
            kl = kl + kl_from_standard_normal(mean, log_sigma).sum(1)
            t = self.decoder.input(mean + log_sigma.exp() * u) + self.decoder.recurrent(decoder.h)
            decoder = gated(t, self.decoder.peepholes, decoder.c)
            window = self.writer.window(self.write_window(decoder.h))
            canvas = canvas + self.writer.write(self.ink(decoder.h), window)
        return Bound(F.binary_cross_entropy_with_logits(canvas, x, reduction="none").sum(1), kl)


def torchs_weight_norm(model: nn.Module) -> None:
    """torch's own parametrization of every linear layer."""
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        parametrizations.weight_norm(layer)


NETWORKS: dict[str, tuple[type[DRAW], Callable[[DRAW], object]]] = {
    "standard": (DRAW, lambda model: None),
    "weight norm": (DRAW, weight_norm_model),
    "layer by layer": (LayerByLayer, lambda model: None),
    "layer by layer, torch's": (LayerByLayer, torchs_weight_norm),
}


def networks(hidden: int = 256) -> dict[str, DRAW]:
    """The four, from the same random state."""
    built = {}
    for name, (kind, normalize) in NETWORKS.items():
        torch.manual_seed(0)
        built[name] = kind(hidden=hidden)
        normalize(built[name])
    return built


def training_step(model: DRAW, x: Tensor, noise: Tensor) -> Callable[[], None]:
    """A step as the experiment takes it: bound, gradient, clipping, Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0003, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x, noise).negative_elbo.mean().backward()
        clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()

    return step


def main(words: list[str] | None = None) -> dict[str, float]:
    """Print the table; the median seconds of each network."""
    options = argparse.ArgumentParser(description="What a training step of DRAW costs.")
    options.add_argument("--steps", type=int, default=64, help="steps of a drawing")
    options.add_argument("--hidden", type=int, default=256, help="units of each LSTM")
    options.add_argument("--batch-size", type=int, default=100)
    options.add_argument("--rounds", type=int, default=15, help="training steps of each network")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = options.parse_args(words)
    torch.set_num_threads(given.threads)
    x = torch.rand(given.batch_size, 28 * 28).round()
    noise = torch.randn(given.steps, given.batch_size, 100)
    made = networks(given.hidden)
    steps = {name: training_step(model, x, noise) for name, model in made.items()}
    seconds = interleaved(steps, given.rounds)
    bases = ("standard", "layer by layer")
    table = Table("network", "ms a step", *(f"to {base}" for base in bases))
    for name, value in seconds.items():
        ratios = (f"{value / seconds[base]:.3f}" for base in bases)
        table.add_row(name, f"{1000 * value:.1f}", *ratios)
    Console().print(table)
    return seconds


if __name__ == "__main__":
    main()
