"""Densities, divergences and likelihoods as pure functions, in nats."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 256


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


def bits_per_dim(nats: float, dims: int) -> float:
    """Convert nats per example to bits per dimension.

    >>> round(bits_per_dim(3072 * math.log(256), 3072), 6)
    8.0
    """
    return nats / (dims * math.log(2))
