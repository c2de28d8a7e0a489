"""Claim 25: why weight norm is slow in its first epoch, where batch norm is not.

The first steps of Adam have a common direction, so they move the means of pre-activations, by up to
lr·(g/‖v‖)·Σ|x| in a step. Mean-only batch norm removes the means. What is left of its effect if the
gradient takes the removed mean for a constant is that of the shift alone; the rest is that of the
centred gradient (eq. 8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import islice, product
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm import data_dependent_init
from weightnorm.lab import classify
from weightnorm.lab.claims.claim import (
    Context,
    Outcome,
    Statement,
    at_least,
    below,
    claim,
    figure,
    interval,
    paired,
    relative,
    series,
    weakest,
)
from weightnorm.lab.claims.problem import WRAPS
from weightnorm.lab.environment import autocast
from weightnorm.lab.records import Row

STANDARD, WEIGHT_NORM, BATCH_NORM = "standard", "weight-norm", "batch-norm"
MEAN_ONLY, BOTH = "mean-only-batch-norm", "weight-norm-mean-only"
CONSTANT = "weight-norm, means removed as constants"
ARMS = (STANDARD, WEIGHT_NORM, CONSTANT, MEAN_ONLY, BOTH, BATCH_NORM)
RATE, PROBES = 0.003, 25
FASTER = ((MEAN_ONLY, STANDARD), (BOTH, WEIGHT_NORM), (BATCH_NORM, WEIGHT_NORM))
"""Pairs of which the first has the lower error if centring matters in the first epoch."""
HALF = 0.5


@claim(
    25,
    "4",
    Statement(
        "In the first epoch weight norm shifts the means of pre-activations, and mean-only batch "
        "norm keeps them small",
        "not stated; a guess, measured on seeds that were not looked at",
        "CIFAR-10, a quarter of the width, Adam, 0.003, the first 500 steps: root mean square over "
        "units of the mean on 500 test images, relative to that of the standard deviation, average "
        "of layers and steps; weight norm + mean-only batch norm has at most half of weight norm's",
    ),
    Statement(
        "Centring makes the first epoch faster, with plain and with normalized weights",
        "not stated",
        "training error of these steps, paired by seed: mean-only batch norm below standard, "
        "weight norm + mean-only batch norm below weight norm, batch norm below weight norm",
    ),
    Statement(
        "What slows the first epoch is the shift, more than the gradient that is not centred",
        "not stated",
        "weight norm whose means are removed in the forward pass, while the gradient takes them "
        f"for constants, has at least {HALF:g} of the gain of mean-only batch norm in training "
        "error",
    ),
)
def first_epoch(context: Context) -> list[Outcome]:
    seeds = context.seeds[1:]  # on the first one rates were compared
    parts = [*product(ARMS, seeds)]
    found = dict(zip(parts, context.map(first_steps, parts), strict=True))
    by_arm = {arm: [found[arm, seed] for seed in seeds] for arm in ARMS}
    shifts = {arm: [shift(run) for run in runs] for arm, runs in by_arm.items()}
    errors = {arm: [fmean(run["errors"]) for run in runs] for arm, runs in by_arm.items()}
    smaller = relative(shifts[BOTH], shifts[WEIGHT_NORM])
    faster = {f"{a} − {b}": paired(errors[a], errors[b]) for a, b in FASTER}
    shares = [
        (plain - constant) / (plain - centred)
        for plain, constant, centred in zip(
            errors[WEIGHT_NORM], errors[CONSTANT], errors[BOTH], strict=True
        )
    ]
    share, n = interval(shares), len(seeds)
    numbers = {"shift": shifts, "error": errors, "layers": by_layer(by_arm)}
    return [
        Outcome(
            f"{means(shifts)}; relative change {smaller}",
            below(smaller, HALF - 1),
            n,
            numbers,
            # without the network whose activations grow without bound
            figures({arm: runs for arm, runs in by_arm.items() if arm != CONSTANT}),
        ),
        Outcome(
            f"{means(errors)}; " + ", ".join(f"{name} {x}" for name, x in faster.items()),
            weakest(*(below(x, 0.0) for x in faster.values())),
            n,
        ),
        Outcome(f"share of the gain: {share}", at_least(share, HALF), n, {"shares": shares}),
    ]


def means(values: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{arm} {fmean(x):.3g}" for arm, x in values.items())


Run = dict[str, Any]
"""``errors`` of every step; ``steps`` of the probes; ``mean`` and ``std``, probes × layers."""


def shift(run: Run) -> float:
    """Size of the means relative to that of the deviations, averaged over layers and probes."""
    return fmean(
        m / s
        for layers in zip(run["mean"], run["std"], strict=True)
        for m, s in zip(*layers, strict=True)
    )


def first_steps(context: Context, how: str, seed: int) -> Run:
    """Train as `classify` does in its first epoch; measure pre-activations at even intervals."""
    presets, steps = classify.PRESETS, context.size(500, 10)
    config = replace(
        context.size(presets["cpu"], presets["demo"]),
        data_dir=context.data_dir,
        precision="bfloat16",
    )
    data = load(config)
    torch.manual_seed(seed)
    model, order = network(config, how, data.train), torch.randperm(len(data.train))
    probe = data.test[: config.init_examples]
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    found: Run = {"errors": [], "steps": [], "mean": [], "std": []}
    for step, rows in enumerate(islice(order.split(config.batch_size), steps)):
        if step % max(1, steps // PROBES) == 0:
            found["steps"].append(step)
            for name, sizes in zip(("mean", "std"), moments(model, probe), strict=True):
                found[name].append(sizes)
        x, y = data.train[rows], data.train_labels[rows]
        with autocast(x.device, config.precision):
            logits = model(x.contiguous(memory_format=torch.channels_last)).float()
        optimizer.zero_grad()
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        found["errors"].append((logits.argmax(1) != y).double().mean().item())
    return found


load = cache(classify.load)


def network(config: classify.Config, how: str, images: Tensor) -> nn.Module:
    """ConvPool-CNN-C, initialized on its own random images."""
    constant = how == CONSTANT
    wrap = WRAPS[WEIGHT_NORM if constant else how]
    model: nn.Module = classify.ConvPoolCNN(wrap, width=config.width, channels=images.shape[1])
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    data_dependent_init(model, images[torch.randperm(len(images))[: config.init_examples]])
    for layer in model.modules() if constant else ():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
            layer.register_forward_hook(without_mean)
    return model


def without_mean(layer: Any, inputs: Any, t: Tensor) -> Tensor:
    """t − μ[t] + b as in mean-only batch norm, with a gradient that takes μ for a constant."""
    axes = [axis for axis in range(t.ndim) if axis != 1]
    shift = layer.bias - t.float().mean(axes)
    shifted: Tensor = t + shift.detach().to(t.dtype).view(-1, *[1] * (t.ndim - 2))
    return shifted


@torch.no_grad()
def moments(model: nn.Module, images: Tensor) -> tuple[list[float], list[float]]:
    """Return for each layer the root mean square over units of mean and standard deviation.

    Of what the nonlinearity and the loss get, in training mode but without noise and dropout.
    """
    model, found = deepcopy(model), []  # running means are not to see these images
    for module in model.modules():
        if isinstance(module, (classify.GaussianNoise, nn.Dropout)):
            module.eval()
        if isinstance(module, nn.LeakyReLU):
            module.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    found.append(model(images.contiguous(memory_format=torch.channels_last)))
    units = [t.transpose(0, 1).flatten(1) for t in found]
    return [rms(t.mean(1)) for t in units], [rms(t.std(1)) for t in units]


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def by_layer(found: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Arm → mean and std → layer → mean over seeds and probes."""
    return {
        arm: {
            name: [
                fmean(x) for x in zip(*(row for run in runs for row in run[name]), strict=True)
            ]
            for name in ("mean", "std")
        }
        for arm, runs in found.items()
    }  # fmt: skip


def figures(found: Mapping[str, Sequence[Run]]) -> list[Row]:
    """Size of means and standard deviations over the steps, and of the means in each layer."""
    panels = "First 500 steps of CIFAR-10: means and standard deviations of pre-activations"
    y = "root mean square over units"
    over_steps: dict[str, list[Row]] = {"mean": [], "std": []}
    in_layers = []
    for arm, runs in found.items():
        for name, lines in over_steps.items():
            columns = zip(*([fmean(row) for row in run[name]] for run in runs), strict=True)
            lines.append(series(arm, runs[0]["steps"], columns))
        layers = [[fmean(x) for x in zip(*run["mean"], strict=True)] for run in runs]
        in_layers.append(series(arm, range(1, len(layers[0]) + 1), zip(*layers, strict=True)))
    return [
        figure("mean, average of layers", "step", y, over_steps["mean"], panels=panels),
        figure("standard deviation", "step", y, over_steps["std"], panels=panels),
        figure("mean, average of steps", "layer", y, in_layers, panels=panels),
    ]
