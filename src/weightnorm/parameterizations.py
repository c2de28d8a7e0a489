"""The five parameterizations of a layer that the paper compares (section 5.1)."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torch import nn

from weightnorm._distributed import Group
from weightnorm.mean_only import mean_only_batch_norm, norm_rank, unit_count
from weightnorm.module_form import weight_norm


class Parameterization(str, Enum):
    """Parameterization of a layer's weight and normalization of its pre-activations."""

    STANDARD = "standard"
    BATCH_NORM = "batch-norm"
    WEIGHT_NORM = "weight-norm"
    MEAN_ONLY_BATCH_NORM = "mean-only-batch-norm"
    WEIGHT_NORM_MEAN_ONLY = "weight-norm-mean-only"

    def __str__(self) -> str:
        return self.value

    @property
    def normalizes_weights(self) -> bool:
        """Whether the layer has weight norm."""
        return self in (Parameterization.WEIGHT_NORM, Parameterization.WEIGHT_NORM_MEAN_ONLY)

    @property
    def uses_batch(self) -> bool:
        """Whether an example's output depends on the others in its batch during training."""
        return self not in (Parameterization.STANDARD, Parameterization.WEIGHT_NORM)


def parameterize(
    layer: nn.Module, how: Parameterization | str, *, group: Group = None
) -> nn.Module:
    """Apply one of the five parameterizations; return the layer or a module around it.

    The layer is changed in place. After ``data_dependent_init`` from the same weights, all five
    compute the same function of the init batch in training mode.

    - standard: w and b, trained directly
    - batch-norm: γ·(t − μ[t])/σ[t] + β over t = w·x, with the paper's ε = 10⁻⁶
    - weight-norm: w = g·v/‖v‖
    - mean-only-batch-norm: t − μ[t] + b
    - weight-norm-mean-only: both of the last two

    With a process `group`, batch statistics are taken over all its ranks.

    >>> [type(part).__name__ for part in parameterize(nn.Linear(2, 3), "batch-norm")]
    ['Linear', 'BatchNorm1d']
    """
    if how not in list(Parameterization):
        names = ", ".join(map(str, Parameterization))
        raise ValueError(f"how={how!r} is unknown; expected one of {names}")
    how = Parameterization(how)
    if how.uses_batch:
        norm_rank(layer)  # raises for layers without batch statistics, before anything changes
    if how.normalizes_weights:
        weight_norm(layer)
    if how is Parameterization.BATCH_NORM:
        return _batch_norm(layer, group)
    return mean_only_batch_norm(layer, group=group) if how.uses_batch else layer


def _batch_norm(layer: nn.Module, group: Group) -> nn.Module:
    """Return the layer followed by batch normalization, whose β replaces the layer's bias."""
    cls = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[norm_rank(layer)]
    like: Any = layer.weight
    norm: nn.Module = cls(unit_count(layer), eps=1e-6, device=like.device, dtype=like.dtype)
    layer.register_parameter("bias", None)
    if group is not None:  # torch synchronizes it on GPUs only
        norm = nn.SyncBatchNorm.convert_sync_batchnorm(norm, group)
    return nn.Sequential(layer, norm.train(layer.training))
