"""What every variational auto-encoder here can do, in terms of what each defines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

Code = tuple[Tensor, ...]
"""What the encoder says of each example; the first axis of every tensor is the batch."""


class Terms(NamedTuple):
    """The two terms of the bound, for each example."""

    log_likelihood: Tensor
    """log p(x|z): (B,)."""
    kl: Tensor
    """KL from the prior for each stochastic layer and each of its maps: (B, layers, maps)."""

    @property
    def elbo(self) -> Tensor:
        """log p(x|z) − KL ≤ log p(x): (B,)."""
        return self.log_likelihood - self.kl.sum((1, 2))


class VAE(nn.Module, ABC):
    """log p(x) ≥ E_q[log p(x|z)] − KL(q(z|x) ‖ p(z)); called on images, it gives the two terms."""

    target_std: ClassVar[dict[str, float]]
    """For the data-dependent initialization."""

    @abstractmethod
    def encode(self, x: Tensor) -> Code:
        """What q(z|x) needs to know of the images."""

    @abstractmethod
    def decode(self, code: Code, *, at_sample: bool = False) -> tuple[Tensor, Tensor]:
        """z ~ q(z|x): what p(x|z) is made of, and the KL term, see Terms. With `at_sample` the
        latter is log q(z) − log p(z) also where the expectation is known."""

    @abstractmethod
    def generate(self, count: int) -> Tensor:
        """z ~ p(z): what p(x|z) is made of."""

    @abstractmethod
    def log_likelihood(self, x: Tensor, output: Tensor) -> Tensor:
        """log p(x|z): (B,)."""

    @abstractmethod
    def image(self, output: Tensor) -> Tensor:
        """The mean of p(x|z) as an image, from 0 to 1: (B, C, H, W)."""

    def forward(self, x: Tensor) -> Terms:
        output, kl = self.decode(self.encode(x))
        return Terms(self.log_likelihood(x, output), kl)

    def reconstruct(self, x: Tensor) -> Tensor:
        """Images through z and back."""
        return self.image(self.decode(self.encode(x))[0])

    def sample(self, count: int) -> Tensor:
        """New images."""
        return self.image(self.generate(count))


def log_importance_weights(model: VAE, x: Tensor, samples: int, most: int = 500) -> Tensor:
    """log p(x|z)p(z)/q(z|x) at `samples` draws of z for each example: (B, samples).

    Their mean is the bound; their log-mean-exp tends to log p(x). Encodes once; decodes no more
    than about `most` rows at a time, so memory does not grow with the samples.
    """
    code = model.encode(x)
    per_chunk = max(1, most // max(len(x), 1))
    chunks = []
    for start in range(0, samples, per_chunk):
        times = min(per_chunk, samples - start)
        output, kl = model.decode(tuple(repeated(part, times) for part in code), at_sample=True)
        terms = Terms(model.log_likelihood(repeated(x, times), output), kl)
        chunks.append(terms.elbo.view(len(x), times))
    return torch.cat(chunks, dim=1)


def repeated(x: Tensor, times: int) -> Tensor:
    """Each example `times` times in a row."""
    return x.repeat_interleave(times, dim=0)
