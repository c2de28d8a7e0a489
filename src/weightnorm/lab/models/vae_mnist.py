"""The convolutional VAE for MNIST (section 5.2): ResNet encoder and decoder, one vector z."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from weightnorm.lab.models.blocks import ResidualBlock, initialized
from weightnorm.lab.models.iaf import Posterior
from weightnorm.lab.models.likelihoods import Gaussian, bernoulli_log_likelihood
from weightnorm.lab.models.vae import VAE, Code


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
