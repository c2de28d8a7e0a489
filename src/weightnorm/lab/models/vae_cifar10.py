"""The VAE for CIFAR-10 (section 5.2): a ladder of stochastic layers, inferred in both directions.

The upward pass reads the image and leaves at each layer what it has to say about that layer's z.
The downward pass generates: it holds the prior of each z, and in inference adds its own view to
the upward pass's, so that every posterior knows the image and the layers above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm.lab.models.blocks import RESIDUAL, fresh
from weightnorm.lab.models.iaf import Posterior
from weightnorm.lab.models.likelihoods import (
    BINS,
    Gaussian,
    discretized_logistic_log_likelihood,
)
from weightnorm.lab.models.vae import VAE, Code


class LadderLayer(nn.Module):
    """A residual block up, a residual block down, and z between.

    Args:
        maps: deterministic maps, of the stream and of the context.
        latents: maps of z.
        flow_steps: of the posterior; 0 for a diagonal one.
        halves: whether the stream above has half the size.
        top: whether there is no stream above.
        normalize: weight-normalize every layer.
    """

    def __init__(
        self, maps: int, latents: int, flow_steps: int, *, halves: bool, top: bool, normalize: bool
    ) -> None:
        super().__init__()
        self.halves = halves
        context = maps if flow_steps else 0
        self.view = [latents, latents, context]
        """Channels of what either pass says of the posterior: mean, log std, context."""

        def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
            return fresh(nn.Conv2d(inputs, outputs, 3, stride, padding=1), normalize)

        self.up1 = conv(maps, (0 if top else maps) + sum(self.view), stride=2 if halves else 1)
        self.up2 = None if top else conv(maps, maps)
        self.down1 = conv(maps, maps + 2 * latents + sum(self.view))
        if halves:
            upward = nn.ConvTranspose2d(maps + latents, maps, 3, 2, padding=1, output_padding=1)
            self.down2: nn.Module = fresh(upward, normalize)
        else:
            self.down2 = conv(maps + latents, maps)
        self.posterior = Posterior(flow_steps, latents, (maps,), normalize=normalize, kernel=3)

    def up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The stream one layer up, and what this layer's posterior gets from it."""
        t = self.up1(F.elu(x))
        h, view = t.split([t.shape[1] - sum(self.view), sum(self.view)], dim=1)
        if self.up2 is None:
            return x, view
        if self.halves:
            x = x[:, :, ::2, ::2]
        return x + RESIDUAL * self.up2(F.elu(h)), view

    def down(
        self, x: Tensor, view: Tensor | None, *, at_sample: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The stream one layer down, and the KL of each map of z: (B, latents).

        Without a view from the upward pass z is drawn from the prior, and the KL is 0.
        """
        t = self.down1(F.elu(x))
        latents, own = self.view[0], sum(self.view)
        h, *prior, mine = t.split([t.shape[1] - 2 * latents - own, latents, latents, own], dim=1)
        if view is None:
            z = Gaussian(*prior).sample()
            kl = z.new_zeros(z.shape[:2])
        else:
            mean, log_std, context = (view + mine).split(self.view, dim=1)
            base = Gaussian(mean, log_std)
            z, kl = self.posterior(base, context, Gaussian(*prior), at_sample=at_sample)
            kl = kl.sum((2, 3))
        if self.halves:
            x = F.interpolate(x, scale_factor=2.0)
        return x + RESIDUAL * self.down2(F.elu(torch.cat([z, h], dim=1))), kl


class Cifar10VAE(VAE):
    """Ladder layers at 16×16, 8×8 and 4×4 over images of 32×32.

    Args:
        normalize: weight-normalize every layer.
        width: factor on the 64 maps.
        depth: ladder layers at each size.
        latents: maps of each layer's z.
        flow_steps: of each posterior; 0 for diagonal ones.
    """

    target_std: ClassVar = {"*": 0.1}  # as the authors have it
    layers: Sequence[LadderLayer]
    """From the image up."""

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
        maps = max(round(64 * width), 1)
        self.enter = fresh(nn.Conv2d(3, maps, 5, 2, padding=2), normalize)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            LadderLayer(
                maps,
                latents,
                flow_steps,
                halves=i in (depth, 2 * depth),
                top=i == 3 * depth - 1,
                normalize=normalize,
            )
            for i in range(3 * depth)
        )
        self.top = nn.Parameter(torch.zeros(maps, 1, 1))
        leave = nn.ConvTranspose2d(maps, 3, 5, 2, padding=2, output_padding=1)
        self.leave = fresh(leave, normalize)
        self.log_scale = nn.Parameter(torch.tensor(-2.0))  # near the pixels' own spread

    def encode(self, x: Tensor) -> Code:
        h = self.enter(centred(x))  # (B, 64, 16, 16)
        views = []
        for layer in self.layers:
            h, view = layer.up(h)
            views.append(view)
        return tuple(views)

    def decode(self, code: Code, *, at_sample: bool = False) -> tuple[Tensor, Tensor]:
        h = self.start(len(code[0]))
        kls = []
        for layer, view in zip(reversed(self.layers), reversed(code), strict=True):
            h, kl = layer.down(h, view, at_sample=at_sample)
            kls.append(kl)
        return self.leave(F.elu(h)), torch.stack(kls, dim=1)

    def generate(self, count: int) -> Tensor:
        h = self.start(count)
        for layer in reversed(self.layers):
            h, _ = layer.down(h, None)
        output: Tensor = self.leave(F.elu(h))
        return output

    def start(self, count: int) -> Tensor:
        """What the downward pass starts from."""
        return self.top.expand(count, -1, 4, 4)

    def log_likelihood(self, x: Tensor, output: Tensor) -> Tensor:
        mean = output + 0.5
        return discretized_logistic_log_likelihood(x, mean, self.log_scale).sum((1, 2, 3))

    def image(self, output: Tensor) -> Tensor:
        return (output + 0.5).clamp(0, 1)


def centred(pixels: Tensor) -> Tensor:
    """(p + ½)/256 − ½, from −½ to ½."""
    return (pixels + 0.5) / BINS - 0.5
