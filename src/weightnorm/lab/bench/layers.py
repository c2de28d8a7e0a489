"""Small and single layers: vocoder, recurrent, w = g·v/‖v‖ alone, mean-only batch norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached

from weightnorm import WeightNormOptimizer, folded, mean_only_batch_norm
from weightnorm._kernels import compose, formula
from weightnorm._torch_private import torch_weight_norm
from weightnorm._units import Units
from weightnorm.lab.bench.benchmark import (
    Benchmark,
    Case,
    Settings,
    Summary,
    at_most,
    extra_at_most,
)
from weightnorm.lab.bench.peers import (
    HOOK,
    NORMALIZATIONS,
    OPTIMIZER,
    OURS,
    PARAMETRIZATION,
    PLAIN,
    adam,
    build,
    peer_models,
    training_step,
)
from weightnorm.lab.interleaved import Call

# Many small one-dimensional convolutions, as in vocoders

LAYERS, CHANNELS, LENGTH = 60, 32, 512
DILATIONS = (1, 3, 5)
FOLDED = "weight norm, folded"


class Residuals(nn.Module):
    """A stack of x + conv(φ(x)) with alternating dilations."""

    def __init__(self, layers: int, channels: int = CHANNELS) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(channels, channels, 3, padding="same", dilation=DILATIONS[i % 3])
            for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + conv(nn.functional.leaky_relu(x, 0.1))
        return x


def generator(mels: int, width: int, strides: Sequence[int] = (8, 8, 4)) -> nn.Module:
    """Build a generator in the style of HiFi-GAN: upsampling, each time with residual layers."""
    layers: list[nn.Module] = [nn.Conv1d(mels, width, 7, padding=3)]
    for stride in strides:
        up = nn.ConvTranspose1d(width, width // 2, 2 * stride, stride, padding=stride // 2)
        width //= 2
        layers += [nn.LeakyReLU(0.1), up, Residuals(6, width)]
    return nn.Sequential(*layers, nn.LeakyReLU(0.1), nn.Conv1d(width, 1, 7, padding=3), nn.Tanh())


def signal(settings: Settings) -> Tensor:
    return torch.randn(4, CHANNELS, settings.size(LENGTH, 16), device=settings.device)


def vocoder_cases(settings: Settings) -> Iterator[Case]:
    layers, mels = settings.size(LAYERS, 2), settings.size(80, 4)
    spectra = torch.randn(4, mels, settings.size(32, 2), device=settings.device)
    width = settings.size(128, 8)
    waves = signal(settings)
    yield from audio_cases(settings, lambda: Residuals(layers), waves, "60 conv1d layers")
    vocoder = partial(generator, mels, width)
    yield from audio_cases(settings, vocoder, spectra, "vocoder", " of a vocoder")


def audio_cases(
    settings: Settings, make: Callable[[], nn.Module], x: Tensor, name: str, of: str = ""
) -> Iterator[Case]:
    """Yield a training step and inference of a network, in every form."""
    models = peer_models(make, settings.device)
    plain = build(make, NORMALIZATIONS[PLAIN], settings.device)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Call:
        return training_step(model, lambda: model(x).square().mean(), optimizer)

    peers = {each: train(model) for each, model in models.items()}
    yield Case(
        f"training step{of}",
        peers | {OPTIMIZER: train(plain, WeightNormOptimizer(plain, adam))},
        base=PLAIN,
        limits=(at_most(OURS, 1.0, PARAMETRIZATION),),
        summary=(Summary(name, OURS, PARAMETRIZATION, HOOK),),
        at_least_base=(OURS, PARAMETRIZATION, HOOK, OPTIMIZER),
    )

    def infer(model: nn.Module) -> Call:
        def run() -> None:
            with torch.no_grad():
                model(x)

        return run

    with folded(models[OURS]):
        names = {OURS: FOLDED}
        yield Case(
            f"inference{of}",
            {names.get(each, each): infer(model) for each, model in models.items()},
            base=PLAIN,
            limits=(at_most(FOLDED, 1.0, PLAIN),),
            summary=(Summary(f"{name}, folded inference", FOLDED, PARAMETRIZATION, HOOK),),
            at_least_base=(FOLDED, PARAMETRIZATION, HOOK),
        )


# Recurrent layers, which use one weight at every step of a sequence


def recurrent_cases(settings: Settings) -> Iterator[Case]:
    steps, hidden = settings.size(64, 3), settings.size(256, 8)
    x = torch.randn(steps, 32, hidden, device=settings.device)
    limits = (at_most(OURS, 1.02, PLAIN),)

    def layer(model: nn.Module) -> Call:
        return training_step(model, lambda: model(x)[0].square().mean())

    models = peer_models(lambda: nn.LSTM(hidden, hidden), settings.device)
    yield Case(
        "LSTM",
        {name: layer(model) for name, model in models.items()},
        PLAIN,
        limits,
        summary=(Summary("LSTM", OURS, PARAMETRIZATION, HOOK),),
        at_least_base=(OURS, PARAMETRIZATION, HOOK),
    )

    def unrolled(cell: nn.Module) -> Tensor:
        state = None
        for each in x:
            state = cell(each, state)
        assert state is not None
        return state[0].square().mean()  # type: ignore[no-any-return]

    def cell(model: nn.Module) -> Call:
        return training_step(model, lambda: unrolled(model))

    def cell_cached(model: nn.Module) -> Call:
        def loss() -> Tensor:
            with cached():  # one weight computation per sequence
                return unrolled(model)

        return training_step(model, loss)

    def make() -> nn.Module:
        return nn.LSTMCell(hidden, hidden)

    models = peer_models(make, settings.device)
    peers = {name: (cell_cached if name == OURS else cell)(m) for name, m in models.items()}
    torchs = build(make, NORMALIZATIONS[PARAMETRIZATION], settings.device)
    peers[f"{PARAMETRIZATION}, cached"] = cell_cached(torchs)
    yield Case(
        "LSTMCell unrolled, in parametrize.cached()",
        peers,
        PLAIN,
        limits,
        summary=(Summary("LSTMCell, cached", OURS, f"{PARAMETRIZATION}, cached"),),
        at_least_base=(OURS, PARAMETRIZATION, HOOK),
    )


# w = g·v/‖v‖ alone, forward and backward

OPERATION, TORCH, FORMULA = "ours", "torch", "formula by autograd"
FUSED_BY_TORCH = {
    ((64, 32, 3, 3), 0): 1.15,  # the overhead of a call counts
    ((64, 32, 3, 3), 3): 1.0,
    ((192, 192, 3, 3), 0): 1.03,
    ((192, 192, 3, 3), 3): 1.0,
    ((512, 512, 7), 0): 1.03,
    ((512, 512, 7), 2): 1.0,
    ((4096, 1024), 0): 1.03,
    ((4096, 1024), 1): 1.0,
}
COMPOSED_BY_TORCH = {
    ((64, 32, 3, 3), 1): 0.5,
    ((192, 192, 3, 3), 1): 0.5,
    ((512, 512, 7), 1): 0.5,
}
"""Shape and dim → limit relative to torch, which has one kernel for it or several operations."""


def operation_cases(settings: Settings) -> Iterator[Case]:
    for torchs, limits in (("fused", FUSED_BY_TORCH), ("composes", COMPOSED_BY_TORCH)):
        for (full, dim), limit in limits.items():
            shape = [min(size, settings.size(size, 4)) for size in full]
            name = f"{'×'.join(map(str, shape))}, dim {dim}, torch {torchs}"
            peers = operations(torch.Size(shape), dim, settings.device)
            yield Case(name, peers, TORCH, (at_most(OPERATION, limit, TORCH),))


def operations(shape: torch.Size, dim: int, device: torch.device) -> dict[str, Call]:
    v = torch.randn(shape, device=device, requires_grad=True)
    g = torch.rand(Units(dim).shape(shape), device=device, requires_grad=True)
    grad = torch.randn_like(v)

    def both(w: Tensor) -> None:
        torch.autograd.grad(w, (v, g), grad)

    return {
        TORCH: lambda: both(torch_weight_norm(v, g, dim)),
        OPERATION: lambda: both(compose(v, g, Units(dim))),
        FORMULA: lambda: both(formula(v, g, Units(dim))),
    }


# Mean-only batch norm after a convolution, forward and backward

ALONE, BATCH_NORM, BY_HAND = "convolution alone", "batch norm", "t − t.mean() + b"
MEAN_ONLY = "mean-only"
LAYOUTS = {"NCHW": torch.contiguous_format, "channels-last": torch.channels_last}
FIRST_LAYERS = (96, 100, 3)
"""Channels, images and kernel of the paper's network; the size that is in the summary."""
EXTRA = {
    ("NCHW", (96, 32, 3)): 0.4,
    ("NCHW", (96, 32, 1)): 0.4,  # beside a cheap convolution the extra cost is measured better
    ("NCHW", FIRST_LAYERS): 0.4,
    ("NCHW", (24, 100, 3)): 0.4,
    ("channels-last", (96, 32, 3)): None,
    ("channels-last", (96, 32, 1)): None,
    ("channels-last", FIRST_LAYERS): 0.6,
    ("channels-last", (24, 100, 3)): 0.6,
}
"""Layout and size → limit of the extra cost relative to batch norm's, where there is one."""


class CenteredByHand(nn.Module):
    """Eq. 7 in plain operations."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features, 1, 1))
        self.register_buffer("running_mean", torch.zeros(features, 1, 1))

    def forward(self, t: Tensor) -> Tensor:
        mean = t.mean((0, 2, 3), keepdim=True)
        self.running_mean.lerp_(mean.detach()[0], 0.1)  # type: ignore[operator]
        return t - mean + self.bias


def mean_only_case_name(layout: str, size: tuple[int, int, int]) -> str:
    return f"{size[0]} channels, {size[1]} images, {size[2]}×{size[2]}, {layout}"


def mean_only_cases(settings: Settings) -> Iterator[Case]:
    for (layout, size), extra in EXTRA.items():
        memory_format = LAYOUTS[layout]
        channels, batch = (settings.size(full, min(full, 4)) for full in size[:2])
        x = torch.randn(batch, channels, 32, 32, device=settings.device)
        x = x.contiguous(memory_format=memory_format).requires_grad_()
        grad = torch.randn_like(x)

        def passes(layer: nn.Module, x: Tensor = x, grad: Tensor = grad) -> Call:
            leaves = [x, *layer.parameters()]

            def run() -> None:
                torch.autograd.grad(layer(x), leaves, grad)

            return run

        layers = {
            name: build(lambda layer=layer: layer, lambda _: None, settings.device).to(  # type: ignore[call-overload, misc]
                memory_format=memory_format
            )
            for name, layer in convolutions(channels, size[2]).items()
        }
        limits = [at_most(MEAN_ONLY, 1.02, BATCH_NORM)]
        if extra is not None:
            limits.insert(0, extra_at_most(MEAN_ONLY, extra, BATCH_NORM, ALONE))
        line = Summary(f"mean-only BN, {layout}", MEAN_ONLY, batch_norm=BATCH_NORM)
        yield Case(
            mean_only_case_name(layout, size),
            {name: passes(layer) for name, layer in layers.items()},
            base=ALONE,
            limits=tuple(limits),
            summary=(line,) if size == FIRST_LAYERS else (),
            at_least_base=(MEAN_ONLY, BY_HAND, BATCH_NORM),
        )


def convolutions(channels: int, kernel: int) -> dict[str, nn.Module]:
    """The convolution alone and with each normalization."""

    def conv(bias: bool = False) -> nn.Module:
        return nn.Conv2d(channels, channels, kernel, padding="same", bias=bias)

    return {
        ALONE: conv(bias=True),
        MEAN_ONLY: mean_only_batch_norm(conv(bias=True)),
        BY_HAND: nn.Sequential(conv(), CenteredByHand(channels)),
        BATCH_NORM: nn.Sequential(conv(), nn.BatchNorm2d(channels)),
    }


SMALL_LAYERS = Benchmark("vocoder", "60 small conv1d layers, and a vocoder", vocoder_cases)
RECURRENT = Benchmark("recurrent", "Training step on 64 steps of 256 units", recurrent_cases)
OPERATIONS = Benchmark("op", "w = g·v/‖v‖, forward and backward", operation_cases)
MEAN_ONLY_LAYERS = Benchmark(
    "mean-only", "Mean-only batch norm after a convolution", mean_only_cases
)
