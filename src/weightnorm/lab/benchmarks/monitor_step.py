"""What the training monitor costs: `python -m weightnorm.lab.benchmarks.monitor_step`.

It looks at the model once in so many steps, so its share of training is the time of a look over
that of the steps from one look to the next. Networks whose step is cheap beside their weights are
the hard ones. The step and the look take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from weightnorm import weight_norm_model
from weightnorm.diagnostics import TrainingMonitor
from weightnorm.lab.allocation import keep_freed_memory
from weightnorm.lab.benchmarks.side_by_side import interleaved
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN

STEP, LOOK = "step", "look"


def dense(width: int) -> nn.Sequential:
    hidden = [m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "ConvPool-CNN-C, a quarter of the width, batch 100": lambda: (
        ConvPoolCNN(lambda layer: layer, width=0.25),
        torch.randn(100, 3, 32, 32),
    ),
    "dense, 1024 units, batch 64": lambda: (dense(1024), torch.randn(64, 1024)),
    "dense, 64 units, batch 32": lambda: (dense(64), torch.randn(32, 64)),
}


def calls(model: nn.Module, x: Tensor) -> tuple[dict[str, Callable[[], None]], int]:
    """A training step with a monitor attached, and a look of that monitor; and how many steps pass
    from one look to the next."""
    weight_norm_model(model)
    optimizer = torch.optim.Adam(model.parameters())
    monitor = TrainingMonitor(model, optimizer, lambda tag, value, step: None)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return {STEP: step, LOOK: monitor.measure}, monitor.every


def main(words: list[str] | None = None) -> dict[str, float]:
    """Print the table; the monitor's share of training, by network."""
    options = argparse.ArgumentParser(description="what the training monitor costs")
    options.add_argument("--rounds", type=int, default=15, help="steps, and looks, of each network")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = options.parse_args(words)
    torch.set_num_threads(given.threads)
    keep_freed_memory()
    table = Table("network", "ms a step", "ms a look", "every", "share of training")
    shares = {}
    for name, build in NETWORKS.items():
        peers, every = calls(*build())
        taken = interleaved(peers, given.rounds)
        shares[name] = taken[LOOK] / (every * taken[STEP])
        times = (f"{1000 * taken[key]:.2f}" for key in (STEP, LOOK))
        table.add_row(name, *times, f"{every} steps", f"{100 * shares[name]:.2f} %")
    Console().print(table)
    return shares


if __name__ == "__main__":
    main()
