"""What a training step of the auto-encoders costs, weight-normalized beside standard:
`python -m weightnorm.lab.benchmarks.vae_step`.

The two take turns, so that whatever else the machine does meets both.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from weightnorm.lab.benchmarks.side_by_side import interleaved
from weightnorm.lab.models.vae import VAE
from weightnorm.lab.models.vae_cifar10 import Cifar10VAE
from weightnorm.lab.models.vae_mnist import MnistVAE

NETWORKS: dict[str, tuple[Callable[..., VAE], tuple[int, ...], float]] = {
    "MNIST": (MnistVAE, (1, 28, 28), 1.0),
    "CIFAR-10": (Cifar10VAE, (3, 32, 32), 255.0),
}
"""The network, and the shape and largest value of its images."""


def training_step(model: VAE, x: Tensor) -> Callable[[], None]:
    """A step as the experiment takes it: bound, gradient, Adamax, average."""
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.002, foreach=True)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def step() -> None:
        optimizer.zero_grad()
        (-model(x).elbo.mean()).backward()
        optimizer.step()
        average.update_parameters(model)

    return step


def main(words: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description="a training step, weight norm beside standard")
    options.add_argument("--width", type=float, default=1.0, help="factor on maps and units")
    options.add_argument("--batch-size", type=int, default=100)
    options.add_argument("--rounds", type=int, default=15, help="training steps of each network")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = options.parse_args(words)
    torch.set_num_threads(given.threads)
    table = Table("data", "standard, ms a step", "weight norm, ms a step", "ratio")
    for name, (network, shape, largest) in NETWORKS.items():
        x = (torch.rand(given.batch_size, *shape) * largest).round()
        steps = {}
        for normalize in (False, True):
            torch.manual_seed(0)
            model = network(normalize=normalize, width=given.width)
            steps[str(normalize)] = training_step(model, x)
        standard, normed = interleaved(steps, given.rounds).values()
        times = (f"{1000 * seconds:.1f}" for seconds in (standard, normed))
        table.add_row(name, *times, f"{normed / standard:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
