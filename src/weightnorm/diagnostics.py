"""Probes on a model in training: what weight norm does to its steps. All cost O(parameters)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightnorm.sharding import whole
from weightnorm.sites import sites

__all__ = ["effective_step", "weight_norms"]


@torch.no_grad()
def weight_norms(model: nn.Module) -> dict[str, Tensor]:
    """‖v‖ of every unit of every normalized weight, by name.

    Under plain gradient descent it never shrinks, and grows faster the noisier the gradient
    (section 2.1).
    """
    return {site.path: whole(site.v_norm()).flatten() for site in sites(model)}


@torch.no_grad()
def effective_step(model: nn.Module) -> dict[str, Tensor]:
    """|g|/‖v‖ of every unit, by name: what eq. 4 scales its gradient by. 0 for a zero row.

    The direction of w turns by about learning rate × (|g|/‖v‖)·‖M∇w‖/‖v‖ in one step.
    """
    norms = weight_norms(model)
    lengths = {site.path: whole(site.parts().g).flatten().abs() for site in sites(model)}
    return {path: torch.where(norms[path] == 0, 0.0, lengths[path] / norms[path]) for path in norms}
