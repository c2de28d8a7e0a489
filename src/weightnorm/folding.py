"""Plain weights in place of normalized ones: for a while, or for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TypeVar

import torch
from torch import nn

from weightnorm import parametrization
from weightnorm.dtensor import refuse_sharded
from weightnorm.inspection import NormalizedWeight, find_normalized

M = TypeVar("M", bound=nn.Module)

_GATHER = (
    "its v and g belong to fully_shard; gather them with get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict "
    'and use convert_state_dict(state, to="folded")'
)


def remove_weight_norm(module: nn.Module, name: str | None = None) -> list[str]:
    """Turn every normalized weight below `module` into a plain parameter of the same value.

    Takes off this library's weight norm and both of torch's. Returns the names; none is no error.
    `name` keeps to tensors of that name.

    >>> from weightnorm import weight_norm
    >>> model = nn.Sequential(weight_norm(nn.Linear(2, 3)))
    >>> remove_weight_norm(model), remove_weight_norm(model)
    (['0.weight'], [])
    """
    found = [site for site in find_normalized(module) if name in (None, site.name)]
    if found:
        refuse_sharded(module, _GATHER)
    for site in found:
        if len(site.parametrizations) > 1:
            raise ValueError(
                f"{site.path}: {type(site.parametrizations[1]).__name__} follows weight norm; "
                "remove it first with torch.nn.utils.parametrize.remove_parametrizations"
            )
    _detach(found, trainable=True)
    return [site.path for site in found]


@contextmanager
def folded(model: M) -> Iterator[M]:
    """Inside the block every normalized weight is a plain, frozen parameter; after it, v and g.

    For inference, acting and export: nothing is recomputed, and the state dict is that of a plain
    model. v and g come back bit for bit, also when the block raises; what was done to the plain
    weights is dropped.

    >>> from weightnorm import weight_norm
    >>> model = weight_norm(nn.Linear(2, 3))
    >>> with folded(model):
    ...     list(model.state_dict())
    ['weight', 'bias']
    """
    found = list(find_normalized(model))
    if found:
        refuse_sharded(model, _GATHER)
    undo = _detach(found, trainable=False)
    try:
        yield model
    finally:
        undo()


def _detach(found: list[NormalizedWeight], *, trainable: bool) -> Callable[[], None]:
    """Replace normalized tensors by parameters of the same value; the returned call undoes it."""
    tied: dict[int, nn.Parameter] = {}
    undos = []
    for module, of_module in groupby(found, key=lambda site: site.module):
        weights: dict[str, nn.Parameter] = {}
        hooked: dict[str, nn.Parameter] = {}
        for site in of_module:
            v, g = site.stored
            if id(v) not in tied:  # tied weights share v, and stay tied
                grad = trainable and (v.requires_grad or g.requires_grad)
                with torch.no_grad():
                    tied[id(v)] = nn.Parameter(site.weight(), requires_grad=grad)
            (hooked if site.parametrization is None else weights)[site.name] = tied[id(v)]
        if weights:
            undos.append(parametrization.detach(module, weights))
        undos.extend(parametrization.detach_hook(module, n, w) for n, w in hooked.items())

    def undo() -> None:
        for step in reversed(undos):
            step()

    return undo
