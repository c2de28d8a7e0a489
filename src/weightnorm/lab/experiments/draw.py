"""Experiment 3: DRAW on binarized MNIST, standard against weight norm (section 5.3).

The recurrent model is trained as its implementation was tuned, and once more with every weight
vector normalized: same start, same learning rate. See docs/experiments/draw.md for the deviations
from the paper and what came out.

Note [noise of the whole batch]
    Every rank draws the noise of all examples of a step and takes that of its own. So the ranks'
    random states stay alike, and a run on many ranks is the run of one process, up to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from weightnorm import Parameterization, folded, is_weight_normed, parts, weight_norm_model
from weightnorm.diagnostics import unit_weights, weight_norms
from weightnorm.lab.data import digits, mnist
from weightnorm.lab.errors import require
from weightnorm.lab.models.draw import DRAW
from weightnorm.lab.runs.config import RunConfig
from weightnorm.lab.runs.records import RunRecord
from weightnorm.lab.runs.run import Run

NAME = "draw"
TITLE = "DRAW on binarized MNIST, standard and weight norm (section 5.3)"
METRIC = "train_negative_elbo"
"""Decides which learning rate is best, lower being better: the test set has no say in it."""
COMPARED = (Parameterization.STANDARD, Parameterization.WEIGHT_NORM)
EVAL_BATCH = 500
SAMPLES, DRAWINGS = 100, 8
"""How many images are kept for the report, and how many of them with every step."""


@dataclass(frozen=True)
class Config(RunConfig):
    """DRAW: a recurrent model that draws its image step by step, with attention."""

    data: Literal["binarized-mnist", "digits"] = "binarized-mnist"
    """The fixed binarization of MNIST, or scikit-learn's embedded digits in black and white."""
    epochs: int = 100
    """Passes over the training set."""
    batch_size: int = 100
    """Examples in a step, over all ranks."""
    steps: int = 64
    """Steps of a drawing."""
    hidden: int = 256
    """Units of the encoder's and of the decoder's LSTM."""
    latent: int = 100
    """Length of the latent vector of each step."""
    attention: bool = True
    """Read and write through a small grid of filters; else every pixel at each step."""
    read_size: int = 2
    """Filters along each axis of the grid that reads."""
    write_size: int = 5
    """Filters along each axis of the grid that writes."""
    initial_g: Literal["norm", "one", "one-except-windows"] = "norm"
    """Initial g of weight norm: ‖v‖, which keeps the initial weights; 1; or 1 except in the two
    layers that place the attention windows, which keep ‖v‖."""
    clip: float = 10.0
    """Longest gradient, over all parameters together."""
    limit: int | None = None
    """Train on the first this many examples only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        how, known = self.parameterization, " or ".join(map(str, COMPARED))
        require(
            how in COMPARED, "parameterization", how, f"{known}: cells keep no batch statistics"
        )
        for name in ("epochs", "batch_size", "steps", "hidden", "latent"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(self.read_size >= 2, "read_size", self.read_size, "2 or more")
        require(self.write_size >= 2, "write_size", self.write_size, "2 or more")
        require(self.clip > 0, "clip", self.clip, "a positive number")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "1 or more")


PAPER = Config(preset="paper", learning_rate=0.0003)
PRESETS = {
    "paper": PAPER,
    "cpu": replace(PAPER, preset="cpu", steps=16, read_size=5, epochs=20, learning_rate=0.001),
    "demo": replace(
        PAPER,
        preset="demo",
        data="digits",
        epochs=40,
        batch_size=50,
        steps=8,
        hidden=64,
        latent=16,
        write_size=3,
        learning_rate=0.003,
    ),
}
SIZES = {
    "paper": ("64 steps, 256 units", "100 epochs", "a GPU, days"),
    "cpu": ("16 steps, 256 units", "20 epochs", "two cores, about 25 minutes"),
    "demo": ("8 steps, 64 units", "embedded digits", "a minute"),
}
LEARNING_RATES = {
    name: dict.fromkeys(COMPARED, preset.learning_rate) for name, preset in PRESETS.items()
}
"""One for both: the paper leaves it as tuned for the standard parameterization."""


def run(config: Config, console: Console | None = None) -> RunRecord:
    """Train DRAW and bound the likelihood of the test set; the record is the result."""
    with Run(NAME, config, PRESETS, console) as run:
        if (record := run.finished) is not None:
            return record
        train, test = (images.to(run.device) for images in load(config))

        model = DRAW(
            side=math.isqrt(train.shape[1]),
            hidden=config.hidden,
            latent=config.latent,
            read_size=config.read_size,
            write_size=config.write_size,
            attention=config.attention,
        )
        if config.parameterization.normalizes_weights:
            weight_norm_model(model)  # every matrix; g = ‖v‖
            set_initial_g(model, config.initial_g)
        model.to(run.device)
        if config.compile:
            model.compile()

        optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
        if not run.restore(model=model, optimizer=optimizer):
            torch.manual_seed(~config.seed)  # see Note [noise of the whole batch]

        for epoch in run.epochs(config.epochs):
            for rows in run.batches(len(train), config.batch_size):
                bound = model(train[rows].float(), noise(run.batch, config, run))
                loss = bound.negative_elbo.sum() / run.batch
                optimizer.zero_grad()
                loss.backward()
                run.ranks.sum_gradients(model)
                length = clip_grad_norm_(model.parameters(), config.clip)
                optimizer.step()
                run.add(
                    negative_elbo=loss * run.batch,
                    kl=bound.kl.sum(),
                    gradient_norm=length * len(rows),
                    count=len(rows),
                )

            test_negative_elbo, test_kl = evaluate(model, test, config, run)
            names = ("negative_elbo", "kl", "gradient_norm")
            run.log(
                **{f"train_{name}": run.total(name) / run.total("count") for name in names},
                test_negative_elbo=test_negative_elbo,
                test_kl=test_kl,
                **mean_norms(model),
            )
            if epoch + 1 in (config.epochs // 2, config.epochs):
                keep_drawings(model, config, run)
        last = run.last
        return run.finish(
            {k: last[k] for k in ("train_negative_elbo", "test_negative_elbo", "test_kl")}
        )


def load(config: Config) -> tuple[Tensor, Tensor]:
    """Images of zeros and ones to train and to test on: uint8, (N, side²)."""
    if config.data == "digits":
        raw = digits.load()
        train, test = ((images > 0.5).to(torch.uint8) for images in (raw.train, raw.test))
    else:
        images = mnist.load_binarized(config.data_dir)
        train, test = images.train, images.test
    return train[: config.limit].flatten(1), test.flatten(1)


@torch.no_grad()
def set_initial_g(model: DRAW, initial_g: str) -> None:
    """Set g of a weight-normalized model as `Config.initial_g` describes."""
    if initial_g == "norm":
        return
    windows = [model.read_window, model.write_window] if model.attention else []
    for module in model.modules():
        keeps = initial_g == "one-except-windows" and any(module is m for m in windows)
        if is_weight_normed(module) and not keeps:
            parts(module).g.fill_(1.0)


def mean_norms(model: DRAW) -> dict[str, float]:
    """Mean ‖w‖, and for weight norm ‖v‖, over the units of all matrices."""
    weights = unit_weights(model)
    means = {"w_norm": torch.cat([w.norm(dim=1) for w in weights.values()]).mean().item()}
    if norms := weight_norms(model):
        means["v_norm"] = torch.cat([*norms.values()]).mean().item()
    return means


def noise(count: int, config: Config, run: Run) -> Tensor:
    """This rank's part of the noise of `count` examples: (steps, B, latent)."""
    whole = torch.randn(count, config.steps, config.latent, device=run.device)
    return run.ranks.share(whole).transpose(0, 1)


@torch.no_grad()
def evaluate(model: DRAW, images: Tensor, config: Config, run: Run) -> tuple[float, float]:
    """Means of −ELBO and of its KL part, in nats; each rank takes its share."""
    sums = torch.zeros(2, dtype=torch.float64)
    with folded(model):
        for rows in torch.arange(len(images)).split(EVAL_BATCH):
            x = images[run.ranks.share(rows)].float()
            bound = model(x, noise(len(rows), config, run))
            sums += torch.stack([bound.negative_elbo.sum(), bound.kl.sum()]).cpu()
    negative_elbo, kl = (run.ranks.sum(sums) / len(images)).tolist()
    return negative_elbo, kl


def keep_drawings(model: DRAW, config: Config, run: Run) -> None:
    """Samples, some of them step by step with the square that was written to.

    From the same noise whenever it is called, whatever the parameterization.
    """
    generator = torch.Generator().manual_seed(config.seed)
    z = torch.randn(config.steps, SAMPLES, config.latent, generator=generator).to(run.device)
    with folded(model):
        drawn = model.generate(z)
    pixels = (255 * drawn.canvases).round().to(torch.uint8)
    run.keep(
        f"epoch-{run.epoch + 1}",
        samples=pixels[-1],
        drawings=pixels[:, :DRAWINGS],
        boxes=drawn.boxes[:, :DRAWINGS],
    )
