"""Rows on ConvPool-CNN-C, the network of the CIFAR-10 experiment: step, initialization, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import (
    Parameterization,
    data_dependent_init,
    normalized_weights,
    parameterize,
    parts,
)
from weightnorm.lab.benchmarks.benchmark import Case, Row, Setting, Work
from weightnorm.lab.benchmarks.goals import AtMost, CopiesAtMost, ExtraAtMost
from weightnorm.lab.benchmarks.interleaved import Call
from weightnorm.lab.benchmarks.peak_memory import peak_bytes
from weightnorm.lab.benchmarks.peers import FLAVOURS, OURS, PLAIN, flavour, training_step
from weightnorm.lab.benchmarks.roofline import operations
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN

BATCH_NORM, MEAN_ONLY = "batch norm", "weight norm + mean-only"


def network(
    setting: Setting,
    normalize: Callable[[nn.Module], object] = FLAVOURS[PLAIN],
    how: Parameterization = Parameterization.STANDARD,
) -> nn.Module:
    """At full width, in channels-last, as the experiment has it."""
    wrap, width = partial(parameterize, how=how), setting.size(1.0, 0.03)
    model = flavour(lambda: ConvPoolCNN(wrap, width=width), normalize, setting.device)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def networks(setting: Setting) -> dict[str, nn.Module]:
    """Every flavour, and both batch norms."""
    made = {name: network(setting, normalize) for name, normalize in FLAVOURS.items()}
    made[MEAN_ONLY] = network(setting, how=Parameterization.WEIGHT_NORM_MEAN_ONLY)
    made[BATCH_NORM] = network(setting, how=Parameterization.BATCH_NORM)
    return made


def images(setting: Setting, count: int) -> Tensor:
    count = setting.size(count, 4)
    x = torch.randn(count, 3, 32, 32, device=setting.device)
    return x.contiguous(memory_format=torch.channels_last)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x), device=x.device) % 10)


def step_cases(setting: Setting) -> Iterator[Case]:
    x = images(setting, 100)
    models = networks(setting)
    peers = {name: training_step(model, partial(loss, model, x)) for name, model in models.items()}
    yield Case(
        "batch of 100",
        peers,
        base=PLAIN,
        goals=(
            AtMost(OURS, 1.01, PLAIN),
            ExtraAtMost(MEAN_ONLY, 0.5, BATCH_NORM, PLAIN),
        ),
        work=Work(operations(peers[PLAIN]), "convolution", OURS),
        examples=len(x),
    )


def init_cases(setting: Setting) -> Iterator[Case]:
    x = images(setting, 500)
    model = network(setting, FLAVOURS[OURS])

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def initialize() -> None:
        data_dependent_init(model, x)

    initialize()  # so that both see the same numbers
    yield Case(
        "500 images",
        {"forward pass": forward, "initialization": initialize},
        base="forward pass",
        goals=(AtMost("initialization", 1.3, "forward pass"),),
        work=Work(operations(forward), "convolution", "initialization"),
    )


def memory_cases(setting: Setting) -> Iterator[Case]:
    x = images(setting, 100)
    models = networks(setting)
    normed = models[OURS]
    size = sum(
        part.numel() * part.element_size()
        for path, name in (path.rpartition(".")[::2] for path in normalized_weights(normed))
        for part in parts(normed.get_submodule(path), name)
    )

    def passes(model: nn.Module) -> Call:
        def run() -> None:
            model.zero_grad()
            loss(model, x).backward()

        return lambda: float(peak_bytes(run, setting.device))

    yield Case(
        "passes of a training step, batch of 100",
        {name: passes(model) for name, model in models.items()},
        base=PLAIN,
        goals=(CopiesAtMost(OURS, 1.0, PLAIN, size, "v and g"),),
        unit="B",
        rounds=1,  # the same bytes every time
    )


STEP = Row("step", "Training step of ConvPool-CNN-C, 96 and 192 channels", step_cases)
INIT = Row("init", "Data-dependent initialization of ConvPool-CNN-C", init_cases)
MEMORY = Row("memory", "Most memory at a time, parameters aside, ConvPool-CNN-C", memory_cases)
