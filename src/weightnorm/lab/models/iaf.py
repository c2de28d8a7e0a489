"""Inverse autoregressive flow: masked layers, the step they make, and the posterior made of steps.

A step computes (m, s) of each element of z from the elements before it alone, and maps
z ← (z − m)/eˢ. Its Jacobian is triangular with e⁻ˢ on the diagonal, so log q grows by exactly Σ s,
and all elements are computed at once.

Note [order]
    A vector's elements come in the order of their index, a stack of maps' in the order of the
    pixels, row by row, and at one pixel in the order of the channels. A hidden unit has the degree
    of the element it stands for and sees elements up to and including that one. The last layer
    alone excludes the element itself: the diagonal is zero in exactly one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm.lab.models.blocks import fresh
from weightnorm.lab.models.likelihoods import Gaussian, gaussian_kl

STEP_SIZE = 0.1
"""Factor on m and s, so that a step starts near the identity."""


# — masks —


def degrees(units: int, elements: int, reverse: bool = False) -> Tensor:
    """The element that each unit stands for: as many units for each, in order.

    >>> degrees(6, 3).tolist(), degrees(3, 3, reverse=True).tolist()
    ([0, 0, 1, 1, 2, 2], [2, 1, 0])
    """
    order = torch.arange(units) * elements // units
    return elements - 1 - order if reverse else order


def mask_between(inputs: Tensor, outputs: Tensor, *, diagonal: bool) -> Tensor:
    """1 where an output may see an input, by their degrees: (outputs, inputs)."""
    distance = outputs[:, None] - inputs[None, :]
    return (distance >= 0 if diagonal else distance > 0).float()


def spread_over_taps(channels: Tensor, size: int, *, reverse: bool = False) -> Tensor:
    """A mask between channels as one for a kernel: all of them at the pixels before this one, the
    mask at the pixel itself, nothing after it: (outputs, inputs, size, size)."""
    taps = torch.arange(size * size).view(size, size)
    here = size * size // 2
    before = (taps > here if reverse else taps < here).float()
    return before + (taps == here) * channels[:, :, None, None]


class MaskedLinear(nn.Linear):
    """t = (w∘mask)·x + b."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class MaskedConv2d(nn.Conv2d):
    """t = (w∘mask) ∗ x + b, at the size of x."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0], mask.shape[-1], padding="same")
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding="same")


# — the flow —


def inverse_step(z: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """z ← (z − m)/eˢ; log q grows by Σ s."""
    return (z - mean) * (-log_scale).exp()


class AutoregressiveStep(nn.Module):
    """One step of the flow: masked layers with ELU give (m, s); the context enters at the first.

    Args:
        elements: entries of z, or its channels.
        hidden: units of each hidden layer, at least one; the context has as many as the first.
        masked: what makes a masked layer, of the mask between its units.
        reverse: go through the elements from the last to the first.
        normalize: weight-normalize the masked layers.
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
        ranks = [degrees(units, elements, reverse) for units in (elements, *hidden)]
        outputs = ranks[0].repeat(2)  # m and s of each element
        masks = [mask_between(*pair, diagonal=True) for pair in pairwise(ranks)]
        masks.append(mask_between(ranks[-1], outputs, diagonal=False))
        self.layers = nn.ModuleList(fresh(masked(mask), normalize) for mask in masks)

    def forward(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """The new z, and s: what log q of each element grows by."""
        first, *inner, last = self.layers
        h = F.elu(first(z) + context)
        for layer in inner:
            h = F.elu(layer(h))
        mean, log_scale = (STEP_SIZE * last(h)).chunk(2, dim=1)
        return inverse_step(z, mean, log_scale), log_scale


class Posterior(nn.Module):
    """q(z|x): a diagonal Gaussian, and steps of flow that turn it into more. Without any steps it
    stays diagonal.

    Args:
        steps: how many; each goes through the elements in the reverse order of the one before.
        elements, hidden, normalize: see AutoregressiveStep.
        kernel: size of masked convolutions, for z of maps; None for z a vector.
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
                return MaskedConv2d(spread_over_taps(mask, kernel, reverse=reverse))

            return AutoregressiveStep(
                elements, hidden, masked, reverse=reverse, normalize=normalize
            )

        self.steps = nn.ModuleList(step(reverse=bool(i % 2)) for i in range(steps))

    def sample(self, base: Gaussian, context: Tensor) -> tuple[Tensor, Tensor]:
        """z, and log q(z|x) element by element."""
        z = base.sample()
        log_q = base.log_density(z)
        for step in self.steps:
            z, growth = step(z, context)
            log_q = log_q + growth
        return z, log_q

    def forward(
        self, base: Gaussian, context: Tensor, prior: Gaussian, *, at_sample: bool = False
    ) -> tuple[Tensor, Tensor]:
        """z, and KL(q ‖ prior) element by element.

        Exact for a diagonal Gaussian. Through a flow, or if asked for, it is the unbiased estimate
        log q(z) − log p(z) at this z.
        """
        z, log_q = self.sample(base, context)
        if at_sample or len(self.steps):
            return z, log_q - prior.log_density(z)
        return z, gaussian_kl(base, prior)
