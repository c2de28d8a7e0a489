"""Find common mistakes with weight norm in a model and its optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm._dtensor import whole
from weightnorm._parametrize import pending_hooks
from weightnorm._units import EPS
from weightnorm.inspection import NormalizedWeight, find_normalized
from weightnorm.layers import layer_weights
from weightnorm.optimizer import WeightNormOptimizer

LONG = 1e4
"""Ratio ‖v‖/|g| above which a unit is reported: its effective step is close to 0."""
SHOWN = 4
"""Names of weights in a printed finding."""


@dataclass(frozen=True)
class Finding:
    """A probable mistake: what it is, in which weights, and what to do."""

    kind: str
    """What is probably wrong."""
    weights: tuple[str, ...]
    """The names of the weights in the model; empty if it concerns the whole model."""
    advice: str
    """What to do."""
    details: tuple[str, ...] = ()
    """What was measured in each weight, such as "3 of 8"."""

    def __str__(self) -> str:
        details = self.details or ("",) * len(self.weights)
        names = [
            f"{name} ({detail})" if detail else name
            for name, detail in zip(self.weights, details, strict=True)
        ]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        where = ", ".join(names[:SHOWN]) + more or "the model"
        return f"{where}: {self.kind}; {self.advice}"


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
    and parameters that are not trained. Weights with the same mistake are one finding. For the
    optimizer form, pass the ``WeightNormOptimizer`` itself. Costs O(parameters).

    >>> import weightnorm
    >>> model = nn.Sequential(weightnorm.weight_norm(nn.Linear(2, 3)), nn.Linear(3, 1))
    >>> print(*check(model))
    1.weight: not normalized, unlike other layers; use weight_norm_model, or ignore this if intended
    """
    optimizer = unwrapped(optimizer)
    form = optimizer if isinstance(optimizer, WeightNormOptimizer) else None
    found = list(find_normalized(model))
    findings = [*_left_out(model, found, form)]
    for weight in found:
        findings += _stale(weight)
        findings += _lengths(weight.path, weight.v_norm(), weight.parts().g, _REAPPLY)
    if form is not None:
        findings += _in_optimizer(form)
    elif optimizer is not None:
        findings += _untrained_or_decayed(found, optimizer)
    return _grouped(findings)


def _grouped(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for all weights with the same mistake."""
    groups: dict[tuple[str, str], Finding] = {}
    for each in findings:
        key = each.kind, each.advice
        before = groups.get(key, Finding(each.kind, (), each.advice))
        groups[key] = Finding(
            each.kind, before.weights + each.weights, each.advice, before.details + each.details
        )
    return [*groups.values()]


def _left_out(
    model: nn.Module, found: list[NormalizedWeight], form: WeightNormOptimizer | None
) -> Iterator[Finding]:
    names = {weight.path for weight in found}
    for path, module in model.named_modules():  # lazy layers, normalized once they have a shape
        names |= {f"{path}.{name}".lstrip(".") for name in pending_hooks(module)}
    plain = {id(weight.weight) for weight in form.normalized().values()} if form else set()
    if not (names or plain):
        advice = "apply weight_norm_model to it, or train it with a WeightNormOptimizer"
        yield Finding("no weight is normalized", (), advice)
        return
    remedy = "choose it with `where` of WeightNormOptimizer" if plain else "use weight_norm_model"
    for path, layer, name in layer_weights(model):
        if path not in names and id(layer._parameters.get(name)) not in plain:
            advice = f"{remedy}, or ignore this if intended"
            yield Finding("not normalized, unlike other layers", (path,), advice)


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
        kind = "stale: the next forward overwrites what was written to it"
        advice = "write with weightnorm.init_, or through v and g"
        yield Finding(kind, (weight.path,), advice)


_REAPPLY = "remove weight norm and apply it again to start from ‖v‖ = |g|"
_RETRACT = "keep ‖v‖ at its start with `retract`"


def _lengths(path: str, norm: Tensor, g: Tensor, remedy: str) -> Iterator[Finding]:
    norm, g = whole(norm).flatten(), whole(g).flatten().abs()
    if norm.is_meta:  # no values yet
        return
    if not (norm.isfinite().all() and g.isfinite().all()):
        advice = "load an earlier checkpoint and lower the learning rate"
        yield Finding("not finite", (path,), advice)
        return
    if dead := int(((norm <= EPS) | (g == 0)).sum()):
        kind, advice = "dead units: v or g is zero", "reinitialize them, or remove them"
        yield Finding(kind, (path,), advice, (f"{dead} of {len(norm)}",))
    longest = (norm / g.clamp_min(EPS))[g > 0]
    if len(longest) and longest.max() > LONG:
        kind = "‖v‖ is many times |g| in some units, whose effective step is close to 0"
        advice = f"lower the learning rate, or {remedy}"
        yield Finding(kind, (path,), advice, (f"up to {longest.max():.2g} times",))


def _untrained_or_decayed(
    found: list[NormalizedWeight], optimizer: torch.optim.Optimizer
) -> Iterator[Finding]:
    decay = {
        id(p): group.get("weight_decay", 0)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    for weight in found:
        parts = zip("vg", weight.stored, strict=True)
        left_out = [name for name, part in parts if part.requires_grad and id(part) not in decay]
        if left_out:
            kind = f"{' and '.join(left_out)} not in the optimizer, so not trained"
            advice = "build the optimizer after applying weight norm, from model.parameters()"
            yield Finding(kind, (weight.path,), advice)
        g = weight.stored.g
        if g.requires_grad and decay.get(id(g), 0):  # optimizers skip a frozen g
            advice = "use weightnorm.param_groups, where v and g have no weight decay"
            yield Finding(_decayed(weight.is_log), (weight.path,), advice)


def _in_optimizer(optimizer: WeightNormOptimizer) -> Iterator[Finding]:
    options = optimizer.param_groups[0]
    is_log = options["g_scale"] == "log"
    for path, weight in optimizer.normalized().items():
        yield from _lengths(path, weight.v_norm, weight.parts.g, _RETRACT)
        if weight.decay_of_g and (is_log or options["weight_decay_on"] != "g"):
            advice = 'pass weight_decay_on="w" to decay the weight, or None'
            yield Finding(_decayed(is_log), (path,), advice)


def _decayed(is_log: bool) -> str:
    """Say what weight decay does to g, or to s of a log-scale."""
    if is_log:
        return "weight decay on s = log g pulls g, the length of w, towards 1"
    return "weight decay on g pulls the length of w itself towards zero"
