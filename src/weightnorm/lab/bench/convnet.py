"""ConvPool-CNN-C, the network of the CIFAR-10 experiment: time of a training step, peak memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import Parameterization, normalized_weights, parameterize
from weightnorm.lab.bench.benchmark import (
    Benchmark,
    Case,
    Settings,
    Summary,
    added_at_most,
    at_most,
)
from weightnorm.lab.bench.memory import peak_bytes
from weightnorm.lab.bench.peers import (
    HOOK,
    NORMALIZATIONS,
    OURS,
    PARAMETRIZATION,
    PLAIN,
    build,
    training_step,
)
from weightnorm.lab.classify import ConvPoolCNN
from weightnorm.lab.interleaved import Call

BATCH_NORM, MEAN_ONLY = "batch norm", "weight norm + mean-only"
BATCH = 100


def networks(settings: Settings) -> dict[str, nn.Module]:
    """The network at full width in channels-last, as in the experiment: with every normalization,
    weight norm with mean-only batch norm, and batch norm."""

    def network(normalize: Callable[[nn.Module], object], how: Parameterization) -> nn.Module:
        wrap, width = partial(parameterize, how=how), settings.size(1.0, 0.03)
        model = build(lambda: ConvPoolCNN(wrap, width=width), normalize, settings.device)
        return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    plain = Parameterization.STANDARD
    made = {name: network(normalize, plain) for name, normalize in NORMALIZATIONS.items()}
    made[MEAN_ONLY] = network(NORMALIZATIONS[PLAIN], Parameterization.WEIGHT_NORM_MEAN_ONLY)
    made[BATCH_NORM] = network(NORMALIZATIONS[PLAIN], Parameterization.BATCH_NORM)
    return made


def images(settings: Settings) -> Tensor:
    x = torch.randn(settings.size(BATCH, 4), 3, 32, 32, device=settings.device)
    return x.contiguous(memory_format=torch.channels_last)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x), device=x.device) % 10)


def step_cases(settings: Settings) -> Iterator[Case]:
    x = images(settings)
    models = networks(settings)
    peers = {name: training_step(model, partial(loss, model, x)) for name, model in models.items()}
    yield Case(
        f"batch of {BATCH}",
        peers,
        base=PLAIN,
        limits=(
            at_most(OURS, 1.01, PLAIN),
            at_most(MEAN_ONLY, 1.025, PLAIN),
            at_most(MEAN_ONLY, 1.0, BATCH_NORM),
        ),
        examples=len(x),
        summary=(
            Summary("ConvPool-CNN-C", OURS, PARAMETRIZATION, HOOK, BATCH_NORM),
            Summary("ConvPool-CNN-C, mean-only BN", MEAN_ONLY, batch_norm=BATCH_NORM, goal=1),
        ),
        at_least_base=tuple(name for name in peers if name != PLAIN),
    )
    # Far more precise than the difference of two steps, of which it is below one per cent.
    names = (OURS, PARAMETRIZATION, HOOK)
    yield Case(
        "added work alone, as a share of the plain step",
        {PLAIN: peers[PLAIN]} | {name: weights_and_gradients(models[name]) for name in names},
        base=PLAIN,
        limits=(at_most(OURS, 0.01, PLAIN),),
        summary=(Summary("ConvPool-CNN-C, added work alone", OURS, PARAMETRIZATION, HOOK),),
    )


def weights_and_gradients(model: nn.Module) -> Call:
    """Compute every weight from v and g, and ∇v and ∇g from ∇w."""
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    grads = [torch.randn_like(layer.weight) for layer in layers]
    leaves = [p for p in model.parameters() if p.requires_grad]

    def run() -> None:
        weights = [_weight(layer) for layer in layers]
        torch.autograd.grad(weights, leaves, grads, allow_unused=True)

    return run


def _weight(layer: nn.Module) -> Tensor:
    """The weight as the forward pass computes it; torch's hook does so before the forward pass."""
    for hook in layer._forward_pre_hooks.values():
        hook(layer, ())
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight


def memory_cases(settings: Settings) -> Iterator[Case]:
    x = images(settings)
    models = networks(settings)
    pairs = normalized_weights(models[OURS]).values()
    size = sum(part.numel() * part.element_size() for pair in pairs for part in pair)

    def passes(model: nn.Module) -> Call:
        def run() -> None:
            model.zero_grad()
            loss(model, x).backward()

        return lambda: float(peak_bytes(run, settings.device))

    yield Case(
        f"passes of a training step, batch of {BATCH}",
        {name: passes(model) for name, model in models.items()},
        base=PLAIN,
        limits=(added_at_most(OURS, 1.0, PLAIN, size, "v and g"),),
        unit="B",
        rounds=1,  # deterministic
        summary=(Summary("ConvPool-CNN-C, peak memory", OURS, PARAMETRIZATION, HOOK, BATCH_NORM),),
    )


STEP = Benchmark("step", "Training step of ConvPool-CNN-C, 96 and 192 channels", step_cases)
MEMORY = Benchmark("memory", "Peak memory of ConvPool-CNN-C without its parameters", memory_cases)
