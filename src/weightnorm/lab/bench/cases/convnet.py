"""ConvPool-CNN-C, the network of the CIFAR-10 experiment: step, initialization, memory."""

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
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, Summary, Work
from weightnorm.lab.bench.goals import AtMost, CopiesAtMost
from weightnorm.lab.bench.peak_memory import peak_bytes
from weightnorm.lab.bench.peers import (
    HOOK,
    NORMALIZATIONS,
    OURS,
    PARAMETRIZATION,
    PLAIN,
    build,
    training_step,
)
from weightnorm.lab.bench.roofline import operations
from weightnorm.lab.interleaved import Call
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN

BATCH_NORM, MEAN_ONLY = "batch norm", "weight norm + mean-only"


def network(
    settings: Settings,
    normalize: Callable[[nn.Module], object] = NORMALIZATIONS[PLAIN],
    how: Parameterization = Parameterization.STANDARD,
) -> nn.Module:
    """The network at full width in channels-last, as in the experiment."""
    wrap, width = partial(parameterize, how=how), settings.size(1.0, 0.03)
    model = build(lambda: ConvPoolCNN(wrap, width=width), normalize, settings.device)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def networks(settings: Settings) -> dict[str, nn.Module]:
    """Every peer, weight norm with mean-only batch norm, and batch norm."""
    made = {name: network(settings, normalize) for name, normalize in NORMALIZATIONS.items()}
    made[MEAN_ONLY] = network(settings, how=Parameterization.WEIGHT_NORM_MEAN_ONLY)
    made[BATCH_NORM] = network(settings, how=Parameterization.BATCH_NORM)
    return made


def images(settings: Settings, count: int) -> Tensor:
    count = settings.size(count, 4)
    x = torch.randn(count, 3, 32, 32, device=settings.device)
    return x.contiguous(memory_format=torch.channels_last)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x), device=x.device) % 10)


def step_cases(settings: Settings) -> Iterator[Case]:
    x = images(settings, 100)
    models = networks(settings)
    peers = {name: training_step(model, partial(loss, model, x)) for name, model in models.items()}
    yield Case(
        "batch of 100",
        peers,
        base=PLAIN,
        goals=(
            AtMost(OURS, 1.01, PLAIN),
            AtMost(MEAN_ONLY, 1.025, PLAIN),
            AtMost(MEAN_ONLY, 1.0, BATCH_NORM),
        ),
        work=Work(operations(peers[PLAIN]), "convolution", OURS),
        examples=len(x),
        summary=(
            Summary("ConvPool-CNN-C", OURS, PARAMETRIZATION, HOOK, BATCH_NORM),
            Summary(
                "ConvPool-CNN-C, mean-only BN",
                MEAN_ONLY,
                batch_norm=BATCH_NORM,
                goal=1,
            ),
        ),
        at_least_base=tuple(name for name in peers if name != PLAIN),
    )
    yield weights_alone(models, peers[PLAIN])


def weights_alone(models: dict[str, nn.Module], plain_step: Call) -> Case:
    """The work that weight norm adds to a step, timed alone: the weights and their gradients.

    Far more precise than the difference of two steps of which it is below one per cent."""
    names = (OURS, PARAMETRIZATION, HOOK)
    return Case(
        "added work alone, as a share of the plain step",
        {PLAIN: plain_step} | {name: weights_and_gradients(models[name]) for name in names},
        base=PLAIN,
        goals=(AtMost(OURS, 0.01, PLAIN),),
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


def init_cases(settings: Settings) -> Iterator[Case]:
    x = images(settings, 500)
    model = network(settings, NORMALIZATIONS[OURS])

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def initialize() -> None:
        data_dependent_init(model, x)

    initialize()  # so that both process the same numbers
    yield Case(
        "500 images",
        {"forward pass": forward, "initialization": initialize},
        base="forward pass",
        goals=(AtMost("initialization", 1.3, "forward pass"),),
        work=Work(operations(forward), "convolution", "initialization"),
        summary=(Summary("data-dependent initialization", "initialization"),),
        at_least_base=("initialization",),
    )


def memory_cases(settings: Settings) -> Iterator[Case]:
    x = images(settings, 100)
    models = networks(settings)
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

        return lambda: float(peak_bytes(run, settings.device))

    yield Case(
        "passes of a training step, batch of 100",
        {name: passes(model) for name, model in models.items()},
        base=PLAIN,
        goals=(CopiesAtMost(OURS, 1.0, PLAIN, size, "v and g"),),
        unit="B",
        rounds=1,  # deterministic
        summary=(Summary("ConvPool-CNN-C, peak memory", OURS, PARAMETRIZATION, HOOK, BATCH_NORM),),
    )


STEP = Benchmark("step", "Training step of ConvPool-CNN-C, 96 and 192 channels", step_cases)
INIT = Benchmark("init", "Data-dependent initialization of ConvPool-CNN-C", init_cases)
MEMORY = Benchmark("memory", "Peak memory of ConvPool-CNN-C without its parameters", memory_cases)
