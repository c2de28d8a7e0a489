"""Experiment 2: a convolutional VAE with inverse autoregressive flow (section 5.2).

MNIST, binarized anew at every use, and CIFAR-10; Adamax at 0.002, and an average of the parameters
over about ten epochs, which is what is tested. Standard against weight normalization, from the same
data-dependent start. See docs/experiments/vae.md for the deviations and what came out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from weightnorm import Parameterization, batched_weights, data_dependent_init, folded
from weightnorm.lab.data import cifar10, digits, mnist
from weightnorm.lab.errors import require
from weightnorm.lab.models.likelihoods import bits_per_dim
from weightnorm.lab.models.vae import VAE, Terms, log_importance_weights
from weightnorm.lab.models.vae_cifar10 import Cifar10VAE
from weightnorm.lab.models.vae_mnist import MnistVAE
from weightnorm.lab.runs.config import RunConfig
from weightnorm.lab.runs.records import RunRecord
from weightnorm.lab.runs.run import Run

NAME = "vae"
TITLE = "convolutional VAE with inverse autoregressive flow (section 5.2)"
METRIC = "train_negative_elbo"
"""Decides which learning rate is best, lower being better: the test set has no say in it."""
Tensors = tuple[Tensor, ...] | list[Tensor]
COMPARED = (Parameterization.STANDARD, Parameterization.WEIGHT_NORM)
EVAL_BATCH = 500
SAMPLES, PAIRS = 40, 16
"""New images, and images with their reconstruction, that a run keeps."""


@dataclass(frozen=True)
class Config(RunConfig):
    """A convolutional VAE, standard or weight-normalized."""

    learning_rate: float = 0.002
    """Adamax's step size."""
    data: Literal["mnist", "cifar10", "digits"] = "mnist"
    """MNIST, CIFAR-10, or scikit-learn's embedded digits at twice their size. It decides the
    network; each preset has settings of its own for CIFAR-10."""
    posterior: Literal["iaf", "diagonal"] = "iaf"
    """Inverse autoregressive flow, or a diagonal Gaussian."""
    flow_steps: int = 2
    """Steps of the flow."""
    latents: int = 32
    """Elements of z; on CIFAR-10, maps of each stochastic layer."""
    width: float = 1.0
    """Factor on the network's maps and units."""
    depth: int = 2
    """Residual blocks at each size; on CIFAR-10 each has a stochastic layer."""
    free_bits: float = 0.0
    """Nats of each map's KL that training does not charge; the reported bound always does."""
    epochs: int = 200
    """Passes over the training set."""
    batch_size: int = 100
    """Examples in a step, over all ranks."""
    average_epochs: float = 10.0
    """What the average of the parameters looks back on, in epochs."""
    init_examples: int = 500
    """Training examples for the data-dependent initialization."""
    importance_samples: int = 128
    """Draws of z for each example in the final estimate of log p(x)."""
    importance_examples: int | None = None
    """Make that estimate for the first this many test examples only."""
    limit: int | None = None
    """Train on the first this many examples only."""

    PLACE: ClassVar[tuple[str, ...]] = ("data", "parameterization")

    def __post_init__(self) -> None:
        super().__post_init__()
        how, compared = self.parameterization, " or ".join(map(str, COMPARED))
        require(how in COMPARED, "parameterization", how, f"{compared}: the paper compares these")
        for field in ("flow_steps", "latents", "depth", "epochs", "importance_samples"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "1 or more")
        for field in ("batch_size", "init_examples"):
            require(getattr(self, field) >= 2, field, getattr(self, field), "2 or more")
        for field in ("width", "average_epochs"):
            require(getattr(self, field) > 0, field, getattr(self, field), "a positive number")
        require(self.free_bits >= 0, "free_bits", self.free_bits, "0 or more")
        for field, least in (("importance_examples", 1), ("limit", 2)):
            value = getattr(self, field)
            require(value is None or value >= least, field, value, f"{least} or more")


PAPER = Config(preset="paper")
PAPER_CIFAR10 = replace(PAPER, data="cifar10", flow_steps=1, free_bits=0.25)
PRESETS = {
    "paper": PAPER,
    "paper cifar10": PAPER_CIFAR10,
    "cpu": replace(PAPER, preset="cpu", epochs=8, importance_examples=1000),
    "cpu cifar10": replace(
        PAPER_CIFAR10,
        preset="cpu",
        width=0.5,
        depth=1,
        latents=16,
        epochs=10,
        importance_examples=500,
    ),
    "demo": replace(PAPER, preset="demo", data="digits", width=0.5, depth=1, epochs=30),
}
SIZES = {
    "paper": ("MNIST, 16/32/32 maps", "200 epochs", "a GPU, hours"),
    "paper cifar10": ("6 stochastic layers, 64 maps", "200 epochs", "a GPU, days"),
    "cpu": ("MNIST, 16/32/32 maps", "8 epochs", "one core, 43 minutes"),
    "cpu cifar10": ("3 stochastic layers, 32 maps", "10 epochs", "one core, 36 minutes"),
    "demo": ("8/16/16 maps", "embedded digits", "a minute"),
}
LEARNING_RATES = dict.fromkeys(("paper", "cpu", "demo"), dict.fromkeys(COMPARED, 0.002))


def run(config: Config, console: Console | None = None) -> RunRecord:
    """Train and test one auto-encoder; the record is the result."""
    with Run(NAME, config, PRESETS, console) as run:
        if (record := run.finished) is not None:
            return record
        train, test = (x.to(run.device) for x in load(config))

        model = build(config, train.shape[-1]).to(run.device)
        shuffled = torch.randperm(len(train))[: config.init_examples]
        start = observe(train[run.ranks.share(shuffled)], config)
        data_dependent_init(model, start, target_std=model.target_std, group=run.ranks.group)
        network = torch.compile(model) if config.compile else model
        weights = batched_weights(model)

        optimizer = torch.optim.Adamax(model.parameters(), lr=config.learning_rate, foreach=True)
        steps = config.average_epochs * len(train) / config.batch_size
        average = AveragedModel(model, multi_avg_fn=moving_average(steps))
        averaged = cast(VAE, average.module)
        run.restore(model=model, optimizer=optimizer, average=average)

        for _ in run.epochs(config.epochs):
            for rows in run.batches(len(train), config.batch_size):
                with weights:
                    terms = network(observe(train[rows], config))
                optimizer.zero_grad()
                objective(terms, config.free_bits, run).backward()
                run.ranks.sum_gradients(model)
                optimizer.step()
                average.update_parameters(model)
                run.add(negative_elbo=-terms.elbo.sum(), kl=terms.kl.sum(), count=len(rows))

            run.log(
                train_negative_elbo=run.total("negative_elbo") / run.total("count"),
                train_kl=run.total("kl") / run.total("count"),
                **evaluate(averaged, test, config, run),
            )
        keep_pictures(averaged, test, config, run)
        last = {name: x for name, x in run.last.items() if name not in ("epoch", "seconds")}
        return run.finish({**last, **estimate(averaged, test, config, run)})


# — data and model —


def load(config: Config) -> tuple[Tensor, Tensor]:
    """The pixels of the training set, uint8; and the test set as the model sees it, the same in
    every run: (N, C, H, W)."""
    if config.data == "digits":
        raw = digits.load()
        train, test = (F.interpolate(x, scale_factor=2.0) * 255 for x in (raw.train, raw.test))
        train, test = train.round().to(torch.uint8), test.round().to(torch.uint8)
    elif config.data == "mnist":
        raw = mnist.load(config.data_dir)
        train, test = raw.train.unsqueeze(1), raw.test.unsqueeze(1)
    else:
        raw = cifar10.load(config.data_dir)
        train, test = raw.train, raw.test
    return train[: config.limit], observe(test, config, torch.Generator().manual_seed(0))


def observe(pixels: Tensor, config: Config, generator: torch.Generator | None = None) -> Tensor:
    """What the model sees of uint8 pixels: zeros and ones drawn anew; of CIFAR-10, 0 to 255."""
    return pixels.float() if config.data == "cifar10" else mnist.binarize(pixels, generator)


def build(config: Config, side: int) -> VAE:
    """The data's network."""
    network = Cifar10VAE if config.data == "cifar10" else partial(MnistVAE, side=side)
    return network(
        normalize=config.parameterization.normalizes_weights,
        width=config.width,
        depth=config.depth,
        latents=config.latents,
        flow_steps=config.flow_steps if config.posterior == "iaf" else 0,
    )


# — training —


def objective(terms: Terms, free_bits: float, run: Run) -> Tensor:
    """This rank's part of −log p(x|z) + Σ max(λ, KL), up to a constant: what is below λ nats, in
    the mean over the batch of all ranks, is not charged. λ for each stochastic layer and map."""
    kl = terms.kl.sum(0) / run.batch  # (layers, maps)
    if free_bits:
        kl = kl * (run.ranks.sum(kl.detach().clone()) > free_bits)
    return kl.sum() - terms.log_likelihood.sum() / run.batch


def moving_average(steps: float) -> Callable[[Tensors, Tensors, Tensor | int], None]:
    """The average of AveragedModel over about this many steps: decay 1 − 1/steps, and before there
    have been enough of them (1 + n)/(10 + n), so that the start is forgotten.

    Note [averaging v and g]
        Parameters are averaged, and those of a normalized weight are v and g: the averaged weight
        is ḡ·v̄/‖v̄‖, of length |ḡ|, not the average of w.
    """

    @torch.no_grad()
    def update(averaged: Tensors, current: Tensors, count: Tensor | int) -> None:
        rate = min(1.0, max(1 / steps, 9 / (10 + float(count))))
        torch._foreach_lerp_(averaged, current, rate)

    return update


# — testing —


@torch.no_grad()
def evaluate(model: VAE, images: Tensor, config: Config, run: Run) -> dict[str, float]:
    """The true bound on the test set, and the KL of each stochastic layer, from the top down."""
    mine = run.ranks.share(torch.arange(len(images))).split(EVAL_BATCH)
    with folded(model):
        terms = [model(images[rows]) for rows in mine]
    sums = torch.stack([torch.stack([-t.elbo.sum(), *t.kl.sum((0, 2))]) for t in terms])
    bound, *kl = (run.ranks.sum(sums.cpu().double().sum(0)) / len(images)).tolist()
    shown = {"test_negative_elbo": bound}
    if config.data == "cifar10":
        shown["test_bits_per_dim"] = bits_per_dim(bound, images[0].numel())
    return shown | {f"test_kl_{layer}": value for layer, value in enumerate(kl, 1)}


@torch.no_grad()
def estimate(model: VAE, images: Tensor, config: Config, run: Run) -> dict[str, float]:
    """log p(x) by importance sampling, and the bound from the same draws on the same examples."""
    images = images[: config.importance_examples]
    sums = torch.zeros(2, dtype=torch.float64)
    with folded(model):
        for rows in run.ranks.share(torch.arange(len(images))).split(EVAL_BATCH):
            logs = log_importance_weights(model, images[rows], config.importance_samples)
            likelihood = logs.logsumexp(1) - math.log(config.importance_samples)
            sums -= torch.stack([likelihood.sum(), logs.mean(1).sum()]).cpu()
    likelihood_mean, bound = (run.ranks.sum(sums) / len(images)).tolist()
    return {
        "importance_negative_log_likelihood": likelihood_mean,
        "importance_negative_elbo": bound,
    }


@torch.no_grad()
def keep_pictures(model: VAE, images: Tensor, config: Config, run: Run) -> None:
    """Samples, and test images with their reconstructions, for the report."""
    some = images[:PAIRS]
    with folded(model):
        shown = {
            "samples": model.sample(SAMPLES),
            "originals": some / 255 if config.data == "cifar10" else some,
            "reconstructions": model.reconstruct(some),
        }
    run.keep("pictures", **{name: _bytes(x) for name, x in shown.items()})


def _bytes(images: Tensor) -> Tensor:
    """Images from 0 to 1 as uint8: (N, H, W), or in colour (N, H, W, 3)."""
    return (images * 255).round().to(torch.uint8).movedim(1, -1).squeeze(-1)
