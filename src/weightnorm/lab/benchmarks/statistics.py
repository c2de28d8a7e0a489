"""Statistics of interleaved rounds, and how sure they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Interval(NamedTuple):
    """A value and its 95 % bootstrap interval."""

    middle: float
    low: float
    high: float


Medians = Mapping[str, Tensor]
"""By peer: the median over rounds; first of the rounds as they were, then of each resample."""


def medians(samples: Mapping[str, Sequence[float]], draws: int = 2000) -> Medians:
    """What slowed a whole round is taken out of it: each is divided by its pace, the geometric mean
    of its peers to that of the middle round. Then rounds are resampled whole."""
    table = torch.tensor([*samples.values()], dtype=torch.float64)  # (peers, rounds)
    pace = table.log().mean(0)
    table = table / (pace - pace.median()).exp()
    rounds = table.shape[1]
    drawn = torch.randint(rounds, (draws, rounds), generator=torch.Generator().manual_seed(0))
    rows = torch.cat([torch.arange(rounds).unsqueeze(0), drawn])
    middle = table[:, rows].quantile(0.5, dim=2)  # (peers, 1 + draws)
    return dict(zip(samples, middle, strict=True))


def interval(values: Tensor) -> Interval:
    """Of a statistic of medians.

    >>> interval(medians({"a": [2.0, 2.0]})["a"] / 4)
    Interval(middle=0.5, low=0.5, high=0.5)
    """
    drawn = values[1:].sort().values
    low, high = (drawn[round(share * (len(drawn) - 1))] for share in (0.025, 0.975))
    return Interval(values[0].item(), low.item(), high.item())
