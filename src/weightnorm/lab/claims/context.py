"""Data, networks and the training loop that the empirical claims share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import data_dependent_init, init_, parameterize, weight_norm
from weightnorm.lab.claims.parts import Part, PartRunner
from weightnorm.lab.classify import ConvPoolCNN
from weightnorm.lab.data import cifar10, digits, mnist, zca
from weightnorm.lab.data.labelled import Labelled
from weightnorm.lab.errors import RunError

AfterStep = Callable[[int, nn.Module], None]

WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "standard": partial(parameterize, how="standard"),
    "weight-norm": partial(parameterize, how="weight-norm"),
    "weight-norm-log": partial(weight_norm, scale="log"),
    "batch-norm": partial(parameterize, how="batch-norm"),
    "mean-only-batch-norm": partial(parameterize, how="mean-only-batch-norm"),
    "weight-norm-mean-only": partial(parameterize, how="weight-norm-mean-only"),
}


@dataclass(frozen=True)
class Context:
    """Settings and data of a measurement.

    quick: scikit-learn's digits and a small dense network; full: CIFAR-10 and ConvPool-CNN-C at an
    eighth of its width; long: MNIST and a dense network with 256 units per layer; quick and long:
    the long measurement on digits, to see that it works.
    """

    quick: bool = True
    long: bool = False
    seeds: tuple[int, ...] = (1, 2, 3)
    data_dir: Path | None = None
    runs: Path = Path("runs")
    """Folder to which the record is written."""
    experiment_records: Path | None = None
    """Folder of the experiments' records; by default `runs`."""
    side: int = 16
    """Height and width of CIFAR-10's images: 32, or 16 for a quarter of the cost."""
    parts: PartRunner = field(default_factory=PartRunner, compare=False, repr=False)

    @property
    def records(self) -> Path:
        """Folder of the experiments' records."""
        return self.experiment_records or self.runs

    @property
    def preset(self) -> str:
        """Name of the measurement's size, and of its folder."""
        if self.long:
            return "long-quick" if self.quick else "long"
        return "quick" if self.quick else "full"

    def map(self, function: Callable[..., Any], parts: Iterable[Part]) -> list[Any]:
        """Return ``function(context, *part)`` for every part; see `PartRunner`."""
        return self.parts.map(self, function, parts)

    def detached(self) -> Context:
        """A copy without cached data and worker processes, to be sent to a process."""
        return replace(self, parts=PartRunner())

    @cached_property
    def at_full_size(self) -> Context:
        """A copy with CIFAR-10's images at 32×32."""
        return replace(self, side=32)

    @cached_property
    def data(self) -> Labelled:
        """Digits or MNIST, standardized, or 10,000 ZCA-whitened images of CIFAR-10."""
        if self.quick or self.long:
            raw = digits.load() if self.quick else mnist.load(self.data_dir)
            images = raw.train.float()
            mean, std = images.mean(), images.std()
            train, test = ((x.float() - mean) / std for x in (raw.train, raw.test))
            return Labelled(train, raw.train_labels, test, raw.test_labels, raw.label_names)
        raw = cifar10.load(self.data_dir)
        factor = raw.train.shape[-1] // self.side
        train, test = (downsampled(x, factor) for x in (raw.train, raw.test))
        whitening = zca.fit_once(train)
        return Labelled(
            zca.apply(whitening, train[:10_000]),
            raw.train_labels[:10_000],
            zca.apply(whitening, test[:2_000]),
            raw.test_labels[:2_000],
            raw.label_names,
        )

    def network(self, how: str, seed: int, *, noise: bool = False, width: float = 1 / 8) -> Any:
        """A network in training mode after data-dependent initialization.

        For one seed, all parameterizations compute the same function. By default without input
        noise and dropout, which blur short runs."""
        torch.manual_seed(seed)
        wrap = WRAPS[how]
        model: nn.Module
        if self.quick or self.long:
            inputs = self.data.train[0].numel()
            model = dense(wrap, inputs, width=48 if self.quick else 256)
        else:
            std, p = (0.15, 0.5) if noise else (0.0, 0.0)
            model = ConvPoolCNN(wrap, width=width, noise=std, dropout=p)
        data_dependent_init(model, self.init_images(seed))
        return model

    def init_images(self, seed: int) -> Tensor:
        """The 500 images on which networks of this seed are initialized."""
        return self.data.train[self._order(seed)[:500]]

    def other_images(self, seed: int) -> Tensor:
        """500 images that are not among `init_images`."""
        return self.data.train[self._order(seed)[500:1000]]

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
        epochs: bool = False,
    ) -> list[float]:
        """Train and return the loss at every step. The same seed gives the same batches: drawn with
        replacement, or with `epochs` each example once per epoch.

        Stops at a loss that is not finite, and raises RunError unless `may_diverge`."""
        losses: list[float] = []
        for step, rows in enumerate(islice(self._batches(batch, seed, epochs), steps)):
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

    def _batches(self, batch: int, seed: int, epochs: bool) -> Iterator[Tensor]:
        generator, n = torch.Generator().manual_seed(seed), len(self.data.train)
        while True:
            if epochs:
                yield from torch.randperm(n, generator=generator)[: n // batch * batch].split(batch)
            else:
                yield torch.randint(n, (batch,), generator=generator)

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Cross-entropy on some rows of the training data."""
        dtype = next(model.parameters()).dtype
        return F.cross_entropy(model(self.data.train[rows].to(dtype)), self.data.train_labels[rows])

    @torch.no_grad()
    def test_error(self, model: nn.Module) -> float:
        """Share of the test images that are misclassified."""
        model.eval()
        wrong = [
            (model(x).argmax(1) != y).double()
            for x, y in zip(
                self.data.test.split(500), self.data.test_labels.split(500), strict=True
            )
        ]
        model.train()
        return torch.cat(wrong).mean().item()


def downsampled(images: Tensor, factor: int) -> Tensor:
    """Average every factor × factor pixels; uint8."""
    if factor == 1:
        return images
    parts = [F.avg_pool2d(x.float(), factor).round().byte() for x in images.split(5000)]
    return torch.cat(parts)


def dense(wrap: Callable[[nn.Module], nn.Module], inputs: int, width: int) -> nn.Sequential:
    """A dense network with three hidden layers and leaky ReLU."""

    def layer(n: int, m: int) -> nn.Module:
        return wrap(init_(nn.Linear(n, m), partial(nn.init.normal_, std=0.05)))

    hidden = [
        module for n in (inputs, width, width) for module in (layer(n, width), nn.LeakyReLU(0.1))
    ]
    return nn.Sequential(nn.Flatten(), *hidden, layer(width, 10))
