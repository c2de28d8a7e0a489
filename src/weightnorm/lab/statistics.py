"""95 % intervals: of a mean over a few seeds, and of any statistic by resampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy.stats  # type: ignore[import-untyped]
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[np.float64]

RESAMPLES = 2000


class Interval(NamedTuple):
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def bootstrap(statistic: Callable[..., Any], *samples: ArrayLike) -> Interval:
    """Return a statistic of paired samples and its 95 % percentile interval.

    Observations are resampled together: the i-th of every sample, or none of them.

    Args:
        statistic: called with the samples as arrays, (..., n) each; reduces the last axis.
        samples: n observations each. With n = 1 the interval has no width.

    >>> bootstrap(lambda a, b: a.mean(-1) / b.mean(-1), [2.0, 4.0], [1.0, 2.0])
    Interval(value=2.0, low=2.0, high=2.0)
    """
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    value = float(statistic(*arrays))
    if arrays[0].shape[-1] == 1:
        return Interval(value, value, value)
    found = scipy.stats.bootstrap(
        arrays,
        lambda *resampled, axis: statistic(*resampled),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(value, float(found.low), float(found.high))


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values and its Student-t interval.

    Not by resampling: the bootstrap interval of three values is their range, which misses the mean
    in a quarter of all cases. With one value the interval has no width; with an infinite one it is
    unbounded.

    >>> mean_interval([2.0, 2.0, 2.0])
    Interval(value=2.0, low=2.0, high=2.0)
    >>> print(mean_interval([1.0, 2.0, 3.0]))
    2 [-0.484, 4.48]
    """
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean())
    if len(x) == 1:
        return Interval(mean, mean, mean)
    if not np.isfinite(x).all():
        return Interval(mean, -np.inf, np.inf)
    half = float(scipy.stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / np.sqrt(len(x)))
    return Interval(mean, mean - half, mean + half)


def variance_ratio_interval(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return the ratio of the variances of two samples and its F interval, for normal values.

    Unbounded if a sample has fewer than two values, or one that is not finite.

    >>> print(variance_ratio_interval([1.0, 2.0, 3.0], [1.0, 3.0, 5.0]))
    0.25 [0.00641, 9.75]
    """
    x, y = (np.asarray(values, dtype=np.float64) for values in (a, b))
    if min(len(x), len(y)) < 2 or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return Interval(np.nan, -np.inf, np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(x.var(ddof=1) / y.var(ddof=1))
    low, high = scipy.stats.f.ppf((0.025, 0.975), len(x) - 1, len(y) - 1)
    return Interval(ratio, float(ratio / high), float(ratio / low))


def paired_differences(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """Return a − b of the seeds that both have.

    >>> paired_differences({1: 2.0, 2: 3.0}, {2: 1.0, 3: 0.0})
    [2.0]
    """
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
