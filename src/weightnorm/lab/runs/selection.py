"""Choose the best learning rate of a grid. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

Results = Mapping[int, float | None]
"""Seed → the metric of a finished run, None for one that diverged."""


def best_learning_rate(results: Mapping[float, Results], highest: bool = False) -> float | None:
    """Return the learning rate with the lowest mean result over seeds, or the highest.

    Rates are compared on the seeds that all of them have, if there are any. A rate at which a run
    diverged is chosen only if a run diverged at every rate: its mean over the other seeds is not
    the mean of the grid's other rates. Equal means are decided by the number of runs, then by the
    smaller rate.

    Args:
        results: learning rate → results by seed.
        highest: whether a higher metric is better.

    Returns None if no run finished with a number.

    >>> best_learning_rate({0.001: {1: 0.5, 2: 0.3}, 0.01: {1: 0.2, 2: None}, 0.1: {}})
    0.001
    >>> best_learning_rate({0.001: {1: 0.2, 2: 0.6}, 0.01: {1: 0.3}})  # by seed 1
    0.001
    """
    numbers = {
        rate: {seed: value for seed, value in by_seed.items() if value is not None}
        for rate, by_seed in results.items()
    }
    numbers = {rate: by_seed for rate, by_seed in numbers.items() if by_seed}
    whole = [set(x) for rate, x in numbers.items() if len(x) == len(results[rate])]
    common = set.intersection(*(whole or map(set, numbers.values()))) if numbers else set()

    def order(rate: float) -> tuple[bool, float, int, float]:
        found = numbers[rate]
        values = [value for seed, value in found.items() if seed in common]
        mean = fmean(values or found.values())
        return len(found) < len(results[rate]), -mean if highest else mean, -len(found), rate

    return min(numbers, key=order, default=None)
