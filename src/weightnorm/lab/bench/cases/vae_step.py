"""A training step of the auto-encoders, which have dozens of small convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, Summary, Work
from weightnorm.lab.bench.goals import AtMost
from weightnorm.lab.bench.peers import OURS
from weightnorm.lab.bench.roofline import operations
from weightnorm.lab.interleaved import Call
from weightnorm.lab.models.vae import VAE
from weightnorm.lab.models.vae_cifar10 import Cifar10VAE
from weightnorm.lab.models.vae_mnist import MnistVAE

STANDARD = "standard"
BATCH = 100
NETWORKS: dict[str, tuple[Callable[..., VAE], tuple[int, ...], float]] = {
    "MNIST": (MnistVAE, (1, 28, 28), 1.0),
    "CIFAR-10": (Cifar10VAE, (3, 32, 32), 255.0),
}
"""Network, shape and largest value of its images."""


def training_step(model: VAE, x: Tensor) -> Call:
    """A training step of the experiment: bound, gradient, Adamax, parameter average."""
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.002, foreach=True)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def step() -> None:
        optimizer.zero_grad()
        elbo = model(x).elbo
        (-elbo.mean()).backward()
        optimizer.step()
        average.update_parameters(model)

    return step


def cases(settings: Settings) -> Iterator[Case]:
    width = settings.size(1.0, 0.05)
    for name, (network, shape, largest) in NETWORKS.items():
        x = torch.rand(settings.size(BATCH, 2), *shape, device=settings.device) * largest
        x, peers = x.round(), {}
        for peer, normalize in {STANDARD: False, OURS: True}.items():
            torch.manual_seed(0)
            model = network(normalize=normalize, width=width).to(settings.device)
            peers[peer] = training_step(model, x)
        yield Case(
            f"{name}, batch of {BATCH}",
            peers,
            base=STANDARD,
            goals=(AtMost(OURS, 1.03, STANDARD),),
            work=Work(operations(peers[STANDARD]), "convolution", OURS),
            examples=len(x),
            summary=(Summary(f"VAE, {name}", OURS),),
            at_least_base=(OURS,),
        )


BENCHMARK = Benchmark("vae", "Training step of the auto-encoders", cases)
