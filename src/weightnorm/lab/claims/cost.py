"""Claims 16 and 17: cost in time and memory (sections 5.1 and 2)."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    NOT_SHOWN,
    QUALITATIVELY,
    Measured,
    Verdict,
    claim,
)
from weightnorm.lab.claims.context import Context
from weightnorm.lab.interleaved import interleaved
from weightnorm.lab.statistics import Interval, mean_interval

PARAMETERIZATIONS = ("standard", "weight-norm", "batch-norm")
NOT_NOTICEABLE = 1.05


@claim(
    16, "5.1", "A step is 16 % slower with batch norm, and not noticeably with weight norm",
    paper="1.16 and about 1",
    measured="step time relative to standard, interleaved; full: the paper's network and batch, on "
    "this machine",
)  # fmt: skip
def step_time(context: Context) -> Measured:
    context = context.at_full_size
    rounds, shortest = (8, 0.02) if context.quick else (20, 0.0)
    steps = {how: _training_step(context, how) for how in PARAMETERIZATIONS}
    seconds = interleaved(steps, rounds, shortest=shortest, on_round=context.parts.progress)
    ratios = {
        how: mean_interval([a / b for a, b in zip(seconds[how], seconds["standard"], strict=True)])
        for how in PARAMETERIZATIONS[1:]
    }
    text = ", ".join(f"{how} {ratio}" for how, ratio in ratios.items())
    value = f"{text}; standard {1000 * median(seconds['standard']):.3g} ms"
    verdict = time_verdict(ratios["weight-norm"], ratios["batch-norm"])
    return Measured(value, verdict, rounds, {"ratios": ratios, "seconds": seconds})


def _training_step(context: Context, how: str) -> Callable[[], None]:
    model = context.network(how, context.seeds[0], noise=True, width=1.0)
    optimizer = torch.optim.Adam(model.parameters())
    rows = torch.arange(100)

    def step() -> None:
        optimizer.zero_grad()
        context.loss(model, rows).backward()
        optimizer.step()

    return step


def time_verdict(weight_norm: Interval, batch_norm: Interval) -> Verdict:
    """Holds if weight norm's interval lies below 1.05 and batch norm's above; qualitatively if it
    lies below batch norm's; does not hold if it lies above 1.05, or batch norm's below."""
    if weight_norm.high <= NOT_NOTICEABLE < batch_norm.low:
        return HOLDS
    if weight_norm.high < batch_norm.low:
        return QUALITATIVELY
    excluded = weight_norm.low > NOT_NOTICEABLE or batch_norm.high <= NOT_NOTICEABLE
    return FAILS if excluded else NOT_SHOWN


@claim(
    17, "2", "Weight norm keeps no additional activations",
    paper="no additional memory per example",
    measured="bytes saved for the backward pass beyond standard, at 50 and at 100 examples",
)  # fmt: skip
def memory(context: Context) -> Measured:
    saved = {}
    for batch in (50, 100):
        for how in PARAMETERIZATIONS:
            saved[how, batch] = saved_bytes(context, context.network(how, context.seeds[0]), batch)
    extra = {
        how: [saved[how, batch] - saved["standard", batch] for batch in (50, 100)]
        for how in PARAMETERIZATIONS[1:]
    }
    standard = context.network("standard", 1)
    weights = sum(p.numel() * p.element_size() for p in standard.parameters())
    text = ", ".join(f"{how} {a:,} and {b:,}" for how, (a, b) in extra.items())
    value = f"{text}; the weights are {weights:,}"
    return Measured(value, memory_verdict(extra["weight-norm"], weights), 2, {**extra})


def memory_verdict(extra: list[int], weights: int) -> Verdict:
    """Holds if the extra bytes do not depend on the batch and are at most three copies of the
    weights."""
    return HOLDS if len(set(extra)) == 1 and extra[0] <= 3 * weights else FAILS


def saved_bytes(context: Context, model: nn.Module, batch: int) -> int:
    """Bytes that autograd saves from the forward for the backward pass; each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = context.loss(model, torch.arange(batch))
    loss.backward()
    return sum(storages.values())
