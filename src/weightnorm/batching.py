"""Compute many small normalized weights in a few batched calls."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from weightnorm import kernels
from weightnorm.dtensor import is_sharded
from weightnorm.inspection import NormalizedWeight, find_normalized
from weightnorm.parametrization import (
    WeightNorm,
    WeightNormParametrizationList,
    cache_weight,
    cached_weights,
    is_cached,
)

MAX_ELEMENTS = 2**15
"""Largest weight that is batched: up to this size, call overhead exceeds copy cost on a CPU."""


def batched_weights(model: nn.Module) -> BatchedWeights:
    """Return a context manager that computes the small weights of a model in batched calls.

    A vocoder has dozens of small convolutions, whose weights cost more in call overhead than in
    arithmetic. On entering the context, weights of equal shape are concatenated, computed in one
    call per shape, and used by their layers inside the block. Gradients reach v and g as usual.
    Create the context manager once and enter it around each forward pass:

    >>> from weightnorm import weight_norm_model
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    >>> _ = weight_norm_model(model)
    >>> weights = batched_weights(model)
    >>> with weights:
    ...     loss = model(torch.ones(1, 2)).sum()
    >>> loss.backward()

    Inside the block every weight of this library is computed at most once, unless its v or g
    changes. Large, masked and sharded weights are computed when their layers read them. Gradients
    of batched weights arrive together at the end of the backward pass, so DistributedDataParallel
    cannot overlap their communication with it. A compiled model does not run faster: the compiler
    fuses these calls itself.

    Threads: the block affects only the thread that entered it, and several threads may enter the
    same context manager. Weight norm may be removed and applied again between two blocks.
    """
    return BatchedWeights(model)


class BatchedWeights(AbstractContextManager[None]):
    """See ``batched_weights``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._batches = _batches_of(model)
        self._thread = threading.local()  # the blocks that a thread is in

    def __enter__(self) -> None:
        block = cached_weights()
        block.__enter__()
        try:
            # A local variable: another thread may exchange the attribute meanwhile.
            batches = self._batches
            if not all(batch.is_current() for batch in batches):
                batches = self._batches = _batches_of(self._model)
            for batch in batches:
                batch.compute()
        except BaseException:
            block.__exit__(None, None, None)
            raise
        self._thread.__dict__.setdefault("blocks", []).append(block)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.blocks.pop().__exit__(kind, error, trace)


def _batches_of(model: nn.Module) -> list[_Batch]:
    """Group the weights of a model that can be computed in one call."""
    by_key: dict[Hashable, dict[int, NormalizedWeight]] = defaultdict(dict)
    for weight in find_normalized(model):
        if _is_batchable(weight):  # tied weights share their parametrizations: once is enough
            by_key[_batch_key(weight)][id(weight.parametrizations)] = weight
    return [_Batch([*weights.values()]) for weights in by_key.values() if len(weights) > 1]


class _Batch:
    """Weights that can be computed as one weight, concatenated along axis 0.

    If the kept axis is 0, the units of all of them lie along axis 0 of the concatenation. Otherwise
    the concatenation is a weight with the groups of all of them, as a grouped transposed
    convolution has.
    """

    def __init__(self, weights: list[NormalizedWeight]) -> None:
        self.weights = weights
        self.parametrizations: list[Any] = [weight.parametrizations for weight in weights]
        self.weight_norm: WeightNorm = weights[0].parametrization
        self.groups = sum(w.parametrization.groups for w in weights) if self.weight_norm.dim else 1
        self.key = _tensor_types(self.parametrizations[0])

    def is_current(self) -> bool:
        """Whether these are still the parametrizations of their modules, of one type of tensor."""
        for weight, parametrizations in zip(self.weights, self.parametrizations, strict=True):
            registered: Any = weight.module._modules.get("parametrizations")
            if (
                registered is None
                or registered._modules.get(weight.name) is not parametrizations
                or len(parametrizations._modules) > 1
                or _tensor_types(parametrizations) != self.key
            ):
                return False
        return True

    def compute(self) -> None:
        """Compute all weights and put them into this thread's cache."""
        if all(map(is_cached, self.parametrizations)):  # by an outer block
            return
        v = [each._parameters["original1"] for each in self.parametrizations]
        g = [each._parameters["original0"] for each in self.parametrizations]
        if any(map(is_sharded, v)):
            return
        w = kernels.compose(
            v=torch.cat(v),
            g=self.weight_norm.length(torch.cat(g)),
            dim=self.weight_norm.dim,
            groups=self.groups,
            eps=self.weight_norm.eps,
        )
        rows = [part.shape[0] for part in v]
        for parametrizations, weight in zip(self.parametrizations, w.split(rows), strict=True):
            cache_weight(parametrizations, weight)


def _is_batchable(weight: NormalizedWeight) -> bool:
    """Whether call overhead exceeds copy cost for this weight, and it can be batched."""
    weight_norm, parametrizations = weight.parametrization, weight.parametrizations
    return (
        isinstance(weight_norm, WeightNorm)
        and isinstance(parametrizations, WeightNormParametrizationList)
        and len(parametrizations) == 1
        and weight_norm.mask is None
        and weight_norm.dim is not None
        and weight.stored.v.numel() <= MAX_ELEMENTS
    )


def _batch_key(weight: NormalizedWeight) -> Hashable:
    """Return what weights must have in common to be computed in one call."""
    (v, g), weight_norm = weight.stored, weight.parametrization
    rows = None if weight_norm.dim == 0 else v.shape[0] // weight_norm.groups
    requires_grad = v.requires_grad, g.requires_grad
    settings = weight_norm.dim, weight_norm.scale, weight_norm.eps
    return settings, rows, v.shape[1:], requires_grad, _tensor_types(weight.parametrizations)


def _tensor_types(parametrizations: Any) -> tuple[torch.dtype, torch.dtype, torch.device]:
    v, g = parametrizations._parameters["original1"], parametrizations._parameters["original0"]
    return v.dtype, g.dtype, v.device
