"""Compute many small normalized weights in a few batched calls."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Hashable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm import kernels
from weightnorm.arguments import check_module
from weightnorm.dtensor import is_sharded
from weightnorm.inspection import NormalizedWeight, find_normalized
from weightnorm.parametrization import (
    WeightNorm,
    cache_weight,
    cached_weights,
    is_plain,
    read_cached,
)

MAX_ELEMENTS = 2**15
"""Largest weight that is batched on a CPU: up to this size, call overhead exceeds copy cost."""
MAX_BYTES = 2**26
"""Total size of the weights that are batched on an accelerator, smallest first: copies are cheap
there, but take memory until the backward pass."""


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
    changes. Large, masked and sharded weights are computed when their layers read them. All
    gradients of batched weights arrive at the end of the backward pass, so DistributedDataParallel
    cannot overlap their communication with it. A compiled model does not run faster: the compiler
    fuses these calls itself. With activation checkpointing (``use_reentrant=False``) call
    ``backward`` inside the block too, since it repeats a part of the forward pass. With FSDP2
    enter the block anew for each forward pass: a change of its parameters is not noticed inside.

    Threads: the block affects only the thread that entered it, and several threads may enter the
    same context manager. Weight norm may be removed and applied again between two blocks.
    """
    check_module(model, "batched_weights")
    return BatchedWeights(model)


class BatchedWeights(AbstractContextManager[None]):
    """The context manager that ``batched_weights`` returns."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._batches: list[_Batch] | None = _batches_of(model)
        self._thread = threading.local()  # the blocks that a thread is in

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle of a model that holds one."""
        return {"_model": self._model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._batches, self._thread = None, threading.local()

    def __enter__(self) -> None:
        block = cached_weights()
        block.__enter__()
        try:
            # A local variable: another thread may exchange the attribute meanwhile.
            batches = self._batches
            if batches is None or not all(batch.is_current() for batch in batches):
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
    found = [weight for weight in find_normalized(model) if _is_batchable(weight)]
    for weight in _worth_copying(found):  # tied weights share one list of parametrizations
        by_key[_batch_key(weight)][id(weight.parametrizations)] = weight
    batches = (sorted(weights.values(), key=_row_length) for weights in by_key.values())
    return [_Batch(weights) for weights in batches if len(weights) > 1]


def _worth_copying(weights: list[NormalizedWeight]) -> list[NormalizedWeight]:
    """Select the weights for which single kernel launches cost more than copying."""
    chosen, left = [], MAX_BYTES
    for weight in sorted(weights, key=lambda weight: weight.stored.v.numel()):
        v = weight.stored.v
        if kernels.on_accelerator(v):
            left -= v.numel() * v.element_size()
            chosen += [weight] if left >= 0 else []
        elif v.numel() <= MAX_ELEMENTS:
            chosen.append(weight)
    return chosen


class _Batch:
    """Weights that can be computed as one weight, concatenated along axis 0.

    If the kept axis is 0, the units of all of them lie along axis 0 of the concatenation. Otherwise
    the concatenation is a weight with the groups of all of them, as a grouped transposed
    convolution has. On an accelerator, weights with kept axis 0 need not have the same shape: they
    are concatenated flat.
    """

    def __init__(self, weights: list[NormalizedWeight]) -> None:
        self.weights = weights
        self.parametrizations: list[Any] = [weight.parametrizations for weight in weights]
        self.weight_norm: WeightNorm = weights[0].parametrization
        self.groups = sum(w.parametrization.groups for w in weights) if self.weight_norm.dim else 1
        self.key = _tensor_types(self.parametrizations[0])
        self.rows: kernels.Rows | None = None
        if _is_flat(weights[0]):
            rows: dict[int, int] = defaultdict(int)  # how many of each length, ascending
            for weight in weights:
                rows[_row_length(weight)] += weight.stored.v.shape[0]
            self.rows = kernels.flat_rows([*rows.values()], [*rows], self.key[2])

    def is_current(self) -> bool:
        """Whether these are still the parametrizations of their modules, of one type of tensor."""
        for weight, parametrizations in zip(self.weights, self.parametrizations, strict=True):
            registered: Any = weight.module._modules.get("parametrizations")
            if (
                registered is None
                or registered._modules.get(weight.name) is not parametrizations
                or not is_plain(parametrizations)
                or _tensor_types(parametrizations) != self.key
            ):
                return False
        return True

    def compute(self) -> None:
        """Compute all weights and put them into this thread's cache."""
        if all(read_cached(each) is not None for each in self.parametrizations):  # an outer block
            return
        v = [each._parameters["original1"] for each in self.parametrizations]
        g = [each._parameters["original0"] for each in self.parametrizations]
        if any(map(is_sharded, v)):
            return
        for each, weight in zip(self.parametrizations, self._computed(v, g), strict=True):
            cache_weight(each, weight)

    def _computed(self, v: list[Tensor], g: list[Tensor]) -> list[Tensor]:
        if self.rows is None:
            w = kernels.compose(
                v=torch.cat(v),
                g=self.weight_norm.length(torch.cat(g)),
                dim=self.weight_norm.dim,
                groups=self.groups,
                eps=self.weight_norm.eps,
            )
            return [*w.split([part.shape[0] for part in v])]
        lengths = self.weight_norm.length(torch.cat([part.flatten() for part in g]))
        flat = kernels.fused_flat(
            v=torch.cat([part.flatten() for part in v]),
            g=lengths.unsqueeze(1),
            rows=self.rows,
            eps=self.weight_norm.eps,
        )
        pieces = flat.split([part.numel() for part in v])
        return [piece.view_as(part) for piece, part in zip(pieces, v, strict=True)]


def _is_batchable(weight: NormalizedWeight) -> bool:
    """Whether this weight can be computed in one call with others."""
    weight_norm, parametrizations = weight.parametrization, weight.parametrizations
    return (
        isinstance(weight_norm, WeightNorm)
        and is_plain(parametrizations)
        and weight_norm.mask is None
        and weight_norm.dim is not None
    )


def _batch_key(weight: NormalizedWeight) -> Hashable:
    """Return what weights must have in common to be computed in one call."""
    (v, g), weight_norm = weight.stored, weight.parametrization
    rows = None if weight_norm.dim == 0 else v.shape[0] // weight_norm.groups
    requires_grad = v.requires_grad, g.requires_grad
    settings = weight_norm.dim, weight_norm.scale, weight_norm.eps
    shape = None if _is_flat(weight) else (rows, v.shape[1:])
    return settings, shape, requires_grad, _tensor_types(weight.parametrizations)


def _is_flat(weight: NormalizedWeight) -> bool:
    """Whether this weight can be concatenated with weights of other shapes."""
    v, g = weight.stored
    return (
        weight.parametrization.dim == 0
        and v.numel() > 0
        and v.dtype is g.dtype
        and kernels.on_accelerator(v)
        and kernels.is_differentiated_by_autograd(v)
        and kernels.has_fused_kernel(v.device.type)
    )


def _row_length(weight: NormalizedWeight) -> int:
    return math.prod(weight.stored.v.shape[1:])


def _tensor_types(parametrizations: Any) -> tuple[torch.dtype, torch.dtype, torch.device]:
    v, g = parametrizations._parameters["original1"], parametrizations._parameters["original0"]
    return v.dtype, g.dtype, v.device
