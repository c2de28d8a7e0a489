"""Claims 12 and 13: data-dependent initialization (sections 3 and 5.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weightnorm import Parameterization
from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    QUALITATIVELY,
    Measured,
    Verdict,
    claim,
    exactly,
)
from weightnorm.lab.claims.context import Context
from weightnorm.layers import weight_names


@claim(
    12, "3", "After the initialization every pre-activation has mean 0 and variance 1 on the init "
    "batch, and approximately on others",
    paper="exact on the batch",
    measured="pre-activations of every unit on the 500 images of the init batch and on 500 others",
)  # fmt: skip
def unit_pre_activations(context: Context) -> Measured:
    model = context.network("weight-norm", context.seeds[0])
    own = moments(model, context.init_images(context.seeds[0]))
    others = moments(model, context.other_images(context.seeds[0]))
    numbers = {
        "init batch: largest |mean|": own[0].abs().max().item(),
        "init batch: largest |std − 1|": (own[1] - 1).abs().max().item(),
        "other batch: mean |mean|": others[0].abs().mean().item(),
        "other batch: mean |std − 1|": (others[1] - 1).abs().mean().item(),
    }
    value = ", ".join(f"{name} {value:.2g}" for name, value in numbers.items())
    return Measured(value, moments_verdict(numbers), own[0].numel(), numbers)


def moments_verdict(numbers: dict[str, float]) -> Verdict:
    """Exact on the init batch to float32 rounding; within a quarter on average on another."""
    exact = max(v for k, v in numbers.items() if k.startswith("init")) < 1e-3
    near = max(v for k, v in numbers.items() if k.startswith("other")) < 0.25
    return HOLDS if exact and near else QUALITATIVELY if exact else FAILS


@claim(
    13, "5.1", "The five parameterizations start as the same function of the init batch",
    paper="implied: all are initialized in the same way",
    measured="largest difference of a logit to the standard parameterization's",
)  # fmt: skip
def same_initial_function(context: Context) -> Measured:
    outputs = {}
    for how in Parameterization:
        model = context.network(str(how), context.seeds[0])
        with torch.no_grad():
            outputs[how] = model(context.init_images(context.seeds[0]))
    reference = outputs[Parameterization.STANDARD]
    worst = max((out - reference).abs().max().item() for out in outputs.values())
    return Measured(f"{worst:.1e}", exactly(worst, 5e-3), len(outputs), {"deviation": worst})


@torch.no_grad()
def moments(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every unit's pre-activation, layers concatenated."""
    means, stds = [], []

    def record(_: nn.Module, __: object, t: Tensor) -> None:
        axes = [0, *range(2, t.ndim)]
        means.append(t.mean(axes))
        stds.append(t.std(axes, correction=0))

    handles = [m.register_forward_hook(record) for m in model.modules() if weight_names(m)]
    model(x)
    for handle in handles:
        handle.remove()
    return torch.cat(means), torch.cat(stds)
