"""Inverse autoregressive flow: masked layers, flow steps, and the posterior.

A step computes (m, s) of each element of z from the elements before it, and maps
z ← (z − m)/eˢ. Its Jacobian is triangular with e⁻ˢ on the diagonal, so log q increases by exactly
Σ s, and all elements are computed in parallel.

Note [order]
    Elements of a vector are ordered by index; those of a feature map by pixel, row by row, and
    within a pixel by channel. Each hidden unit has the degree of one element and depends on
    elements up to and including that one. Only the last layer excludes the element itself: the
    diagonal of the mask is zero in exactly one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm.lab.models.blocks import initialized
from weightnorm.lab.models.likelihoods import Gaussian, gaussian_kl

STEP_SIZE = 0.1
"""Scale of m and s, so that a step is initially close to the identity."""


# — masks —


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


# — the flow —


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
