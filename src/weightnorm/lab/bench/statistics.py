"""Estimators on interleaved rounds.

Peers of a round are measured within seconds of each other, so their ratio is little affected by
changes of the machine's speed. A ratio is estimated as the geometric interquartile mean of the
ratios of all rounds: paired, and insensitive to outliers in up to a quarter of the rounds on either
side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import scipy.stats  # type: ignore[import-untyped]

from weightnorm.lab.statistics import Array, Interval, bootstrap


class Rounds:
    """Measurements of peers; the last axis is that of the rounds."""

    def __init__(self, samples: Mapping[str, Array]) -> None:
        self.samples = samples

    def ratio(self, peer: str, base: str) -> Array:
        """Geometric interquartile mean of peer / base."""
        if peer == base:
            return np.ones(self.samples[peer].shape[:-1])
        ratios = np.log(self.samples[peer]) - np.log(self.samples[base])
        return np.exp(interquartile_mean(ratios))

    def mean(self, peer: str) -> Array:
        """Interquartile mean of a peer's measurements."""
        return interquartile_mean(self.samples[peer])


def interquartile_mean(values: Array) -> Array:
    """Mean over the last axis without the lowest and the highest quarter.

    >>> float(interquartile_mean(np.array([1.0, 2.0, 3.0, 100.0])))
    2.5
    """
    return np.asarray(scipy.stats.trim_mean(values, 0.25, axis=-1))


def estimate(
    samples: Mapping[str, Sequence[float]],
    peers: Iterable[str],
    statistic: Callable[[Rounds], Array],
) -> Interval:
    """A statistic of some peers and its interval; rounds are resampled whole.

    >>> estimate({"a": [2.0, 4.0], "b": [1.0, 2.0]}, "ab", lambda rounds: rounds.ratio("a", "b"))
    Interval(value=2.0, low=2.0, high=2.0)
    """
    names = [*dict.fromkeys(peers)]
    return bootstrap(
        lambda *arrays: statistic(Rounds(dict(zip(names, arrays, strict=True)))),
        *(samples[name] for name in names),
    )


def ratio_interval(samples: Mapping[str, Sequence[float]], peer: str, base: str) -> Interval:
    """The ratio of a peer to the base and its interval."""
    return estimate(samples, (peer, base), lambda rounds: rounds.ratio(peer, base))
