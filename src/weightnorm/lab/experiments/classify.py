"""Experiment 1: CIFAR-10 classification with five parameterizations (section 5.1).

ZCA-whitened CIFAR-10, no augmentation; ConvPool-CNN-C; Adam with a flat learning rate for the first
half and a linear descent to 0 in the second, where momentum goes from 0.9 to 0.5. See
docs/experiments/classify.md for the deviations from the paper and what came out.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from weightnorm import Parameterization, data_dependent_init, folded, parameterize
from weightnorm.diagnostics import effective_step, weight_norms
from weightnorm.lab.data import cifar10, digits, zca
from weightnorm.lab.data.labelled import Labelled
from weightnorm.lab.errors import require
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN
from weightnorm.lab.runs.config import RunConfig
from weightnorm.lab.runs.records import RunRecord
from weightnorm.lab.runs.run import Run

NAME = "classify"
TITLE = "CIFAR-10 classification with five parameterizations (section 5.1)"
METRIC = "train_error"
"""Decides which learning rate is best, lower being better: the test set has no say in it."""
EVAL_BATCH = 500


@dataclass(frozen=True)
class Config(RunConfig):
    """CIFAR-10 classification: the paper's network, trained in one of five parameterizations."""

    data: Literal["cifar10", "digits"] = "cifar10"
    """CIFAR-10, or scikit-learn's embedded digits at twice their size."""
    epochs: int = 200
    """Passes over the training set; the learning rate falls during the second half."""
    batch_size: int = 100
    """Examples in a step, over all ranks."""
    width: float = 1.0
    """Factor on the network's 96 and 192 channels."""
    noise: float = 0.15
    """Standard deviation of the Gaussian noise on the input."""
    dropout: float = 0.5
    """Dropout probability after each pooling."""
    init_examples: int = 500
    """Training examples for the data-dependent initialization."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type the network computes in; parameters stay float32."""
    limit: int | None = None
    """Train on the first this many examples only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.epochs >= 1, "epochs", self.epochs, "1 or more")
        require(self.batch_size >= 2, "batch_size", self.batch_size, "2 or more")
        require(self.width > 0, "width", self.width, "a positive number")
        require(self.noise >= 0, "noise", self.noise, "0 or more")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "at least 0 and below 1")
        require(self.init_examples >= 2, "init_examples", self.init_examples, "2 or more")
        require(self.limit is None or self.limit >= 2, "limit", self.limit, "2 or more")


PAPER = Config(preset="paper")
PRESETS = {
    "paper": PAPER,
    "cpu": replace(PAPER, preset="cpu", width=0.25, epochs=16),
    "demo": replace(PAPER, preset="demo", data="digits", width=0.125, epochs=30),
}
SIZES = {
    "paper": ("96/192 channels", "200 epochs", "a GPU, hours"),
    "cpu": ("24/48 channels", "16 epochs", "two cores, 25 minutes"),
    "demo": ("12/24 channels", "embedded digits", "seconds"),
}
ALIKE = dict.fromkeys(Parameterization, 0.003)
PAPERS_CHOICE = ALIKE | {Parameterization.STANDARD: 0.0003}
"""From its grid {0.0003, 0.001, 0.003, 0.01}."""
LEARNING_RATES = {"paper": PAPERS_CHOICE, "cpu": PAPERS_CHOICE, "demo": ALIKE}
"""On the digits 0.003 is best for the standard parameterization too."""


def run(config: Config, console: Console | None = None, data: Labelled | None = None) -> RunRecord:
    """Train and test one network; the record is the result. Other data than the config's may be
    given: a benchmark has no use for real images."""
    with Run(NAME, config, PRESETS, console) as run:
        if (record := run.finished) is not None:
            return record
        how, alone = config.parameterization, run.ranks.world == 1 or run.device.type == "cuda"
        expected = "any other on several CPUs: torch synchronizes batch norm on GPUs only"
        require(how is not Parameterization.BATCH_NORM or alone, "parameterization", how, expected)
        data = load(config) if data is None else data
        train, test = (x.to(run.device) for x in (data.train, data.test))
        labels, test_labels = data.train_labels.to(run.device), data.test_labels.to(run.device)

        wrap = partial(parameterize, how=config.parameterization, group=run.ranks.group)
        model: nn.Module = ConvPoolCNN(
            wrap,
            width=config.width,
            channels=train.shape[1],
            noise=config.noise,
            dropout=config.dropout,
        )
        model = model.to(run.device).to(memory_format=torch.channels_last)  # type: ignore
        shuffled = torch.randperm(len(train))[: config.init_examples]
        data_dependent_init(model, train[run.ranks.share(shuffled)], group=run.ranks.group)
        network = torch.compile(model) if config.compile else model

        optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
        scaler = torch.amp.GradScaler(run.device.type, enabled=config.precision == "float16")
        run.restore(model=model, optimizer=optimizer, scaler=scaler)

        for epoch in run.epochs(config.epochs):
            set_schedule(optimizer, config, epoch)
            model.train()
            for rows in run.batches(len(train), config.batch_size):
                x, y = train[rows], labels[rows]
                with precision(config, run.device):
                    logits = network(x.contiguous(memory_format=torch.channels_last))
                    loss = F.cross_entropy(logits.float(), y, reduction="sum") / run.batch
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                run.ranks.sum_gradients(model)
                scaler.step(optimizer)
                scaler.update()
                with torch.no_grad():
                    wrong = (logits.argmax(1) != y).sum()
                    run.add(loss=loss * run.batch, error=wrong, count=len(rows))

            test_loss, test_error = evaluate(model, test, test_labels, config, run)
            run.log(
                train_loss=run.total("loss") / run.total("count"),
                train_error=run.total("error") / run.total("count"),
                test_loss=test_loss,
                test_error=test_error,
                learning_rate=optimizer.param_groups[0]["lr"],
                **lengths(model),
            )
        last = run.last
        return run.finish({k: last[k] for k in ("train_error", "test_error", "test_loss")})


def load(config: Config) -> Labelled:
    """The images, whitened."""
    if config.data == "cifar10":
        return cifar10.load_whitened(config.data_dir, limit=config.limit)
    raw = digits.load()
    train, test = ((x * 255).round().to(torch.uint8) for x in (raw.train, raw.test))
    whiten = partial(zca.apply, zca.fit(train))
    large = partial(F.interpolate, scale_factor=2.0)  # the network halves its input twice
    return replace(raw, train=large(whiten(train))[: config.limit], test=large(whiten(test)))


def set_schedule(optimizer: torch.optim.Optimizer, config: Config, epoch: int) -> None:
    """Flat, then linear to 0; momentum 0.9, then 0.5. The halves are the paper's 100 epochs."""
    half = config.epochs / 2
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * min(2 - epoch / half, 1)
        group["betas"] = (0.9 if epoch < half else 0.5, 0.999)


def precision(config: Config, device: torch.device) -> Any:
    """Autocast to the config's type, if it is not the parameters' own."""
    if config.precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, config.precision))


@torch.no_grad()
def evaluate(
    model: nn.Module, images: Tensor, labels: Tensor, config: Config, run: Run
) -> tuple[float, float]:
    """Mean loss and error on the test set, with running statistics; each rank takes its share."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    mine = run.ranks.share(torch.arange(len(images)))
    with folded(model), precision(config, run.device):
        for rows in mine.split(EVAL_BATCH):
            x = images[rows].contiguous(memory_format=torch.channels_last)
            logits, y = model(x).float(), labels[rows]
            loss = F.cross_entropy(logits, y, reduction="sum")
            wrong = (logits.argmax(1) != y).sum()
            sums += torch.stack([loss.double(), wrong.double()]).cpu()
    loss_sum, errors = run.ranks.sum(sums, "the errors on the test set").tolist()
    return loss_sum / len(images), errors / len(images)


def lengths(model: nn.Module) -> dict[str, float]:
    """Mean ‖v‖ and effective step g/‖v‖ over all units, where weights are normalized."""
    norms, steps = weight_norms(model), effective_step(model)
    if not norms:
        return {}
    return {
        "v_norm": torch.cat([*norms.values()]).mean().item(),
        "effective_step": torch.cat([*steps.values()]).mean().item(),
    }
