"""Experiment 2: a convolutional VAE with inverse autoregressive flow (section 5.2).

On MNIST, binarized at random for every batch, and on CIFAR-10. Adamax with learning rate 0.002; the
evaluated parameters are a moving average over about ten epochs. The standard parameterization and
weight normalization start from the same data-dependent initialization.

Not in the paper, but in the authors' code for inverse autoregressive flow: residual branches, m and
s scaled by 0.1, ELU, free bits of 0.25 on CIFAR-10, and the sizes that `vae_networks` names.
Initialization on 500 examples and batches of 100 are those of section 5.1. Other deviations and the
results: docs/experiments/vae.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from weightnorm import Parameterization, data_dependent_init, folded
from weightnorm._torch_private import foreach_lerp_
from weightnorm.lab.config import (
    Count,
    Limit,
    Nonnegative,
    Positive,
    Range,
    RunConfig,
    Several,
    Size,
)
from weightnorm.lab.data import binarize, load_cifar10, load_digits, load_mnist
from weightnorm.lab.records import RunRecord
from weightnorm.lab.run import Run
from weightnorm.lab.vae_networks import VAE, Cifar10VAE, ElboTerms, MnistVAE

Tensors = tuple[Tensor, ...] | list[Tensor]

NAME = "vae"
TITLE = "convolutional VAE with inverse autoregressive flow (section 5.2)"
METRIC = "train_negative_elbo"
"""Selects the best learning rate of a sweep, lower is better. Test bounds are not used for that."""
RESULTS = (
    "train_negative_elbo",
    "train_kl",
    "test_negative_elbo",
    "importance_negative_log_likelihood",
    "importance_negative_elbo",
)
"""Metrics of every result: those that `sweep --metric` accepts."""
EVAL_BATCH = 500
SAMPLES, RECONSTRUCTIONS = 40, 16
"""Images stored for the report."""


@dataclass(frozen=True)
class Config(RunConfig):
    """Train a convolutional VAE."""

    parameterization: Parameterization = Parameterization.WEIGHT_NORM
    """Only standard and weight-norm apply to this model."""
    learning_rate: Positive = 0.002
    """Adamax's learning rate, the same for both parameterizations (section 5.2)."""
    data: Literal["mnist", "cifar10", "digits"] = "mnist"
    """MNIST, CIFAR-10, or scikit-learn's embedded digits, enlarged to 16×16. It selects the network
    too, and CIFAR-10 has its own settings in each preset."""
    posterior: Literal["iaf", "diagonal"] = "iaf"
    """Inverse autoregressive flow (section 5.2), or a diagonal Gaussian."""
    flow_steps: Annotated[int, Range(1, 1000)] = 2
    """Steps of the inverse autoregressive flow; on CIFAR-10 1, as in the authors' code."""
    latents: Size = 32
    """Dimension of z; on CIFAR-10, channels of each stochastic layer. The authors' code; the paper
    does not give it."""
    width: Annotated[float, Range(0.05, 64)] = 1.0
    """Multiplier of the network's channels and units (section 5.2)."""
    depth: Annotated[int, Range(1, 1000)] = 2
    """Residual blocks at each resolution (section 5.2); on CIFAR-10 each has a stochastic layer."""
    free_bits: Nonnegative = 0.0
    """KL per channel, in nats, that the training loss ignores; the reported bound includes it. 0.25
    on CIFAR-10 is the default of the authors' code."""
    epochs: Count = 200
    """Passes over the training set; the paper gives no number."""
    batch_size: Several = 100
    """Examples per step, over all ranks; the paper gives no number."""
    average_epochs: Positive = 10.0
    """Time constant of the moving average of the parameters, in epochs (section 5.2)."""
    init_examples: Several = 500
    """Training examples for the data-dependent initialization, as in section 5.1."""
    importance_samples: Count = 128
    """Importance samples per example in the final estimate of log p(x)."""
    importance_examples: Count | None = None
    """Estimate log p(x) on only this many test examples."""
    limit: Limit | None = None
    """Train on only this many examples, from the start of the training set."""

    FOLDER_FIELDS: ClassVar[tuple[str, ...]] = ("data", "parameterization")
    COMPARED: ClassVar = (Parameterization.STANDARD, Parameterization.WEIGHT_NORM)


PAPER = Config(about="MNIST, 16/32/32 maps, 200 epochs, a GPU, hours")
PAPER_CIFAR10 = replace(
    PAPER,
    about="6 stochastic layers, 64 maps, 200 epochs, a GPU, days",
    data="cifar10",
    flow_steps=1,
    free_bits=0.25,
)
PRESETS = {
    "paper": PAPER,
    "paper cifar10": PAPER_CIFAR10,
    "cpu": replace(
        PAPER,
        preset="cpu",
        about="MNIST, 16/32/32 maps, 8 epochs, one core, 43 minutes",
        epochs=8,
        importance_examples=1000,
    ),
    "cpu cifar10": replace(
        PAPER_CIFAR10,
        preset="cpu",
        about="3 stochastic layers, 32 maps, 10 epochs, one core, 36 minutes",
        width=0.5,
        depth=1,
        latents=16,
        epochs=10,
        importance_examples=500,
    ),
    "demo": replace(
        PAPER,
        preset="demo",
        about="8/16/16 maps, embedded digits, a minute",
        data="digits",
        width=0.5,
        depth=1,
        epochs=30,
    ),
}


# — training —


def run(config: Config, console: Console | None = None) -> RunRecord:
    """Train and evaluate one auto-encoder, and return its record."""
    with Run(NAME, config, PRESETS, console, RESULTS) as run:
        if (record := run.finished) is not None:
            return record
        train, test = (x.to(run.device) for x in load(config))

        model = build(config, train.shape[-1]).to(run.device)
        examples = to_input(run.initial_examples(train, config.init_examples), config)
        report = data_dependent_init(
            model, examples, target_std=model.target_std, group=run.ranks.group
        )
        run.record_initialization(report)
        network = torch.compile(model) if config.compile else model

        optimizer = torch.optim.Adamax(model.parameters(), lr=config.rate, foreach=True)
        steps = config.average_epochs * len(train) / config.batch_size
        average = AveragedModel(model, multi_avg_fn=moving_average(steps))
        averaged = cast(VAE, average.module)
        run.restore(model=model, optimizer=optimizer, average=average)

        for _ in run.epochs(config.epochs):
            for rows in run.batches(len(train), config.batch_size):
                terms = network(to_input(train[rows], config))
                optimizer.zero_grad()
                objective(terms, config.free_bits, run).backward()
                run.ranks.sum_gradients(model)
                optimizer.step()
                average.update_parameters(model)
                run.add(negative_elbo=-terms.elbo.sum(), kl=terms.kl.sum(), count=len(rows))

            run.log(
                train_negative_elbo=run.mean("negative_elbo"),
                train_kl=run.mean("kl"),
                **evaluate(averaged, test, config, run),
            )
        store_images(averaged, test, config, run)
        last = {name: x for name, x in run.last.items() if name not in ("epoch", "seconds")}
        return run.finish({**last, **estimate(averaged, test, config, run)})


def load(config: Config) -> tuple[Tensor, Tensor]:
    """Load the training set as uint8 pixels, and the test set as input of the model, the same in
    every run: (N, C, H, W)."""
    if config.data == "digits":
        raw = load_digits()
        train, test = (F.interpolate(x, scale_factor=2.0) for x in (raw.train, raw.test))
    elif config.data == "mnist":
        raw = load_mnist(config.data_dir)
        train, test = raw.train.unsqueeze(1), raw.test.unsqueeze(1)
    else:
        raw = load_cifar10(config.data_dir)
        train, test = raw.train, raw.test
    return train[: config.limit], to_input(test, config, torch.Generator().manual_seed(0))


def to_input(pixels: Tensor, config: Config, generator: torch.Generator | None = None) -> Tensor:
    """Convert uint8 pixels to the model's input: sampled zeros and ones; on CIFAR-10, 0 to 255."""
    return pixels.float() if config.data == "cifar10" else binarize(pixels, generator)


def build(config: Config, side: int) -> VAE:
    """Build the network for the config's data set."""
    network = Cifar10VAE if config.data == "cifar10" else partial(MnistVAE, side=side)
    return network(
        normalize=config.parameterization.normalizes_weights,
        width=config.width,
        depth=config.depth,
        latents=config.latents,
        flow_steps=config.flow_steps if config.posterior == "iaf" else 0,
    )


def objective(terms: ElboTerms, free_bits: float, run: Run) -> Tensor:
    """Return this rank's part of −log p(x|z) + Σ max(λ, KL), up to a constant.

    The sum is over stochastic layers and channels; KL is the mean over the batch of all ranks. A
    channel below λ = `free_bits` nats has no gradient.
    """
    kl = terms.kl.sum(0) / run.batch  # (layers, channels)
    if free_bits:
        kl = kl * (run.ranks.sum(kl.detach().clone()) > free_bits)
    return kl.sum() - terms.log_likelihood.sum() / run.batch


def moving_average(steps: float) -> Callable[[Tensors, Tensors, Tensor | int], None]:
    """Return an update of AveragedModel: a moving average over about `steps` steps.

    The decay is 1 − 1/steps, but at most (1 + n)/(10 + n) after n steps, so that the initial
    parameters soon have no weight.

    Note [averaging v and g]
        The parameters of a normalized weight are v and g, so the averaged weight is ḡ·v̄/‖v̄‖ with
        norm |ḡ|, not the average of w.
    """

    @torch.no_grad()
    def update(averaged: Tensors, current: Tensors, count: Tensor | int) -> None:
        # A tensor on the parameters' device: reading it would wait for the device at every step.
        n = torch.as_tensor(count)
        rate = (torch.full_like(n, 9, dtype=torch.float32) / (10 + n)).clamp(1 / steps, 1.0)
        foreach_lerp_(averaged, current, [rate.to(p.dtype).expand_as(p) for p in averaged])

    return update


# — evaluation —


def evaluate(model: VAE, images: Tensor, config: Config, run: Run) -> dict[str, float]:
    """Return −ELBO on the test set, and the KL of each stochastic layer, from the top down."""

    def sums(x: Tensor) -> Tensor:
        terms: ElboTerms = model(x)
        return torch.stack([-terms.elbo.sum(), *terms.kl.sum((0, 2))])

    with folded(model):
        bound, *kl = run.evaluate(sums, EVAL_BATCH, images)
    metrics = {"test_negative_elbo": bound}
    if config.data == "cifar10":
        metrics["test_bits_per_dim"] = bound / (images[0].numel() * math.log(2))
    return metrics | {f"test_kl_{layer}": value for layer, value in enumerate(kl, 1)}


def estimate(model: VAE, images: Tensor, config: Config, run: Run) -> dict[str, float]:
    """Estimate −log p(x) by importance sampling, and −ELBO from the same samples."""

    def sums(x: Tensor) -> Tensor:
        each = partial(run.parts, name=f"importance samples for {len(x)} images")
        logs = log_importance_weights(model, x, config.importance_samples, each=each)
        likelihood = logs.logsumexp(1) - math.log(config.importance_samples)
        return -torch.stack([likelihood.sum(), logs.mean(1).sum()])

    with folded(model):
        names = "importance_negative_log_likelihood", "importance_negative_elbo"
        means = run.evaluate(sums, EVAL_BATCH, images[: config.importance_examples])
    return dict(zip(names, means, strict=True))


def log_importance_weights(
    model: VAE,
    x: Tensor,
    samples: int,
    max_rows: int = 500,
    each: Callable[[range], Iterable[int]] = iter,
) -> Tensor:
    """Return log p(x|z)p(z)/q(z|x) at `samples` samples of z per example: (B, samples).

    Their mean is the bound; their log-mean-exp converges to log p(x). Encodes once, and decodes
    about `max_rows` rows at a time, so memory does not grow with the samples. `each` iterates over
    the parts, for instance with a progress bar.
    """
    code = model.encode(x)
    per_chunk = max(1, max_rows // max(len(x), 1))
    chunks = []
    for start in each(range(0, samples, per_chunk)):
        times = min(per_chunk, samples - start)
        output, kl = model.decode(tuple(repeated(part, times) for part in code), at_sample=True)
        terms = ElboTerms(model.log_likelihood(repeated(x, times), output), kl)
        chunks.append(terms.elbo.view(len(x), times))
    return torch.cat(chunks, dim=1)


def repeated(x: Tensor, times: int) -> Tensor:
    """Repeat each example `times` times in a row."""
    return x.repeat_interleave(times, dim=0)


@torch.no_grad()
def store_images(model: VAE, images: Tensor, config: Config, run: Run) -> None:
    """Store samples, and test images with their reconstructions, for the report."""
    originals = images[:RECONSTRUCTIONS]
    with folded(model):
        stored = {
            "samples": model.image(model.generate(SAMPLES)),
            "originals": originals / 255 if config.data == "cifar10" else originals,
            "reconstructions": model.image(model.decode(model.encode(originals))[0]),
        }
    run.save_arrays("pictures", **{name: _to_uint8(x) for name, x in stored.items()})


def _to_uint8(images: Tensor) -> Tensor:
    """Convert images from [0, 1] to uint8: (N, H, W), or in colour (N, H, W, 3)."""
    return (images * 255).round().to(torch.uint8).movedim(1, -1).squeeze(-1)
