"""What the empirical claims are measured on: real images, a small network, a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import data_dependent_init, init_, parameterize, weight_norm
from weightnorm.lab.claims.pool import Crew, Part
from weightnorm.lab.data import cifar10, digits, zca
from weightnorm.lab.data.labelled import Labelled
from weightnorm.lab.errors import RunError
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN

Watch = Callable[[int, nn.Module], None]

WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "standard": partial(parameterize, how="standard"),
    "weight-norm": partial(parameterize, how="weight-norm"),
    "weight-norm-log": partial(weight_norm, scale="log"),
    "batch-norm": partial(parameterize, how="batch-norm"),
    "mean-only-batch-norm": partial(parameterize, how="mean-only-batch-norm"),
    "weight-norm-mean-only": partial(parameterize, how="weight-norm-mean-only"),
}


@dataclass(frozen=True)
class Workbench:
    """Sizes of everything: quick is embedded digits and a small dense network; full is CIFAR-10 and
    an eighth of ConvPool-CNN-C's width."""

    quick: bool = True
    seeds: tuple[int, ...] = (1, 2, 3)
    data_dir: Path | None = None
    runs: Path = Path("runs")
    """Records of the experiments."""
    side: int = 16
    """Of CIFAR-10's images: 32 pixels, or half of it for a quarter of the cost."""
    crew: Crew = field(default_factory=Crew, compare=False, repr=False)

    def each(self, measure: Callable[..., Any], parts: Iterable[Part]) -> list[Any]:
        """measure(bench, *part) of every part, in order; see `Crew`."""
        return self.crew.each(self, measure, parts)

    def alone(self) -> Workbench:
        """The same without data and without a crew."""
        return replace(self, crew=Crew())

    @cached_property
    def at_full_size(self) -> Workbench:
        """The same with CIFAR-10's images as they are."""
        return replace(self, side=32)

    @cached_property
    def data(self) -> Labelled:
        if self.quick:
            raw = digits.load()
            images = raw.train.float()
            mean, std = images.mean(), images.std()
            train, test = ((x.float() - mean) / std for x in (raw.train, raw.test))
            return Labelled(train, raw.train_labels, test, raw.test_labels, raw.label_names)
        raw = cifar10.load(self.data_dir)
        factor = raw.train.shape[-1] // self.side
        train, test = (shrunk(x, factor) for x in (raw.train, raw.test))
        whitening = zca.fit_once(train)
        return Labelled(
            zca.apply(whitening, train[:10_000]),
            raw.train_labels[:10_000],
            zca.apply(whitening, test[:2_000]),
            raw.test_labels[:2_000],
            raw.label_names,
        )

    def network(self, how: str, seed: int, *, noise: bool = False, width: float = 1 / 8) -> Any:
        """Initialized on data, in training mode; the same weights for every way and one seed.

        Without noise and dropout, which hide more than they help in runs this short."""
        torch.manual_seed(seed)
        wrap = WRAPS[how]
        model: nn.Module
        if self.quick:
            model = dense(wrap, inputs=self.data.train[0].numel())
        else:
            std, p = (0.15, 0.5) if noise else (0.0, 0.0)
            model = ConvPoolCNN(wrap, width=width, noise=std, dropout=p)
        data_dependent_init(model, self.init_images(seed))
        return model

    def init_images(self, seed: int) -> Tensor:
        """The 500 images that a network of this seed is initialized on."""
        return self.data.train[self._order(seed)[:500]]

    def other_images(self, seed: int) -> Tensor:
        """500 others."""
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
        watch: Watch | None = None,
        may_break: bool = False,
    ) -> list[float]:
        """The loss at every step. The same seed gives the same batches.

        Stops at a loss that is not finite; unless it may break, that is an error: nothing can be
        said about a network that was lost."""
        order = torch.Generator().manual_seed(seed)
        losses: list[float] = []
        for step in range(steps):
            rows = torch.randint(len(self.data.train), (batch,), generator=order)
            loss = self.loss(model, rows)
            if not loss.isfinite():
                if may_break:
                    break
                raise RunError(f"the network to be measured broke at step {step} of {steps}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if watch is not None:
                watch(step, model)
        return losses

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        dtype = next(model.parameters()).dtype
        return F.cross_entropy(model(self.data.train[rows].to(dtype)), self.data.train_labels[rows])

    @torch.no_grad()
    def test_error(self, model: nn.Module) -> float:
        model.eval()
        wrong = [
            (model(x).argmax(1) != y).double()
            for x, y in zip(
                self.data.test.split(500), self.data.test_labels.split(500), strict=True
            )
        ]
        model.train()
        return torch.cat(wrong).mean().item()


def shrunk(images: Tensor, factor: int) -> Tensor:
    """Every factor × factor pixels as their mean; uint8."""
    if factor == 1:
        return images
    parts = [F.avg_pool2d(x.float(), factor).round().byte() for x in images.split(5000)]
    return torch.cat(parts)


def dense(wrap: Callable[[nn.Module], nn.Module], inputs: int, width: int = 48) -> nn.Sequential:
    """Three hidden layers, leaky ReLU."""

    def layer(n: int, m: int) -> nn.Module:
        return wrap(init_(nn.Linear(n, m), partial(nn.init.normal_, std=0.05)))

    hidden = [
        module for n in (inputs, width, width) for module in (layer(n, width), nn.LeakyReLU(0.1))
    ]
    return nn.Sequential(nn.Flatten(), *hidden, layer(width, 10))
