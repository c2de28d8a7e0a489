"""The VAE for CIFAR-10 (section 5.2): a ladder of stochastic layers, bidirectional inference.

The bottom-up pass encodes the image and computes each layer's contribution to its posterior. The
top-down pass generates: it computes the prior of each z and, in inference, its own contribution to
the posterior. The sum of both parameterizes q, which so depends on the image and the layers above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm.lab.models.blocks import RESIDUAL, initialized
from weightnorm.lab.models.iaf import Posterior
from weightnorm.lab.models.likelihoods import (
    BINS,
    Gaussian,
    discretized_logistic_log_likelihood,
)
from weightnorm.lab.models.vae import VAE, Code


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
