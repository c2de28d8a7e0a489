"""Base class of the variational auto-encoders, and importance sampling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

Code = tuple[Tensor, ...]
"""Output of an encoder; the first axis of every tensor is the batch."""


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
