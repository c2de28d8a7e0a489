"""What usually goes wrong with weight norm, found by looking at a model and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from weightnorm.functional import EPS
from weightnorm.inspection import NormalizedWeight, find_normalized
from weightnorm.layers import chosen_weights

LONG = 1e4
"""‖v‖ so many times |g| that the effective step is all but gone."""


@dataclass(frozen=True)
class Finding:
    """Something that is probably not as it was meant."""

    kind: str
    weight: str
    """Name in the model."""
    advice: str

    def __str__(self) -> str:
        return f"{self.weight}: {self.kind}; {self.advice}"


@torch.no_grad()
def check(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Finding]:
    """Everything suspicious about the normalized weights of a model; empty if nothing is.

    With the optimizer it also finds weight decay on g, and parameters that it does not train. Costs
    O(parameters).

    >>> import weightnorm
    >>> model = nn.Sequential(weightnorm.weight_norm(nn.Linear(2, 3)), nn.Linear(3, 1))
    >>> print(*check(model))
    1.weight: not normalized, unlike other layers; use weight_norm_model, or ignore this if meant
    """
    found = list(find_normalized(model))
    findings = [*_left_out(model, found)]
    for site in found:
        findings += [*_stale(site), *_lengths(site)]
    if optimizer is not None:
        findings += [*_optimizer(found, optimizer)]
    return findings


def _left_out(model: nn.Module, found: list[NormalizedWeight]) -> Iterator[Finding]:
    names = {site.path for site in found}
    if not names:
        yield Finding("no weight is normalized", "the model", "apply weight_norm_model to it")
        return
    for path, _, _ in chosen_weights(model):
        if path not in names:
            yield Finding(
                "not normalized, unlike other layers",
                path,
                "use weight_norm_model, or ignore this if meant",
            )


def _stale(site: NormalizedWeight) -> Iterator[Finding]:
    """torch's older flavour keeps w as an attribute that its next forward overwrites.

    After a step of the optimizer it is behind v and g; that is harmless, and nobody has written."""
    kept = site.module.__dict__.get(site.name)
    if site.parametrization is not None or kept is None or kept._version == 0:
        return
    if not torch.allclose(kept, site.weight()):
        yield Finding(
            "stale: what was written to it will be lost at the next forward",
            site.path,
            "write with weightnorm.init_, or through v and g",
        )


def _lengths(site: NormalizedWeight) -> Iterator[Finding]:
    norm, g = site.v_norm().flatten(), site.parts().g.flatten().abs()
    if not (norm.isfinite().all() and g.isfinite().all()):
        yield Finding("not finite", site.path, "go back to an earlier checkpoint, lower the rate")
        return
    if dead := int(((norm <= EPS) | (g == 0)).sum()):
        yield Finding(
            f"{dead} of {len(norm)} units dead: v or g is zero",
            site.path,
            "initialize them again, or remove them",
        )
    longest = (norm / g.clamp_min(EPS))[g > 0]
    if len(longest) and longest.max() > LONG:
        yield Finding(
            f"‖v‖ is up to {longest.max():.2g} times |g|: these units hardly learn any more",
            site.path,
            "lower the learning rate, or fold and apply weight_norm again to start from ‖v‖ = |g|",
        )


def _optimizer(
    found: list[NormalizedWeight], optimizer: torch.optim.Optimizer
) -> Iterator[Finding]:
    decay = {
        id(p): group.get("weight_decay", 0)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for site in found:
        parts = zip("vg", site.stored, strict=True)
        left_out = [name for name, part in parts if part.requires_grad and id(part) not in decay]
        if left_out:
            yield Finding(
                f"{' and '.join(left_out)} not in the optimizer, so not trained",
                site.path,
                "make the optimizer after weight norm, from model.parameters()",
            )
        if decay.get(id(site.stored.g), 0):
            yield Finding(
                "weight decay on g pulls the length of w itself towards zero",
                site.path,
                "put g in a parameter group with weight_decay=0 (decay on v leaves w as it is)",
            )
