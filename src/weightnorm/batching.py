"""Many small weights in a few calls: for models whose layers are many and small."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch import nn
from torch.nn.utils import parametrize

from weightnorm import kernels
from weightnorm.dtensor import is_sharded
from weightnorm.inspection import NormalizedWeight, find_normalized
from weightnorm.parametrization import Originals, WeightNorm

SMALL = 2**15
"""Up to so many numbers a weight costs more to call than to copy (on a CPU)."""


def batched_weights(model: nn.Module) -> BatchedWeights:
    """A context in which the small weights of a model are computed all at once, and once.

    A vocoder has dozens of small convolutions. Computing each of their weights takes several calls
    into torch, which cost more than the work they do. Entered, this joins weights of like shape,
    computes them by one call for each shape, and hands them to the layers; gradients reach v and g
    as ever. Make it once and enter it around each forward pass:

    >>> from weightnorm import weight_norm_model
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    >>> _ = weight_norm_model(model)
    >>> weights = batched_weights(model)
    >>> with weights:
    ...     loss = model(torch.ones(1, 2)).sum()
    >>> loss.backward()

    Within it every parametrized tensor is computed once, as within
    ``torch.nn.utils.parametrize.cached()``: do not step the optimizer inside. Large, masked and
    sharded weights are computed at their layers. The gradients of joined weights come at the end of
    the backward pass, all at once, so DistributedDataParallel cannot send them meanwhile. A
    compiled model gains nothing: the compiler joins calls itself.
    """
    return BatchedWeights(model)


class BatchedWeights(AbstractContextManager[None]):
    """See ``batched_weights``."""

    def __init__(self, model: nn.Module) -> None:
        alike: dict[Hashable, dict[int, list[NormalizedWeight]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for site in find_normalized(model):
            if _joins(site):
                alike[_likeness(site)][id(site.parametrizations)].append(
                    site
                )  # tied: several of one weight
        self._groups = [_Group([*tied.values()]) for tied in alike.values() if len(tied) > 1]
        self._caches: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        cache = parametrize.cached()
        cache.__enter__()
        self._caches.append(cache)
        try:
            for group in self._groups:
                group.compute()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._caches.pop().__exit__(kind, error, trace)


class _Group:
    """Weights that are one weight when joined along their first axis.

    Where units lie along the first axis, so do all units of the joined weight. Elsewhere it is a
    weight with the groups of all of them, as a grouped transposed convolution has.
    """

    def __init__(self, tied: list[list[NormalizedWeight]]) -> None:
        first = [sites[0] for sites in tied]
        self.held = [site.parametrizations._parameters for site in first]
        self.rows = [site.stored.v.shape[0] for site in first]
        self.map: WeightNorm = first[0].parametrization
        self.groups = sum(site.parametrization.groups for site in first) if self.map.dim else 1
        self.places = [[(id(site.module), site.name) for site in sites] for sites in tied]
        self.tied = tied  # so that no id passes to another module

    def compute(self) -> None:
        """Put every weight where its layers look for it."""
        v = [held["original1"] for held in self.held]
        if any(map(is_sharded, v)):
            return
        g = self.map.length(torch.cat([held["original0"] for held in self.held]))
        joined = kernels.compose(torch.cat(v), g, self.map.dim, self.groups, self.map.eps)
        for places, w in zip(self.places, joined.split(self.rows), strict=True):
            for place in places:
                parametrize._cache.setdefault(place, w)


def _joins(site: NormalizedWeight) -> bool:
    """Whether it pays to join this weight to others, and nothing stands against it."""
    map_, chain = site.parametrization, site.parametrizations
    return (
        isinstance(map_, WeightNorm)
        and isinstance(chain, Originals)
        and len(chain) == 1
        and map_.mask is None
        and map_.dim is not None
        and site.stored.v.numel() <= SMALL
    )


def _likeness(site: NormalizedWeight) -> Hashable:
    """What weights must have in common to be one weight when joined."""
    (v, g), map_ = site.stored, site.parametrization
    rows = None if map_.dim == 0 else v.shape[0] // map_.groups
    trained = v.requires_grad, g.requires_grad
    kind = v.dtype, g.dtype, v.device
    return map_.dim, rows, v.shape[1:], map_.scale, map_.eps, trained, kind
