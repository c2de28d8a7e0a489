"""Bytes that a training step sends between ranks:
`python -m weightnorm.lab.bench.cases.traffic --ranks 1 2 4 --out traffic.json`.

Two independent counts: the sizes of the tensors given to collectives, and the bytes that the
operating system saw each rank write to its sockets (``wchar`` of /proc/self/io; nothing else is
written during the steps). Neither depends on the load of the machine.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weightnorm import Parameterization, parameterize
from weightnorm.lab.bench.cases.synced_batch_norm import SyncedBatchNorm
from weightnorm.lab.bench.messages import StepTraffic, estimated_table, measured_table
from weightnorm.lab.bench.processes import call_all, on_ranks
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN, Wrap
from weightnorm.lab.records import write_json
from weightnorm.lab.runs.environment import environment
from weightnorm.lab.runs.ranks import Ranks

STEPS = 3
"""Number of steps to average over; all send the same."""

PARAMETERIZATIONS = (
    Parameterization.STANDARD,
    Parameterization.WEIGHT_NORM,
    Parameterization.WEIGHT_NORM_MEAN_ONLY,
    Parameterization.BATCH_NORM,
)


class FeedForward(nn.Sequential):
    """Feed-forward blocks of a transformer: x + W₂·gelu(W₁·x)."""

    def __init__(self, wrap: Wrap, size: int = 512, hidden: int = 2048, blocks: int = 6) -> None:
        super().__init__(*(_Residual(wrap, size, hidden) for _ in range(blocks)))


class _Residual(nn.Module):
    def __init__(self, wrap: Wrap, size: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = wrap(nn.Linear(size, hidden)), wrap(nn.Linear(hidden, size))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


MODELS: dict[str, tuple[Callable[[Wrap], nn.Module], tuple[int, ...]]] = {
    "ConvPool-CNN-C": (ConvPoolCNN, (3, 32, 32)),
    "feed-forward": (FeedForward, (512,)),
}
"""Network and shape of an example."""


def wrapped(layer: nn.Module, how: Parameterization, ranks: Ranks) -> nn.Module:
    """Apply a parameterization with batch statistics over all ranks."""
    if how is not Parameterization.BATCH_NORM or ranks.group is None:
        return parameterize(layer, how, group=ranks.group)
    plain: Any = parameterize(layer, how)
    return nn.Sequential(plain[0], SyncedBatchNorm(plain[1].num_features, plain[1].eps))


@contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """Count the bytes given to each collective, and the calls."""
    count: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}

    def counting(name: str, *args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if name == "all_reduce" else args[1]
        count.update({name: tensor.numel() * tensor.element_size(), f"{name} calls": 1})
        return originals[name](*args, **kwargs)

    for name in originals:
        setattr(dist, name, partial(counting, name))
    try:
        yield count
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def bytes_written() -> int:
    """Bytes that this process has written so far, including to sockets."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def measure(model: str, how: Parameterization, ranks: Ranks) -> StepTraffic:
    """Run training steps on two examples per rank and count what is sent."""
    torch.manual_seed(0)
    make, shape = MODELS[model]
    network, x = make(partial(wrapped, how=how, ranks=ranks)), torch.randn(2, *shape)

    def step() -> tuple[Counter[str], Counter[str]]:
        network.zero_grad()
        with count_collectives() as statistics:
            network(x).square().mean().backward()
        with count_collectives() as gradients:
            ranks.sum_gradients(network)
        return gradients, statistics

    gradients, statistics = step()  # also opens the connections
    before = bytes_written()
    assert all(step() == (gradients, statistics) for _ in range(STEPS))
    return StepTraffic(
        model=model,
        parameterization=how.value,
        ranks=ranks.world,
        gradient_bytes=gradients["all_reduce"],
        all_reduce_bytes=statistics["all_reduce"],
        all_reduce_calls=statistics["all_reduce calls"],
        all_gather_bytes=statistics["all_gather"],
        all_gather_calls=statistics["all_gather calls"],
        sent_bytes=(bytes_written() - before) / STEPS,
    )


def traffic(worlds: list[int], models: list[str]) -> list[StepTraffic]:
    """Measure every model and parameterization on several numbers of ranks; means over ranks."""
    rows: list[StepTraffic] = []
    for world in worlds:
        with on_ranks(world, _identity) as workers:
            for model, how in product(models, PARAMETERIZATIONS):
                found: list[StepTraffic] = call_all(workers, _measure_on_rank, model, how)
                sent = sum(row.sent_bytes for row in found) / world
                rows.append(replace(found[0], sent_bytes=sent))
    return rows


def _measure_on_rank(ranks: Ranks, model: str, how: Parameterization) -> StepTraffic:
    return measure(model, how, ranks)


def _identity(ranks: Ranks) -> Ranks:
    return ranks


def main(words: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description="bytes that a training step sends between ranks")
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--out", type=Path, default=Path("traffic.json"))
    given = options.parse_args(words)
    rows = traffic(given.ranks, given.models)
    machine = environment(torch.device("cpu"), max(given.ranks))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(given.out, {"environment": machine, "rows": [asdict(row) for row in rows]})
    print(measured_table(rows), estimated_table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
