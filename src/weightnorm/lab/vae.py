"""Experiment 2: a convolutional VAE with inverse autoregressive flow (section 5.2).

On MNIST, binarized at random for every batch, and on CIFAR-10. Adamax with learning rate 0.002; the
evaluated parameters are a moving average over about ten epochs. The standard parameterization and
weight normalization start from the same data-dependent initialization. See docs/experiments/vae.md
for the deviations from the paper and the results.

Note [order of the elements]
    A step of the flow computes (m, s) of each element of z from the elements before it, and maps
    z ← (z − m)/eˢ. Its Jacobian is triangular with e⁻ˢ on the diagonal, so log q increases by
    exactly Σ s, and all elements are computed in parallel. Elements of a vector are ordered by
    index; those of a feature map by pixel, row by row, and within a pixel by channel. Each hidden
    unit has the degree of one element and depends on elements up to and including that one. Only
    the last layer excludes the element itself: the diagonal of the mask is zero in exactly one
    layer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from weightnorm import Parameterization, data_dependent_init, folded, init_, weight_norm
from weightnorm._torch_private import foreach_lerp_
from weightnorm.lab.config import (
    Count,
    Limit,
    Nonnegative,
    Positive,
    Range,
    RunConfig,
    Several,
    Size,
)
from weightnorm.lab.data import binarize, load_cifar10, load_digits, load_mnist
from weightnorm.lab.records import RunRecord
from weightnorm.lab.run import Run

Tensors = tuple[Tensor, ...] | list[Tensor]
Code = tuple[Tensor, ...]
"""Output of an encoder; the first axis of every tensor is the batch."""
L = TypeVar("L", bound=nn.Module)

NAME = "vae"
TITLE = "convolutional VAE with inverse autoregressive flow (section 5.2)"
METRIC = "train_negative_elbo"
"""Selects the best learning rate of a sweep, lower is better. Test bounds are not used for that."""
RESULTS = (
    "train_negative_elbo",
    "train_kl",
    "test_negative_elbo",
    "importance_negative_log_likelihood",
    "importance_negative_elbo",
)
"""Metrics of every result: those that `sweep --metric` accepts."""
EVAL_BATCH = 500
RESIDUAL, STEP_SIZE = 0.1, 0.1
"""Scales of a residual branch, and of m and s in a step of flow, so that both start close to the
identity (the authors' code for inverse autoregressive flow)."""
BINS = 256
"""Values of a pixel."""
SAMPLES, RECONSTRUCTIONS = 40, 16
"""Images stored for the report."""


@dataclass(frozen=True)
class Config(RunConfig):
    """Train a convolutional VAE."""

    parameterization: Parameterization = Parameterization.WEIGHT_NORM
    """Only standard and weight-norm apply to this model."""
    data: Literal["mnist", "cifar10", "digits"] = "mnist"
    """MNIST, CIFAR-10, or scikit-learn's embedded digits, enlarged to 16×16. It selects the network
    too, and CIFAR-10 has its own settings in each preset."""
    posterior: Literal["iaf", "diagonal"] = "iaf"
    """Inverse autoregressive flow (section 5.2), or a diagonal Gaussian."""
    flow_steps: Annotated[int, Range(1, 1000)] = 2
    """Steps of the inverse autoregressive flow; on CIFAR-10 1, as in the authors' code."""
    latents: Size = 32
    """Dimension of z; on CIFAR-10, channels of each stochastic layer. The authors' code; the paper
    does not give it."""
    width: Annotated[float, Range(0.05, 64)] = 1.0
    """Multiplier of the network's channels and units (section 5.2)."""
    depth: Annotated[int, Range(1, 1000)] = 2
    """Residual blocks at each resolution (section 5.2); on CIFAR-10 each has a stochastic layer."""
    free_bits: Nonnegative = 0.0
    """KL per channel, in nats, that the training loss ignores; the reported bound includes it. 0.25
    on CIFAR-10 is the default of the authors' code."""
    epochs: Count = 200
    """Passes over the training set; the paper gives no number."""
    batch_size: Several = 100
    """Examples per step, over all ranks; the paper gives no number."""
    average_epochs: Positive = 10.0
    """Time constant of the moving average of the parameters, in epochs (section 5.2)."""
    init_examples: Several = 500
    """Training examples for the data-dependent initialization, as in section 5.1."""
    importance_samples: Count = 128
    """Importance samples per example in the final estimate of log p(x)."""
    importance_examples: Count | None = None
    """Estimate log p(x) on only this many test examples."""
    limit: Limit | None = None
    """Train on only this many examples, from the start of the training set."""

    FOLDER_FIELDS: ClassVar[tuple[str, ...]] = ("data", "parameterization")
    COMPARED: ClassVar = (Parameterization.STANDARD, Parameterization.WEIGHT_NORM)

    @property
    def default_rate(self) -> float:
        """Adamax's learning rate, the same for both parameterizations (section 5.2)."""
        return 0.002


PAPER = Config(preset="paper", about="MNIST, 16/32/32 maps, 200 epochs, a GPU, hours")
PAPER_CIFAR10 = replace(
    PAPER,
    about="6 stochastic layers, 64 maps, 200 epochs, a GPU, days",
    data="cifar10",
    flow_steps=1,
    free_bits=0.25,
)
PRESETS = {
    "paper": PAPER,
    "paper cifar10": PAPER_CIFAR10,
    "cpu": replace(
        PAPER,
        preset="cpu",
        about="MNIST, 16/32/32 maps, 8 epochs, one core, 43 minutes",
        epochs=8,
        importance_examples=1000,
    ),
    "cpu cifar10": replace(
        PAPER_CIFAR10,
        preset="cpu",
        about="3 stochastic layers, 32 maps, 10 epochs, one core, 36 minutes",
        width=0.5,
        depth=1,
        latents=16,
        epochs=10,
        importance_examples=500,
    ),
    "demo": replace(
        PAPER,
        preset="demo",
        about="8/16/16 maps, embedded digits, a minute",
        data="digits",
        width=0.5,
        depth=1,
        epochs=30,
    ),
}


# — densities, in nats —


class Gaussian(NamedTuple):
    """N(mean, e^{2·log_std}), independent in every element."""

    mean: Tensor
    log_std: Tensor

    def sample(self) -> Tensor:
        """Sample z = mean + e^{log_std}·ε, differentiable in both."""
        return self.mean + self.log_std.exp() * torch.randn_like(self.mean)

    def log_density(self, z: Tensor) -> Tensor:
        """Return log N(z), elementwise."""
        standard = (z - self.mean) * (-self.log_std).exp()
        return -0.5 * (standard.square() + math.log(2 * math.pi)) - self.log_std


def gaussian_kl(q: Gaussian, p: Gaussian) -> Tensor:
    """KL(q ‖ p) = log σₚ/σ_q + (σ_q² + (μ_q − μₚ)²)/2σₚ² − ½, elementwise."""
    ratio = 2 * (q.log_std - p.log_std)  # log σ_q²/σₚ²
    distance = (q.mean - p.mean) * (-p.log_std).exp()
    return 0.5 * (ratio.exp() + distance.square() - 1 - ratio)


def bernoulli_log_likelihood(x: Tensor, logits: Tensor) -> Tensor:
    """log p(x) = x·log σ(t) + (1 − x)·log σ(−t), elementwise, for x in {0, 1}."""
    return -F.binary_cross_entropy_with_logits(logits, x, reduction="none")


def discretized_logistic_log_likelihood(pixels: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Return the log-probability of each pixel's bin under a logistic distribution.

    Pixel p of 0 … 255 has the bin [p, p + 1)/256; the first and the last extend to ∓∞, so the
    probabilities sum to 1. With a and b the standardized edges,

        σ(b) − σ(a) = σ(b)·σ(−a)·(1 − e^{a − b}),

    whose logarithm is accurate far in the tails too, since there is no cancellation.
    """
    scale = log_scale.exp()
    low, high = (pixels / BINS - mean) / scale, ((pixels + 1) / BINS - mean) / scale
    below_high, above_low = F.logsigmoid(high), F.logsigmoid(-low)
    inside = below_high + above_low + (-torch.expm1(-1 / (BINS * scale))).log()
    return torch.where(pixels <= 0, below_high, torch.where(pixels >= BINS - 1, above_low, inside))


# — layers —


def initialized(layer: L, normalize: bool) -> L:
    """Initialize a layer as in section 3: v ~ N(0, 0.05²) and b = 0.

    With `normalize`, weight norm is applied; otherwise w = v. If the layer has a mask, the norm is
    that of the masked v.
    """
    init_(layer, partial(nn.init.normal_, std=0.05))
    init_(layer, nn.init.zeros_, "bias")
    return weight_norm(layer, mask=getattr(layer, "mask", None)) if normalize else layer


class ResidualBlock(nn.Module):
    """Residual block: x + 0.1·conv(ELU(conv(x)))."""

    def __init__(self, channels: int, normalize: bool) -> None:
        super().__init__()
        self.conv1 = initialized(nn.Conv2d(channels, channels, 3, padding=1), normalize)
        self.conv2 = initialized(nn.Conv2d(channels, channels, 3, padding=1), normalize)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.conv2(F.elu(self.conv1(x)))
        return x + RESIDUAL * h


# — inverse autoregressive flow: masked layers, steps, and the posterior —


def degrees(units: int, elements: int, reverse: bool = False) -> Tensor:
    """Return the degree of each unit: units are divided evenly among the elements, in order.

    >>> degrees(6, 3).tolist(), degrees(3, 3, reverse=True).tolist()
    ([0, 0, 1, 1, 2, 2], [2, 1, 0])
    """
    order = torch.arange(units) * elements // units
    return elements - 1 - order if reverse else order


def mask_between(inputs: Tensor, outputs: Tensor, *, diagonal: bool) -> Tensor:
    """Return 1 where an output may depend on an input, by their degrees: (outputs, inputs)."""
    distance = outputs[:, None] - inputs[None, :]
    return (distance >= 0 if diagonal else distance > 0).float()


def kernel_mask(channels: Tensor, size: int, *, reverse: bool = False) -> Tensor:
    """Extend a mask between channels to a kernel: 1 at the pixels before the centre, the mask at
    the centre, 0 after it: (outputs, inputs, size, size)."""
    taps = torch.arange(size * size).view(size, size)
    centre = size * size // 2
    before = (taps > centre if reverse else taps < centre).float()
    return before + (taps == centre) * channels[:, :, None, None]


class MaskedLinear(nn.Linear):
    """Linear layer with a masked weight: t = (w∘mask)·x + b."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class MaskedConv2d(nn.Conv2d):
    """Convolution with a masked kernel: t = (w∘mask) ∗ x + b, of the size of x."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0], mask.shape[-1], padding="same")
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding="same")


def inverse_step(z: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Return (z − m)/eˢ; log q increases by Σ s."""
    return (z - mean) * (-log_scale).exp()


class AutoregressiveStep(nn.Module):
    """One step of the flow: masked layers with ELU compute (m, s) of z and a context.

    Args:
        elements: dimension of z, or its channels.
        hidden: units of each hidden layer, at least one. The context is added to the first, so it
            has the same size.
        masked: constructor of a masked layer, called with the mask between its units.
        reverse: order the elements from the last to the first.
        normalize: apply weight norm to the masked layers.
    """

    def __init__(
        self,
        elements: int,
        hidden: Iterable[int],
        masked: Callable[[Tensor], nn.Module],
        *,
        reverse: bool,
        normalize: bool,
    ) -> None:
        super().__init__()
        by_layer = [degrees(units, elements, reverse) for units in (elements, *hidden)]
        outputs = by_layer[0].repeat(2)  # m and s of each element
        masks = [mask_between(*pair, diagonal=True) for pair in pairwise(by_layer)]
        masks.append(mask_between(by_layer[-1], outputs, diagonal=False))
        self.layers = nn.ModuleList(initialized(masked(mask), normalize) for mask in masks)

    def forward(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new z, and s, by which log q of each element increases."""
        first, *inner, last = self.layers
        h = F.elu(first(z) + context)
        for layer in inner:
            h = F.elu(layer(h))
        mean, log_scale = (STEP_SIZE * last(h)).chunk(2, dim=1)
        return inverse_step(z, mean, log_scale), log_scale


class Posterior(nn.Module):
    """The posterior q(z|x): a diagonal Gaussian, transformed by steps of flow.

    Args:
        steps: number of steps, each in the reverse order of the one before; with 0 the posterior
            is the diagonal Gaussian.
        elements, hidden, normalize: see AutoregressiveStep.
        kernel: size of masked convolutions, where z is a feature map; None where it is a vector.
    """

    def __init__(
        self,
        steps: int,
        elements: int,
        hidden: Iterable[int],
        *,
        normalize: bool,
        kernel: int | None = None,
    ) -> None:
        super().__init__()
        hidden = tuple(hidden)

        def step(reverse: bool) -> AutoregressiveStep:
            def masked(mask: Tensor) -> nn.Module:
                if kernel is None:
                    return MaskedLinear(mask)
                return MaskedConv2d(kernel_mask(mask, kernel, reverse=reverse))

            return AutoregressiveStep(
                elements, hidden, masked, reverse=reverse, normalize=normalize
            )

        self.steps = nn.ModuleList(step(reverse=bool(i % 2)) for i in range(steps))

    def sample(self, base: Gaussian, context: Tensor) -> tuple[Tensor, Tensor]:
        """Sample z, and return it with log q(z|x), elementwise."""
        z = base.sample()
        log_q = base.log_density(z)
        for step in self.steps:
            z, increase = step(z, context)
            log_q = log_q + increase
        return z, log_q

    def forward(
        self, base: Gaussian, context: Tensor, prior: Gaussian, *, at_sample: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sample z, and return it with KL(q ‖ prior), elementwise.

        The KL is exact for a diagonal Gaussian. With a flow, or with `at_sample`, it is the
        unbiased estimate log q(z) − log p(z) at this z.
        """
        z, log_q = self.sample(base, context)
        if at_sample or len(self.steps):
            return z, log_q - prior.log_density(z)
        return z, gaussian_kl(base, prior)


# — the auto-encoders —


class ElboTerms(NamedTuple):
    """The two terms of the evidence lower bound, per example."""

    log_likelihood: Tensor
    """log p(x|z): (B,)."""
    kl: Tensor
    """KL from the prior, per stochastic layer and channel: (B, layers, channels)."""

    @property
    def elbo(self) -> Tensor:
        """log p(x|z) − KL ≤ log p(x): (B,)."""
        return self.log_likelihood - self.kl.sum((1, 2))


class VAE(nn.Module, ABC):
    """Computes the two terms of log p(x) ≥ E_q[log p(x|z)] − KL(q(z|x) ‖ p(z)) for images."""

    target_std: ClassVar[dict[str, float]]
    """Argument of `data_dependent_init`."""

    @abstractmethod
    def encode(self, x: Tensor) -> Code:
        """Return the parameters of q(z|x)."""

    @abstractmethod
    def decode(self, code: Code, *, at_sample: bool = False) -> tuple[Tensor, Tensor]:
        """Sample z ~ q(z|x), and return the parameters of p(x|z) and the KL of `ElboTerms`. With
        `at_sample` the KL is log q(z) − log p(z) even where its expectation is known."""

    @abstractmethod
    def generate(self, count: int) -> Tensor:
        """Sample z ~ p(z), and return the parameters of p(x|z)."""

    @abstractmethod
    def log_likelihood(self, x: Tensor, output: Tensor) -> Tensor:
        """Return log p(x|z): (B,)."""

    @abstractmethod
    def image(self, output: Tensor) -> Tensor:
        """Return the mean of p(x|z) as an image, from 0 to 1: (B, C, H, W)."""

    def forward(self, x: Tensor) -> ElboTerms:
        output, kl = self.decode(self.encode(x))
        return ElboTerms(self.log_likelihood(x, output), kl)

    def reconstruct(self, x: Tensor) -> Tensor:
        """Encode and decode images."""
        return self.image(self.decode(self.encode(x))[0])

    def sample(self, count: int) -> Tensor:
        """Generate images."""
        return self.image(self.generate(count))


class MnistVAE(VAE):
    """Residual blocks with 16, 32 and 32 channels, downsampled in between; 450 units; z.

    Args:
        normalize: apply weight norm to every layer.
        width: multiplier of the channels and units, including those of the flow.
        depth: residual blocks at each resolution.
        latents: dimension of z.
        flow_steps: steps of the posterior's flow; 0 for a diagonal posterior.
        side: height and width of the images, a multiple of 4.
    """

    target_std: ClassVar = {"posterior_base": 0.1}  # q starts near the prior

    def __init__(
        self,
        *,
        normalize: bool,
        width: float = 1.0,
        depth: int = 2,
        latents: int = 32,
        flow_steps: int = 2,
        side: int = 28,
    ) -> None:
        super().__init__()
        narrow, wide, units, hidden = (round(n * width) for n in (16, 32, 450, 320))
        self.latents = latents

        def layer(plain: nn.Module) -> list[nn.Module]:
            return [initialized(plain, normalize), nn.ELU()]

        def conv(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
            return layer(nn.Conv2d(inputs, outputs, 3, stride, padding=1))

        def upconv(inputs: int, outputs: int) -> list[nn.Module]:
            return layer(nn.ConvTranspose2d(inputs, outputs, 3, 2, padding=1, output_padding=1))

        def blocks(channels: int) -> list[nn.Module]:
            return [ResidualBlock(channels, normalize) for _ in range(depth)]

        small = (wide, side // 4, side // 4)
        flat = small[0] * small[1] * small[2]
        self.encoder = nn.Sequential(
            *conv(1, narrow),  # (B, 16, 28, 28)
            *blocks(narrow),
            *conv(narrow, wide, stride=2),  # (B, 32, 14, 14)
            *blocks(wide),
            *conv(wide, wide, stride=2),  # (B, 32, 7, 7)
            *blocks(wide),
            nn.Flatten(),  # (B, 1568)
            *layer(nn.Linear(flat, units)),
        )
        self.posterior_base = initialized(nn.Linear(units, 2 * latents), normalize)
        self.context = initialized(nn.Linear(units, hidden), normalize) if flow_steps else None
        self.posterior = Posterior(flow_steps, latents, (hidden, hidden), normalize=normalize)
        self.decoder = nn.Sequential(
            *layer(nn.Linear(latents, units)),
            *layer(nn.Linear(units, flat)),
            nn.Unflatten(1, small),  # (B, 32, 7, 7)
            *blocks(wide),
            *upconv(wide, wide),  # (B, 32, 14, 14)
            *blocks(wide),
            *upconv(wide, narrow),  # (B, 16, 28, 28)
            *blocks(narrow),
            initialized(nn.Conv2d(narrow, 1, 3, padding=1), normalize),  # logits
        )

    def encode(self, x: Tensor) -> Code:
        h = self.encoder(x)
        base = self.posterior_base(h)
        return (base,) if self.context is None else (base, self.context(h))

    def decode(self, code: Code, *, at_sample: bool = False) -> tuple[Tensor, Tensor]:
        mean, log_std = code[0].chunk(2, dim=1)
        zero = torch.zeros((), device=mean.device)
        prior = Gaussian(zero, zero)
        z, kl = self.posterior(Gaussian(mean, log_std), code[-1], prior, at_sample=at_sample)
        return self.decoder(z), kl.unsqueeze(1)

    def generate(self, count: int) -> Tensor:
        device = next(self.parameters()).device
        logits: Tensor = self.decoder(torch.randn(count, self.latents, device=device))
        return logits

    def log_likelihood(self, x: Tensor, output: Tensor) -> Tensor:
        return bernoulli_log_likelihood(x, output).sum((1, 2, 3))

    def image(self, output: Tensor) -> Tensor:
        return output.sigmoid()


class LadderLayer(nn.Module):
    """A stochastic layer: a bottom-up residual block, a top-down residual block, and z.

    Args:
        channels: deterministic channels, of both passes and of the flow's context.
        latents: channels of z.
        flow_steps: steps of the posterior's flow; 0 for a diagonal posterior.
        downsample: whether the layer above has half the resolution.
        top: whether there is no layer above.
        normalize: apply weight norm to every layer.
    """

    def __init__(
        self,
        channels: int,
        latents: int,
        flow_steps: int,
        *,
        downsample: bool,
        top: bool,
        normalize: bool,
    ) -> None:
        super().__init__()
        self.downsample = downsample
        context = channels if flow_steps else 0
        self.sizes = [latents, latents, context]
        """Channels of either pass's contribution to the posterior: mean, log std, context."""

        def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
            return initialized(nn.Conv2d(inputs, outputs, 3, stride, padding=1), normalize)

        upward = (0 if top else channels) + sum(self.sizes)
        self.up1 = conv(channels, upward, stride=2 if downsample else 1)
        self.up2 = None if top else conv(channels, channels)
        self.down1 = conv(channels, channels + 2 * latents + sum(self.sizes))
        if downsample:
            upsample = nn.ConvTranspose2d(
                channels + latents, channels, 3, 2, padding=1, output_padding=1
            )
            self.down2: nn.Module = initialized(upsample, normalize)
        else:
            self.down2 = conv(channels + latents, channels)
        self.posterior = Posterior(flow_steps, latents, (channels,), normalize=normalize, kernel=3)

    def up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of the layer above, and the contribution to this layer's posterior."""
        t = self.up1(F.elu(x))
        h, bottom_up = t.split([t.shape[1] - sum(self.sizes), sum(self.sizes)], dim=1)
        if self.up2 is None:
            return x, bottom_up
        if self.downsample:
            x = x[:, :, ::2, ::2]
        return x + RESIDUAL * self.up2(F.elu(h)), bottom_up

    def down(
        self, x: Tensor, bottom_up: Tensor | None, *, at_sample: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the input of the layer below, and the KL of each channel of z: (B, latents).

        Without `bottom_up` z is sampled from the prior, and the KL is 0.
        """
        t = self.down1(F.elu(x))
        latents, size = self.sizes[0], sum(self.sizes)
        sizes = [t.shape[1] - 2 * latents - size, latents, latents, size]
        h, *prior, top_down = t.split(sizes, dim=1)
        if bottom_up is None:
            z = Gaussian(*prior).sample()
            kl = z.new_zeros(z.shape[:2])
        else:
            mean, log_std, context = (bottom_up + top_down).split(self.sizes, dim=1)
            base = Gaussian(mean, log_std)
            z, kl = self.posterior(base, context, Gaussian(*prior), at_sample=at_sample)
            kl = kl.sum((2, 3))
        if self.downsample:
            x = F.interpolate(x, scale_factor=2.0)
        return x + RESIDUAL * self.down2(F.elu(torch.cat([z, h], dim=1))), kl


class Cifar10VAE(VAE):
    """Ladder layers at 16×16, 8×8 and 4×4 over images of 32×32.

    Args:
        normalize: apply weight norm to every layer.
        width: multiplier of the 64 channels.
        depth: ladder layers at each resolution.
        latents: channels of each layer's z.
        flow_steps: steps of each posterior's flow; 0 for diagonal posteriors.
    """

    target_std: ClassVar = {"*": 0.1}  # as in the authors' code
    layers: Sequence[LadderLayer]
    """From the image to the top."""

    def __init__(
        self,
        *,
        normalize: bool,
        width: float = 1.0,
        depth: int = 2,
        latents: int = 32,
        flow_steps: int = 1,
    ) -> None:
        super().__init__()
        channels = round(64 * width)
        self.enter = initialized(nn.Conv2d(3, channels, 5, 2, padding=2), normalize)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            LadderLayer(
                channels,
                latents,
                flow_steps,
                downsample=i in (depth, 2 * depth),
                top=i == 3 * depth - 1,
                normalize=normalize,
            )
            for i in range(3 * depth)
        )
        self.top = nn.Parameter(torch.zeros(channels, 1, 1))
        leave = nn.ConvTranspose2d(channels, 3, 5, 2, padding=2, output_padding=1)
        self.leave = initialized(leave, normalize)
        self.log_scale = nn.Parameter(torch.tensor(-2.0))  # near the pixels' std

    def encode(self, x: Tensor) -> Code:
        h = self.enter(center_pixels(x))  # (B, 64, 16, 16)
        contributions = []
        for layer in self.layers:
            h, bottom_up = layer.up(h)
            contributions.append(bottom_up)
        return tuple(contributions)

    def decode(self, code: Code, *, at_sample: bool = False) -> tuple[Tensor, Tensor]:
        h = self.top_input(len(code[0]))
        kls = []
        for layer, bottom_up in zip(reversed(self.layers), reversed(code), strict=True):
            h, kl = layer.down(h, bottom_up, at_sample=at_sample)
            kls.append(kl)
        return self.leave(F.elu(h)), torch.stack(kls, dim=1)

    def generate(self, count: int) -> Tensor:
        h = self.top_input(count)
        for layer in reversed(self.layers):
            h, _ = layer.down(h, None)
        output: Tensor = self.leave(F.elu(h))
        return output

    def top_input(self, count: int) -> Tensor:
        """Return the learned input of the top-down pass."""
        return self.top.expand(count, -1, 4, 4)

    def log_likelihood(self, x: Tensor, output: Tensor) -> Tensor:
        mean = output + 0.5
        return discretized_logistic_log_likelihood(x, mean, self.log_scale).sum((1, 2, 3))

    def image(self, output: Tensor) -> Tensor:
        return (output + 0.5).clamp(0, 1)


def center_pixels(pixels: Tensor) -> Tensor:
    """Return (p + ½)/256 − ½, from −½ to ½."""
    return (pixels + 0.5) / BINS - 0.5


# — training —


def run(config: Config, console: Console | None = None) -> RunRecord:
    """Train and evaluate one auto-encoder, and return its record."""
    with Run(NAME, config, PRESETS, console, RESULTS) as run:
        if (record := run.finished) is not None:
            return record
        train, test = (x.to(run.device) for x in load(config))

        model = build(config, train.shape[-1]).to(run.device)
        chosen = run.ranks.share(torch.randperm(len(train))[: config.init_examples])
        run.seed_by_rank()
        examples = to_input(train[chosen.to(run.device)], config)
        report = data_dependent_init(
            model, examples, target_std=model.target_std, group=run.ranks.group
        )
        run.record_initialization(report)
        network = torch.compile(model) if config.compile else model

        optimizer = torch.optim.Adamax(model.parameters(), lr=config.rate, foreach=True)
        steps = config.average_epochs * len(train) / config.batch_size
        average = AveragedModel(model, multi_avg_fn=moving_average(steps))
        averaged = cast(VAE, average.module)
        run.restore(model=model, optimizer=optimizer, average=average)

        for _ in run.epochs(config.epochs):
            for rows in run.batches(len(train), config.batch_size):
                terms = network(to_input(train[rows], config))
                optimizer.zero_grad()
                objective(terms, config.free_bits, run).backward()
                run.ranks.sum_gradients(model)
                optimizer.step()
                average.update_parameters(model)
                run.add(negative_elbo=-terms.elbo.sum(), kl=terms.kl.sum(), count=len(rows))

            run.log(
                train_negative_elbo=run.total("negative_elbo") / run.total("count"),
                train_kl=run.total("kl") / run.total("count"),
                **evaluate(averaged, test, config, run),
            )
        store_images(averaged, test, config, run)
        last = {name: x for name, x in run.last.items() if name not in ("epoch", "seconds")}
        return run.finish({**last, **estimate(averaged, test, config, run)})


def load(config: Config) -> tuple[Tensor, Tensor]:
    """Load the training set as uint8 pixels, and the test set as input of the model, the same in
    every run: (N, C, H, W)."""
    if config.data == "digits":
        raw = load_digits()
        train, test = (F.interpolate(x, scale_factor=2.0) for x in (raw.train, raw.test))
    elif config.data == "mnist":
        raw = load_mnist(config.data_dir)
        train, test = raw.train.unsqueeze(1), raw.test.unsqueeze(1)
    else:
        raw = load_cifar10(config.data_dir)
        train, test = raw.train, raw.test
    return train[: config.limit], to_input(test, config, torch.Generator().manual_seed(0))


def to_input(pixels: Tensor, config: Config, generator: torch.Generator | None = None) -> Tensor:
    """Convert uint8 pixels to the model's input: sampled zeros and ones; on CIFAR-10, 0 to 255."""
    return pixels.float() if config.data == "cifar10" else binarize(pixels, generator)


def build(config: Config, side: int) -> VAE:
    """Build the network for the config's data set."""
    network = Cifar10VAE if config.data == "cifar10" else partial(MnistVAE, side=side)
    return network(
        normalize=config.parameterization.normalizes_weights,
        width=config.width,
        depth=config.depth,
        latents=config.latents,
        flow_steps=config.flow_steps if config.posterior == "iaf" else 0,
    )


def objective(terms: ElboTerms, free_bits: float, run: Run) -> Tensor:
    """Return this rank's part of −log p(x|z) + Σ max(λ, KL), up to a constant.

    The sum is over stochastic layers and channels; KL is the mean over the batch of all ranks. A
    channel below λ = `free_bits` nats has no gradient.
    """
    kl = terms.kl.sum(0) / run.batch  # (layers, channels)
    if free_bits:
        kl = kl * (run.ranks.sum(kl.detach().clone()) > free_bits)
    return kl.sum() - terms.log_likelihood.sum() / run.batch


def moving_average(steps: float) -> Callable[[Tensors, Tensors, Tensor | int], None]:
    """Return an update of AveragedModel: a moving average over about `steps` steps.

    The decay is 1 − 1/steps, but at most (1 + n)/(10 + n) after n steps, so that the initial
    parameters soon have no weight.

    Note [averaging v and g]
        The parameters of a normalized weight are v and g, so the averaged weight is ḡ·v̄/‖v̄‖ with
        norm |ḡ|, not the average of w.
    """

    @torch.no_grad()
    def update(averaged: Tensors, current: Tensors, count: Tensor | int) -> None:
        # A tensor on the parameters' device: reading it would wait for the device at every step.
        n = torch.as_tensor(count)
        rate = (torch.full_like(n, 9, dtype=torch.float32) / (10 + n)).clamp(1 / steps, 1.0)
        foreach_lerp_(averaged, current, [rate.to(p.dtype).expand_as(p) for p in averaged])

    return update


# — evaluation —


@torch.no_grad()
def evaluate(model: VAE, images: Tensor, config: Config, run: Run) -> dict[str, float]:
    """Return −ELBO on the test set, and the KL of each stochastic layer, from the top down."""
    with folded(model):
        terms = [model(x) for x in run.ranks.share(images).split(EVAL_BATCH)]
    sums = torch.stack([torch.stack([-t.elbo.sum(), *t.kl.sum((0, 2))]) for t in terms])
    bound, *kl = (run.ranks.sum(sums.cpu().double().sum(0)) / len(images)).tolist()
    metrics = {"test_negative_elbo": bound}
    if config.data == "cifar10":
        metrics["test_bits_per_dim"] = bound / (images[0].numel() * math.log(2))
    return metrics | {f"test_kl_{layer}": value for layer, value in enumerate(kl, 1)}


@torch.no_grad()
def estimate(model: VAE, images: Tensor, config: Config, run: Run) -> dict[str, float]:
    """Estimate −log p(x) by importance sampling, and −ELBO from the same samples."""
    images = images[: config.importance_examples]
    sums = []
    with folded(model):
        for x in run.ranks.share(images).split(EVAL_BATCH):
            each = partial(run.parts, name=f"importance samples for {len(x)} images")
            logs = log_importance_weights(model, x, config.importance_samples, each=each)
            likelihood = logs.logsumexp(1) - math.log(config.importance_samples)
            sums.append(-torch.stack([likelihood.sum(), logs.mean(1).sum()]))
    total = torch.stack(sums).cpu().double().sum(0)
    negative_likelihood, bound = (run.ranks.sum(total) / len(images)).tolist()
    return {
        "importance_negative_log_likelihood": negative_likelihood,
        "importance_negative_elbo": bound,
    }


def log_importance_weights(
    model: VAE,
    x: Tensor,
    samples: int,
    max_rows: int = 500,
    each: Callable[[range], Iterable[int]] = iter,
) -> Tensor:
    """Return log p(x|z)p(z)/q(z|x) at `samples` samples of z per example: (B, samples).

    Their mean is the bound; their log-mean-exp converges to log p(x). Encodes once, and decodes
    about `max_rows` rows at a time, so memory does not grow with the samples. `each` iterates over
    the parts, for instance with a progress bar.
    """
    code = model.encode(x)
    per_chunk = max(1, max_rows // max(len(x), 1))
    chunks = []
    for start in each(range(0, samples, per_chunk)):
        times = min(per_chunk, samples - start)
        output, kl = model.decode(tuple(repeated(part, times) for part in code), at_sample=True)
        terms = ElboTerms(model.log_likelihood(repeated(x, times), output), kl)
        chunks.append(terms.elbo.view(len(x), times))
    return torch.cat(chunks, dim=1)


def repeated(x: Tensor, times: int) -> Tensor:
    """Repeat each example `times` times in a row."""
    return x.repeat_interleave(times, dim=0)


@torch.no_grad()
def store_images(model: VAE, images: Tensor, config: Config, run: Run) -> None:
    """Store samples, and test images with their reconstructions, for the report."""
    originals = images[:RECONSTRUCTIONS]
    with folded(model):
        stored = {
            "samples": model.sample(SAMPLES),
            "originals": originals / 255 if config.data == "cifar10" else originals,
            "reconstructions": model.reconstruct(originals),
        }
    run.save_arrays("pictures", **{name: _to_uint8(x) for name, x in stored.items()})


def _to_uint8(images: Tensor) -> Tensor:
    """Convert images from [0, 1] to uint8: (N, H, W), or in colour (N, H, W, 3)."""
    return (images * 255).round().to(torch.uint8).movedim(1, -1).squeeze(-1)
