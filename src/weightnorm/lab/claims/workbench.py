"""What the empirical claims are measured on: real images, a small network, a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import data_dependent_init, init_, parameterize, weight_norm
from weightnorm.lab.data import cifar10, digits
from weightnorm.lab.data.labelled import Labelled
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
    """Sizes of everything: quick is embedded digits and a small dense network, full is CIFAR-10 and
    a narrow ConvPool-CNN-C."""

    quick: bool = True
    seeds: tuple[int, ...] = (1, 2, 3)
    data_dir: Path | None = None
    runs: Path = Path("runs")
    """Records of the experiments."""

    @cached_property
    def data(self) -> Labelled:
        if self.quick:
            raw = digits.load()
            mean, std = raw.train.mean(), raw.train.std()
            train, test = ((x - mean) / std for x in (raw.train, raw.test))
            return Labelled(train, raw.train_labels, test, raw.test_labels, raw.label_names)
        return cifar10.load_whitened(self.data_dir, limit=10_000)

    def network(self, how: str, seed: int, *, noise: bool = True) -> nn.Module:
        """Initialized on data, in training mode; the same weights for every way and one seed."""
        torch.manual_seed(seed)
        wrap = WRAPS[how]
        model: nn.Module
        if self.quick:
            model = dense(wrap, inputs=self.data.train[0].numel())
        else:
            std, p = (0.15, 0.5) if noise else (0.0, 0.0)
            model = ConvPoolCNN(wrap, width=1 / 8, noise=std, dropout=p)
        data_dependent_init(model, self.init_images(seed))
        return model

    def init_images(self, seed: int) -> Tensor:
        """The 500 images that a network of this seed is initialized on."""
        order = torch.Generator().manual_seed(seed)
        return self.data.train[torch.randperm(len(self.data.train), generator=order)[:500]]

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int,
        batch: int,
        seed: int,
        watch: Watch | None = None,
    ) -> list[float]:
        """The loss at every step. The same seed gives the same batches. Stops at what is not
        finite."""
        order = torch.Generator().manual_seed(seed)
        losses: list[float] = []
        for step in range(steps):
            rows = torch.randint(len(self.data.train), (batch,), generator=order)
            loss = self.loss(model, rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if watch is not None:
                watch(step, model)
            if not loss.isfinite():
                break
        return losses

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        dtype = next(model.parameters()).dtype
        return F.cross_entropy(model(self.data.train[rows].to(dtype)), self.data.train_labels[rows])


def dense(wrap: Callable[[nn.Module], nn.Module], inputs: int, width: int = 48) -> nn.Sequential:
    """Three hidden layers, leaky ReLU."""

    def layer(n: int, m: int) -> nn.Module:
        return wrap(init_(nn.Linear(n, m), partial(nn.init.normal_, std=0.05)))

    hidden = [
        module for n in (inputs, width, width) for module in (layer(n, width), nn.LeakyReLU(0.1))
    ]
    return nn.Sequential(nn.Flatten(), *hidden, layer(width, 10))
