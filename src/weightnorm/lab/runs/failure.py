"""What to look at when a run broke."""

from __future__ import annotations

from torch import nn

from weightnorm.diagnostics import unit_weights


def longest(model: object, count: int = 5) -> str:
    """The weights with the longest units, each with that unit's norm."""
    weights = unit_weights(model) if isinstance(model, nn.Module) else {}
    norms = {name: w.norm(dim=1).max().item() for name, w in weights.items()}
    # Those that are not numbers first.
    names = sorted(norms, key=lambda name: (norms[name] == norms[name], -norms[name]))
    return ", ".join(f"{name} {norms[name]:.4g}" for name in names[:count])
