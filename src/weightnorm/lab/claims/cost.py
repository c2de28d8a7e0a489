"""Claims 16 and 17: what weight norm costs in time and memory (section 5.1, section 2)."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor, nn

from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    QUALITATIVELY,
    Interval,
    Measured,
    Verdict,
    bootstrap,
    claim,
)
from weightnorm.lab.claims.context import Workbench

WAYS = ("standard", "weight-norm", "batch-norm")
NOT_NOTICEABLE = 1.05


@claim(
    16, "5.1", "A step is 16 % slower with batch norm, and not noticeably with weight norm",
    paper="1.16 and about 1",
    measured="step time relative to standard, in turns within one run; full: the paper's network "
    "and batch, on this machine",
)  # fmt: skip
def step_time(bench: Workbench) -> Measured:
    """Interleaved, so that whatever else the machine does hits all alike."""
    bench = bench.at_full_size
    rounds, inner = (8, 5) if bench.quick else (7, 1)
    models = {way: bench.network(way, bench.seeds[0], noise=True, width=1.0) for way in WAYS}
    optimizers = {way: torch.optim.Adam(m.parameters()) for way, m in models.items()}
    rows = torch.arange(100)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way, model in models.items():
            began = time.perf_counter()
            for _ in range(inner):
                optimizers[way].zero_grad()
                bench.loss(model, rows).backward()
                optimizers[way].step()
            if turn:  # warmed up
                seconds[way].append((time.perf_counter() - began) / inner)
        bench.crew.tell(turn + 1, rounds + 1)
    ratios = {
        way: bootstrap([a / b for a, b in zip(seconds[way], seconds["standard"], strict=True)])
        for way in WAYS[1:]
    }
    said = ", ".join(f"{way} {ratio}" for way, ratio in ratios.items())
    value = f"{said}; standard {1000 * median(seconds['standard']):.3g} ms"
    verdict = time_verdict(ratios["weight-norm"], ratios["batch-norm"])
    return Measured(value, verdict, rounds, {"ratios": ratios, "seconds": seconds})


def time_verdict(weight_norm: Interval, batch_norm: Interval) -> Verdict:
    """Weight norm's interval lies below 5 % and batch norm's above; qualitatively if only the
    order holds."""
    if weight_norm.high <= NOT_NOTICEABLE < batch_norm.low:
        return HOLDS
    return QUALITATIVELY if weight_norm.high < batch_norm.low else FAILS


@claim(
    17, "2", "Weight norm keeps no additional activations",
    paper="no additional memory per example",
    measured="bytes kept for the backward pass beyond standard, at 50 and at 100 examples",
)  # fmt: skip
def memory(bench: Workbench) -> Measured:
    """Bytes that autograd keeps from the forward to the backward pass, beside the parameters."""
    kept = {}
    for batch in (50, 100):
        for way in WAYS:
            kept[way, batch] = saved_bytes(bench, bench.network(way, bench.seeds[0]), batch)
    extra = {
        way: [kept[way, batch] - kept["standard", batch] for batch in (50, 100)] for way in WAYS[1:]
    }
    weights = sum(p.numel() * p.element_size() for p in bench.network("standard", 1).parameters())
    said = ", ".join(f"{way} {a:,} and {b:,}" for way, (a, b) in extra.items())
    value = f"{said}; the weights are {weights:,}"
    return Measured(value, memory_verdict(extra["weight-norm"], weights), 2, {**extra})


def memory_verdict(extra: list[int], weights: int) -> Verdict:
    """The same at both batch sizes, and no more than a few copies of the weights."""
    return HOLDS if len(set(extra)) == 1 and extra[0] <= 3 * weights else FAILS


def saved_bytes(bench: Workbench, model: nn.Module, batch: int) -> int:
    """Each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = bench.loss(model, torch.arange(batch))
    loss.backward()
    return sum(storages.values())
