"""Find common mistakes with weight norm in a model and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm._dtensor import whole
from weightnorm._parametrize import pending_hooks
from weightnorm._units import EPS
from weightnorm.inspection import NormalizedWeight, find_normalized
from weightnorm.layers import layer_weights
from weightnorm.optimizer import NormalizedInOptimizer, WeightNormOptimizer

LONG = 1e4
"""Ratio ‖v‖/|g| above which a unit is reported: its effective step is close to 0."""


@dataclass(frozen=True)
class Finding:
    """A probable mistake: what it is, in which weight, and what to do."""

    kind: str
    """What is probably wrong."""
    weight: str
    """The name of the weight in the model."""
    advice: str
    """What to do."""

    def __str__(self) -> str:
        return f"{self.weight}: {self.kind}; {self.advice}"


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a framework's wrapper (accelerate's, Lightning's), which has its
    parameter groups but not its hooks and methods."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


@torch.no_grad()
def check(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Finding]:
    """Return the probable mistakes in the normalized weights of a model; empty if there are none.

    Finds weights that were left out, stale writes (to the attribute of torch's older hook), dead
    units, and units whose effective step is close to 0; given the optimizer, also weight decay on g
    and parameters that are not trained. For the optimizer form, pass the ``WeightNormOptimizer``
    itself. Costs O(parameters).

    >>> import weightnorm
    >>> model = nn.Sequential(weightnorm.weight_norm(nn.Linear(2, 3)), nn.Linear(3, 1))
    >>> print(*check(model))
    1.weight: not normalized, unlike other layers; use weight_norm_model, or ignore this if intended
    """
    if optimizer is not None:
        optimizer = unwrapped(optimizer)
    found = list(find_normalized(model))
    in_optimizer = optimizer.normalized() if isinstance(optimizer, WeightNormOptimizer) else {}
    findings = [*_left_out(model, found, in_optimizer)]
    for weight in found:
        findings += [*_stale(weight), *_lengths(weight.path, weight.v_norm(), weight.parts().g)]
    if isinstance(optimizer, WeightNormOptimizer):
        options = optimizer.param_groups[0]
        is_log = options["g_scale"] == "log"
        for path, each in in_optimizer.items():
            findings += [*_lengths(path, each.v_norm, each.parts.g)]
            if each.decay_of_g and (is_log or options["weight_decay_on"] != "g"):
                advice = 'pass weight_decay_on=None, or "w" if that is intended'
                findings.append(Finding(_decayed(is_log), path, advice))
    elif optimizer is not None:
        findings += [*_optimizer(found, optimizer)]
    return findings


def _left_out(
    model: nn.Module,
    found: list[NormalizedWeight],
    in_optimizer: dict[str, NormalizedInOptimizer],
) -> Iterator[Finding]:
    names = {weight.path for weight in found}
    for path, module in model.named_modules():  # lazy layers, normalized once they have a shape
        names |= {f"{path}.{name}".lstrip(".") for name in pending_hooks(module)}
    plain = {id(weight.weight) for weight in in_optimizer.values()}
    if not (names or plain):
        yield Finding("no weight is normalized", "the model", "apply weight_norm_model to it")
        return
    for path, layer, name in layer_weights(model):
        if path not in names and id(layer._parameters.get(name)) not in plain:
            yield Finding(
                "not normalized, unlike other layers",
                path,
                "use weight_norm_model, or ignore this if intended",
            )


def _stale(weight: NormalizedWeight) -> Iterator[Finding]:
    """Find writes to w under torch's hook, which overwrites the attribute in the next forward.

    After an optimizer step the attribute is also out of date, but that is not a user write: its
    version is 0, and those of v and g are not. (A write through ``.data`` changes no version.)
    """
    attribute = weight.module.__dict__.get(weight.name)
    if weight.parametrization is not None or attribute is None or attribute.is_inference():
        return
    if attribute._version == 0 and any(part._version for part in weight.stored):
        return
    if not (attribute.is_meta or torch.allclose(attribute, weight.weight().to(attribute))):
        yield Finding(
            "stale: the next forward overwrites what was written to it",
            weight.path,
            "write with weightnorm.init_, or through v and g",
        )


def _lengths(path: str, norm: Tensor, g: Tensor) -> Iterator[Finding]:
    norm, g = whole(norm).flatten(), whole(g).flatten().abs()
    if norm.is_meta:  # no values yet
        return
    if not (norm.isfinite().all() and g.isfinite().all()):
        yield Finding("not finite", path, "load an earlier checkpoint and lower the learning rate")
        return
    if dead := int(((norm <= EPS) | (g == 0)).sum()):
        yield Finding(
            f"{dead} of {len(norm)} units dead: v or g is zero",
            path,
            "reinitialize them, or remove them",
        )
    longest = (norm / g.clamp_min(EPS))[g > 0]
    if len(longest) and longest.max() > LONG:
        yield Finding(
            f"‖v‖ is up to {longest.max():.2g} times |g|: their effective step is close to 0",
            path,
            "lower the learning rate, or fold and apply weight_norm again to start from ‖v‖ = |g|",
        )


def _weight_decay(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Return the weight decay of each parameter, by its id."""
    return {
        id(p): group.get("weight_decay", 0)
        for group in optimizer.param_groups
        for p in group["params"]
    }


def _optimizer(
    found: list[NormalizedWeight], optimizer: torch.optim.Optimizer
) -> Iterator[Finding]:
    decay = _weight_decay(optimizer)
    for weight in found:
        parts = zip("vg", weight.stored, strict=True)
        left_out = [name for name, part in parts if part.requires_grad and id(part) not in decay]
        if left_out:
            yield Finding(
                f"{' and '.join(left_out)} not in the optimizer, so not trained",
                weight.path,
                "build the optimizer after applying weight norm, from model.parameters()",
            )
        g = weight.stored.g
        if g.requires_grad and decay.get(id(g), 0):  # optimizers skip a frozen g
            yield Finding(
                _decayed(weight.is_log),
                weight.path,
                "put v and g in a parameter group with weight_decay=0",
            )


def _decayed(log: bool) -> str:
    """What weight decay does to g, or to s of a log-scale."""
    if log:
        return "weight decay on s = log g pulls g, the length of w, towards 1"
    return "weight decay on g pulls the length of w itself towards zero"
