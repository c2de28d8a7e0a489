"""Experiment 3: DRAW on binarized MNIST, standard against weight norm (section 5.3).

The recurrent model is trained with the hyperparameters of its implementation, with and without
weight normalization of every matrix. See docs/experiments/draw.md for the deviations from the paper
and the results.

Note [noise of the whole batch]
    Every rank draws the noise of all examples of a step and uses that of its own. So the ranks'
    random states stay equal, and a run on several ranks equals one process, up to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from weightnorm import Parameterization, folded, weight_norm_model
from weightnorm.diagnostics import v_norms, weight_rows
from weightnorm.lab.config import Count, Range, RunConfig, Size
from weightnorm.lab.data import digits, mnist
from weightnorm.lab.models.draw import DRAW
from weightnorm.lab.records import RunRecord
from weightnorm.lab.run import Run

NAME = "draw"
TITLE = "DRAW on binarized MNIST, standard and weight norm (section 5.3)"
METRIC = "train_negative_elbo"
"""Selects the best learning rate of a sweep, lower is better. Test bounds are not used for that."""
RESULTS = ("train_negative_elbo", "test_negative_elbo", "test_kl")
"""Metrics of every result: those that `sweep --metric` accepts."""
EVAL_BATCH = 500
SAMPLES, DRAWINGS = 100, 8
"""Generated images that are stored for the report; how many of them with every step."""


@dataclass(frozen=True)
class Config(RunConfig):
    """Train DRAW, a recurrent VAE with attention."""

    parameterization: Parameterization = Parameterization.WEIGHT_NORM
    """Only standard and weight-norm apply to this model."""
    data: Literal["binarized-mnist", "digits"] = "binarized-mnist"
    """The fixed binarization of MNIST, or scikit-learn's embedded digits thresholded at ½."""
    epochs: Count = 100
    """Passes over the training set."""
    batch_size: Size = 100
    """Examples per step, over all ranks."""
    steps: Size = 64
    """Time steps T of the recurrent model."""
    hidden: Size = 256
    """Units of the encoder's and of the decoder's LSTM."""
    latent: Size = 100
    """Dimension of the latent vector at each step."""
    attention: bool = True
    """Read and write through a grid of Gaussian filters; without it, all pixels at each step."""
    read_size: Annotated[int, Range(2, 1000)] = 2
    """Filters along each axis of the read grid."""
    write_size: Annotated[int, Range(2, 1000)] = 5
    """Filters along each axis of the write grid."""
    initial_g: Literal["norm", "one", "one-except-windows"] = "norm"
    """Initial g of weight norm: ‖v‖, which keeps the initial weights; 1; or 1 except in the two
    layers that place the attention windows, which keep ‖v‖. Not used by the standard
    parameterization."""
    clip: Annotated[float, Range(0, math.inf, open_low=True)] = 10.0
    """Largest gradient norm over all parameters; longer gradients are scaled down to it."""
    limit: Count | None = None
    """Train on only this many examples, from the start of the training set."""

    COMPARED: ClassVar = (Parameterization.STANDARD, Parameterization.WEIGHT_NORM)

    def __post_init__(self) -> None:
        super().__post_init__()
        # One run, whatever g is given in a sweep.
        if self.parameterization != Parameterization.WEIGHT_NORM:
            object.__setattr__(self, "initial_g", "norm")

    @property
    def default_rate(self) -> float:
        """The same for both parameterizations: the paper keeps the rate tuned for the standard."""
        return {"paper": 0.0003, "cpu": 0.001, "demo": 0.003}[self.preset]


PAPER = Config(preset="paper", about="64 steps, 256 units, 100 epochs, a GPU, days")
PRESETS = {
    "paper": PAPER,
    "cpu": replace(
        PAPER,
        preset="cpu",
        about="16 steps, 256 units, 20 epochs, two cores, about 25 minutes",
        steps=16,
        read_size=5,
        epochs=20,
    ),
    "demo": replace(
        PAPER,
        preset="demo",
        about="8 steps, 64 units, embedded digits, a minute",
        data="digits",
        epochs=40,
        batch_size=50,
        steps=8,
        hidden=64,
        latent=16,
        write_size=3,
    ),
}


def run(config: Config, console: Console | None = None) -> RunRecord:
    """Train and evaluate one model, and return its record."""
    with Run(NAME, config, PRESETS, console, RESULTS) as run:
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
            normalize(model, config.initial_g)
        model.to(run.device)
        if config.compile:
            model.compile()

        optimizer = torch.optim.Adam(model.parameters(), lr=config.rate, fused=True)
        if not run.restore(model=model, optimizer=optimizer):
            torch.manual_seed(~config.seed)  # see Note [noise of the whole batch]

        for epoch in run.epochs(config.epochs):
            for rows in run.batches(len(train), config.batch_size):
                bound = model(train[rows].float(), posterior_noise(run.batch, config, run))
                loss = bound.negative_elbo.sum() / run.batch
                optimizer.zero_grad()
                loss.backward()
                run.ranks.sum_gradients(model)
                gradient_norm = clip_grad_norm_(model.parameters(), config.clip)
                optimizer.step()
                run.add(
                    negative_elbo=loss * run.batch,
                    kl=bound.kl.sum(),
                    gradient_norm=gradient_norm * len(rows),
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
                store_samples(model, config, run)
        return run.finish({name: run.last[name] for name in RESULTS})


def load(config: Config) -> tuple[Tensor, Tensor]:
    """Load the binary training and test images: uint8, (N, side²)."""
    if config.data == "digits":
        raw = digits.load()
        train, test = ((images > 128).to(torch.uint8) for images in (raw.train, raw.test))
    else:
        images = mnist.load_binarized(config.data_dir)
        train, test = images.train, images.test
    return train[: config.limit].flatten(1), test.flatten(1)


def normalize(model: DRAW, initial_g: str) -> None:
    """Normalize every matrix, with the initial g that `Config.initial_g` describes."""
    if initial_g == "one-except-windows" and model.attention:
        windows = (model.read_window, model.write_window)
        weight_norm_model(model, where=lambda _, module: module in windows)
    weight_norm_model(model, g=None if initial_g == "norm" else 1.0)


def mean_norms(model: DRAW) -> dict[str, float]:
    """Return mean ‖w‖ over the units of all matrices, and mean ‖v‖ of normalized ones."""
    weights = weight_rows(model)
    means = {"w_norm": torch.cat([w.norm(dim=1) for w in weights.values()]).mean().item()}
    if norms := v_norms(model):
        means["v_norm"] = torch.cat([*norms.values()]).mean().item()
    return means


def posterior_noise(count: int, config: Config, run: Run) -> Tensor:
    """Return this rank's part of the noise of `count` examples: (steps, B, latent)."""
    noise = torch.randn(count, config.steps, config.latent, device=run.device)
    return run.ranks.share(noise).transpose(0, 1)


@torch.no_grad()
def evaluate(model: DRAW, images: Tensor, config: Config, run: Run) -> tuple[float, float]:
    """Return the means of −ELBO and of its KL term on the test set, in nats."""
    sums = []
    with folded(model):
        for batch in images.split(EVAL_BATCH):
            x = run.ranks.share(batch).float()
            bound = model(x, posterior_noise(len(batch), config, run))
            sums.append(torch.stack([bound.negative_elbo.sum(), bound.kl.sum()]))
    total = torch.stack(sums).cpu().double().sum(0)  # one read from the device
    negative_elbo, kl = (run.ranks.sum(total) / len(images)).tolist()
    return negative_elbo, kl


def store_samples(model: DRAW, config: Config, run: Run) -> None:
    """Store generated images, some of them with every step and the square it wrote to.

    The noise is the same at every call and for every parameterization.
    """
    generator = torch.Generator().manual_seed(config.seed)
    z = torch.randn(config.steps, SAMPLES, config.latent, generator=generator).to(run.device)
    with folded(model):
        generated = model.generate(z)
    pixels = (255 * generated.canvases).round().to(torch.uint8)
    run.save_arrays(
        f"epoch-{run.epoch + 1}",
        samples=pixels[-1],
        drawings=pixels[:, :DRAWINGS],
        boxes=generated.boxes[:, :DRAWINGS],
    )
