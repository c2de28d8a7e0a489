"""What a training step sends between ranks, in bytes:
`python -m weightnorm.lab.benchmarks.cases.traffic --ranks 1 2 4 --out traffic.json`.

Two counts that check each other: what the program hands to its collectives, and what the operating
system saw each rank write to its sockets (``wchar`` of /proc/self/io; nothing else is written
during the steps). Neither depends on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from weightnorm import Parameterization, parameterize
from weightnorm.lab.benchmarks.cases.synced_batch_norm import SyncedBatchNorm
from weightnorm.lab.benchmarks.messages import Row, estimated_table, measured_table
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN, Wrap
from weightnorm.lab.runs.environment import environment
from weightnorm.lab.runs.ranks import Ranks
from weightnorm.lab.runs.records import write_json

STEPS = 3
"""Steps that are averaged; all send the same."""

PARAMETERIZATIONS = (
    Parameterization.STANDARD,
    Parameterization.WEIGHT_NORM,
    Parameterization.WEIGHT_NORM_MEAN_ONLY,
    Parameterization.BATCH_NORM,
)


class FeedForward(nn.Sequential):
    """The feed-forward half of a transformer, x + W₂·gelu(W₁·x), a few times."""

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
"""The network, and the shape of an example."""


def wrapped(layer: nn.Module, how: Parameterization, ranks: Ranks) -> nn.Module:
    """A layer in this parameterization, its batch statistics over all ranks."""
    if how is not Parameterization.BATCH_NORM or ranks.group is None:
        return parameterize(layer, how, group=ranks.group)
    plain: Any = parameterize(layer, how)
    return nn.Sequential(plain[0], SyncedBatchNorm(plain[1].num_features, plain[1].eps))


@contextmanager
def handed_over() -> Iterator[Counter[str]]:
    """Bytes given to each collective, and in how many calls."""
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


def written() -> int:
    """Bytes this process has ever written, to sockets too."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def measure(model: str, how: Parameterization, ranks: Ranks) -> Row:
    """A few training steps on two examples a rank, as the experiments take them."""
    torch.manual_seed(0)
    make, shape = MODELS[model]
    network, x = make(partial(wrapped, how=how, ranks=ranks)), torch.randn(2, *shape)

    def step() -> tuple[Counter[str], Counter[str]]:
        network.zero_grad()
        with handed_over() as statistics:
            network(x).square().mean().backward()
        with handed_over() as gradients:
            ranks.sum_gradients(network)
        return gradients, statistics

    gradients, statistics = step()  # which also opens the connections
    before = written()
    assert all(step() == (gradients, statistics) for _ in range(STEPS))
    return Row(
        model=model,
        parameterization=how.value,
        ranks=ranks.world,
        gradients=gradients["all_reduce"],
        summed=statistics["all_reduce"],
        sums=statistics["all_reduce calls"],
        gathered=statistics["all_gather"],
        gathers=statistics["all_gather calls"],
        sent=(written() - before) / STEPS,
    )


def on_rank(rank: int, world: int, folder: str, models: list[str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world
    )
    rows = [measure(m, how, Ranks(rank, world)) for m in models for how in PARAMETERIZATIONS]
    write_json(Path(folder, f"rank-{rank}.json"), [asdict(row) for row in rows])
    dist.destroy_process_group()


def traffic(ranks: list[int], models: list[str]) -> list[Row]:
    """Rows for so many ranks; what a rank sent is the mean over them."""
    rows: list[Row] = []
    for world in ranks:
        with tempfile.TemporaryDirectory() as folder:
            spawn(on_rank, (world, folder, models), nprocs=world)
            texts = [Path(folder, f"rank-{rank}.json").read_text() for rank in range(world)]
        every = zip(*map(json.loads, texts), strict=True)
        rows += (Row(**{**same[0], "sent": sum(r["sent"] for r in same) / world}) for same in every)
    return rows


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
