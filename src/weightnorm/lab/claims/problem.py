"""Data, networks and the training loop that the empirical claims share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import data_dependent_init, init_, parameterize, weight_norm
from weightnorm.lab.classify import ConvPoolCNN
from weightnorm.lab.data import (
    Labelled,
    apply_zca,
    fit_zca_once,
    load_cifar10,
    load_digits,
    load_mnist,
)
from weightnorm.lab.errors import RunError

DataName = Literal["digits", "mnist", "cifar10", "cifar10 at 16×16"]
AfterStep = Callable[[int, nn.Module], None]
INIT_EXAMPLES = 500

WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "standard": partial(parameterize, how="standard"),
    "weight-norm": partial(parameterize, how="weight-norm"),
    "weight-norm-log": partial(weight_norm, scale="log"),
    "batch-norm": partial(parameterize, how="batch-norm"),
    "mean-only-batch-norm": partial(parameterize, how="mean-only-batch-norm"),
    "weight-norm-mean-only": partial(parameterize, how="weight-norm-mean-only"),
}


@dataclass(frozen=True)
class Problem:
    """A data set and a network for it: ConvPool-CNN-C at an eighth of its width for 10,000 images
    of CIFAR-10, without noise and dropout, which blur short runs; else three dense hidden layers.
    """

    data_name: DataName
    data_dir: Path | None = None

    @property
    def data(self) -> Labelled:
        return load(self.data_name, self.data_dir)

    def network(self, how: str, seed: int, *, width: int | None = None, init: bool = True) -> Any:
        """A network in training mode after data-dependent initialization.

        For one seed, all parameterizations compute the same function.

        Args:
            width: units in each hidden layer of a dense network.
            init: False for v and b as they are drawn, with g = ‖v‖ and b = 0.
        """
        torch.manual_seed(seed)
        wrap, model = WRAPS[how], nn.Sequential()
        if self.data_name.startswith("cifar10"):
            model = ConvPoolCNN(wrap, width=1 / 8, noise=0.0, dropout=0.0)
        else:
            width = width or (48 if self.data_name == "digits" else 256)
            model = dense(wrap, self.data.train[0].numel(), width)
        if init:
            data_dependent_init(model, self.init_images(seed))
        return model

    def init_images(self, seed: int) -> Tensor:
        """The images on which networks of this seed are initialized."""
        return self.data.train[self._order(seed)[:INIT_EXAMPLES]]

    def other_images(self, seed: int) -> Tensor:
        """As many images that are not among `init_images`."""
        return self.data.train[self._order(seed)[INIT_EXAMPLES : 2 * INIT_EXAMPLES]]

    def _order(self, seed: int) -> Tensor:
        return torch.randperm(len(self.data.train), generator=torch.Generator().manual_seed(seed))

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int,
        batch: int,
        seed: int,
        after_step: AfterStep | None = None,
        may_diverge: bool = False,
    ) -> list[float]:
        """Train and return the loss at every step. The same seed gives the same batches, each
        example once per epoch.

        Stops at a loss that is not finite, and raises RunError unless `may_diverge`."""
        losses: list[float] = []
        for step, rows in enumerate(islice(self._batches(batch, seed), steps)):
            loss = self.loss(model, rows)
            if not loss.isfinite():
                if may_diverge:
                    break
                raise RunError(f"training diverged at step {step} of {steps}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if after_step is not None:
                after_step(step, model)
        return losses

    def _batches(self, batch: int, seed: int) -> Iterator[Tensor]:
        generator, n = torch.Generator().manual_seed(seed), len(self.data.train)
        while True:
            yield from torch.randperm(n, generator=generator)[: n // batch * batch].split(batch)

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Cross-entropy on some rows of the training data."""
        dtype = next(model.parameters()).dtype
        return F.cross_entropy(model(self.data.train[rows].to(dtype)), self.data.train_labels[rows])

    @torch.no_grad()
    def test_error(self, model: nn.Module) -> float:
        """Share of the test images that are misclassified."""
        model.eval()
        pairs = zip(self.data.test.split(500), self.data.test_labels.split(500), strict=True)
        wrong = [(model(x).argmax(1) != y).double() for x, y in pairs]
        model.train()
        return torch.cat(wrong).mean().item()


@cache
def load(data: DataName, folder: Path | None) -> Labelled:
    """Digits or MNIST, standardized, or ZCA-whitened images of CIFAR-10."""
    if not data.startswith("cifar10"):
        raw = load_digits() if data == "digits" else load_mnist(folder)
        images = raw.train.float()
        mean, std = images.mean(), images.std()
        train, test = ((x.float() - mean) / std for x in (raw.train, raw.test))
        return Labelled(train, raw.train_labels, test, raw.test_labels, raw.label_names)
    raw = load_cifar10(folder)
    halved = data == "cifar10 at 16×16"
    train, test = (downsampled(x) if halved else x for x in (raw.train, raw.test))
    whitening = fit_zca_once(train)
    return Labelled(
        apply_zca(whitening, train[:10_000]),
        raw.train_labels[:10_000],
        apply_zca(whitening, test[:2_000]),
        raw.test_labels[:2_000],
        raw.label_names,
    )


def downsampled(images: Tensor) -> Tensor:
    """Average every 2×2 pixels; uint8."""
    parts = [F.avg_pool2d(x.float(), 2).round().byte() for x in images.split(5000)]
    return torch.cat(parts)


def dense(wrap: Callable[[nn.Module], nn.Module], inputs: int, width: int) -> nn.Sequential:
    """A dense network with three hidden layers and leaky ReLU."""

    def layer(n: int, m: int) -> nn.Module:
        return wrap(init_(nn.Linear(n, m), partial(nn.init.normal_, std=0.05)))

    hidden = [
        module for n in (inputs, width, width) for module in (layer(n, width), nn.LeakyReLU(0.1))
    ]
    return nn.Sequential(nn.Flatten(), *hidden, layer(width, 10))
