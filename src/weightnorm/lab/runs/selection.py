"""Choose the best learning rate of a grid. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean


def best_learning_rate(
    results: Mapping[float, Sequence[float | None]], highest: bool = False
) -> float | None:
    """Return the learning rate with the lowest mean result over seeds, or the highest.

    A rate at which a run diverged is chosen only if a run diverged at every rate: its mean over
    the other seeds is not the mean of the grid's other rates. Equal means are decided by the number
    of runs, then by the smaller rate.

    Args:
        results: learning rate → the metric of each finished run, None for one that diverged.
        highest: whether a higher metric is better.

    Returns None if no run finished with a number.

    >>> best_learning_rate({0.001: [0.5, 0.3], 0.01: [0.2, None], 0.1: []})
    0.001
    """

    def order(rate: float) -> tuple[bool, float, int, float]:
        values = [value for value in results[rate] if value is not None]
        mean = fmean(values)
        return len(values) < len(results[rate]), -mean if highest else mean, -len(values), rate

    rates = [rate for rate, values in results.items() if any(x is not None for x in values)]
    return min(rates, key=order, default=None)
