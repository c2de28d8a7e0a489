"""What the optimizer-side form costs: `python -m weightnorm.lab.benchmarks.optimizer_step`.

A training step in its two halves, the passes and the optimizer's step: of a plain network, of one
with weight norm in its modules, and of one with weight norm in the optimizer. The three take
turns, so that whatever else the machine does meets all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from weightnorm import WeightNormOptimizer, data_dependent_init, weight_norm_model
from weightnorm.lab.benchmarks.side_by_side import interleaved
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN

FORMS = ("plain", "module form", "optimizer form")


def halves(form: str, x: Tensor, y: Tensor, width: float) -> tuple[Callable[[], None], ...]:
    """The passes, and the step, of ConvPool-CNN-C with Adam."""
    torch.manual_seed(0)
    model: nn.Module = ConvPoolCNN(lambda layer: layer, width=width)
    if form == "module form":
        weight_norm_model(model)
    data_dependent_init(model, x)
    optimizer: torch.optim.Optimizer
    if form == "optimizer form":
        optimizer = WeightNormOptimizer(model, torch.optim.Adam, lr=0.003)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    def passes() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()

    def step() -> None:
        optimizer.step()

    return passes, step


def main(words: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description="a training step in both forms of weight norm")
    options.add_argument("--width", type=float, default=0.25, help="factor on the channels")
    options.add_argument("--batch-size", type=int, default=100)
    options.add_argument("--rounds", type=int, default=15, help="training steps of each form")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = options.parse_args(words)
    torch.set_num_threads(given.threads)
    x, y = torch.randn(given.batch_size, 3, 32, 32), torch.randint(10, (given.batch_size,))
    calls = {}
    for form in FORMS:
        calls[form, "passes"], calls[form, "step"] = halves(form, x, y, given.width)
    taken = interleaved({" ".join(key): call for key, call in calls.items()}, given.rounds)
    table = Table("", "passes, ms", "optimizer's step, ms", "both", "relative to plain")
    both = {form: taken[f"{form} passes"] + taken[f"{form} step"] for form in FORMS}
    for form in FORMS:
        times = (taken[f"{form} passes"], taken[f"{form} step"], both[form])
        shown = [f"{1000 * seconds:.2f}" for seconds in times]
        table.add_row(form, *shown, f"{both[form] / both['plain']:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
