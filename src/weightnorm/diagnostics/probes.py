"""Measurements of normalized weights during training. Each costs O(parameters)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightnorm._dtensor import whole
from weightnorm.inspection import find_normalized


@torch.no_grad()
def v_norms(model: nn.Module) -> dict[str, Tensor]:
    """Return ‖v‖ of every unit of every normalized weight, by name.

    Under gradient descent it never decreases, and it grows faster with noisier gradients
    (section 2.1).
    """
    return {weight.path: whole(weight.v_norm()).flatten() for weight in find_normalized(model)}


@torch.no_grad()
def effective_step(model: nn.Module) -> dict[str, Tensor]:
    """Return ``|g|/‖v‖`` of every unit by name: the scale of ∇v in eq. 4. 0 for a zero row.

    A step with learning rate lr changes the direction of w by about ``lr·|g|·‖M∇w‖/‖v‖²`` radians.
    """
    norms = v_norms(model)
    lengths = {w.path: whole(w.parts().g).flatten().abs() for w in find_normalized(model)}
    return {path: torch.where(norms[path] == 0, 0.0, lengths[path] / norms[path]) for path in norms}
