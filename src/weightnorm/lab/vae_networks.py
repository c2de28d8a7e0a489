"""Networks of the convolutional VAE: likelihoods, inverse autoregressive flow, two auto-encoders.

Sizes that the paper does not give (320 units in the flow, factors 0.1, ELU, the CIFAR-10 network)
are those of the authors' code for inverse autoregressive flow, github.com/openai/iaf.

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
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import init_, weight_norm

Code = tuple[Tensor, ...]
"""Output of an encoder; the first axis of every tensor is the batch."""
L = TypeVar("L", bound=nn.Module)

RESIDUAL = 0.1
"""Factor of a residual branch, so that a block starts close to the identity."""
STEP_SIZE = 0.1
"""Factor of m and s in a step of flow, so that it starts close to the identity."""
BINS = 256
"""Values of a pixel."""


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


class AutoregressiveStep(nn.Module):
    """One step of the flow: masked layers with ELU compute (m, s) of z and a context.

    Args:
        elements: dimension of z, or its channels.
        hidden: units of each hidden layer, at least one. The context is added to the first, so it
            has the same size.
        kernel: size of masked convolutions, where z is a feature map; None where it is a vector.
        reverse: order the elements from the last to the first.
        normalize: apply weight norm to the masked layers.
    """

    def __init__(
        self,
        elements: int,
        hidden: Sequence[int],
        kernel: int | None,
        *,
        reverse: bool,
        normalize: bool,
    ) -> None:
        super().__init__()

        def masked(mask: Tensor) -> nn.Module:
            if kernel is None:
                return MaskedLinear(mask)
            return MaskedConv2d(kernel_mask(mask, kernel, reverse=reverse))

        by_layer = [degrees(units, elements, reverse) for units in (elements, *hidden)]
        outputs = by_layer[0].repeat(2)  # m and s of each element
        masks = [mask_between(*pair, diagonal=True) for pair in pairwise(by_layer)]
        masks.append(mask_between(by_layer[-1], outputs, diagonal=False))
        self.layers = nn.ModuleList(initialized(masked(mask), normalize) for mask in masks)

    def forward(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return (z − m)/eˢ, and s, by which log q of each element increases."""
        first, *inner, last = self.layers
        h = F.elu(first(z) + context)
        for layer in inner:
            h = F.elu(layer(h))
        mean, log_scale = (STEP_SIZE * last(h)).chunk(2, dim=1)
        return (z - mean) * (-log_scale).exp(), log_scale


class Posterior(nn.Module):
    """The posterior q(z|x): a diagonal Gaussian, transformed by steps of flow.

    Args:
        steps: number of steps, each in the reverse order of the one before; with 0 the posterior
            is the diagonal Gaussian.
        elements, hidden, kernel, normalize: see AutoregressiveStep.
    """

    def __init__(
        self,
        steps: int,
        elements: int,
        hidden: Sequence[int],
        kernel: int | None = None,
        *,
        normalize: bool,
    ) -> None:
        super().__init__()
        self.steps = nn.ModuleList(
            AutoregressiveStep(elements, hidden, kernel, reverse=bool(i % 2), normalize=normalize)
            for i in range(steps)
        )

    def forward(
        self, base: Gaussian, context: Tensor, prior: Gaussian, *, at_sample: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sample z, and return it with KL(q ‖ prior), elementwise.

        The KL is exact for a diagonal Gaussian. With a flow, or with `at_sample`, it is the
        unbiased estimate log q(z) − log p(z) at this z.
        """
        z = base.sample()
        if not len(self.steps) and not at_sample:
            return z, gaussian_kl(base, prior)
        log_q = base.log_density(z)
        for step in self.steps:
            z, increase = step(z, context)
            log_q = log_q + increase
        return z, log_q - prior.log_density(z)


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
    """Compute the two terms of log p(x) ≥ E_q[log p(x|z)] − KL(q(z|x) ‖ p(z)) for images."""

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
        width: float,
        depth: int,
        latents: int,
        flow_steps: int,
        side: int,
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
        return -F.binary_cross_entropy_with_logits(output, x, reduction="none").sum((1, 2, 3))

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
        self.posterior = Posterior(flow_steps, latents, (channels,), 3, normalize=normalize)

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
        width: float,
        depth: int,
        latents: int,
        flow_steps: int,
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
        h = self.enter((x + 0.5) / BINS - 0.5)  # (B, 64, 16, 16)
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
