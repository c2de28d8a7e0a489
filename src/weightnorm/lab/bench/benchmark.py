"""Definitions: a benchmark has cases, a case has peers that are measured in alternation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from weightnorm.lab.bench.goals import Goal
from weightnorm.lab.interleaved import Call

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """How benchmarks are measured."""

    device: torch.device
    quick: bool = False
    """Tiny sizes and few rounds, to see that everything works."""
    rounds: int = 10
    """Least number of rounds."""
    seconds: float = 240.0
    """Time in which a case of the summary may add rounds until its ratios are precise; the other
    cases have a tenth of it."""
    most: int = 400
    """Largest number of rounds."""
    precision: float = 0.02
    """Half width of a ratio's interval at which no more rounds are added, relative to the ratio."""

    def size(self, full: T, quick: T) -> T:
        """The size to measure, or that of a quick run."""
        return quick if self.quick else full

    @property
    def shortest(self) -> float:
        """Seconds for which a short call is repeated."""
        return self.size(0.02, 0.0)


@dataclass(frozen=True)
class Work:
    """Least work of one call: bytes moved, floating-point operations, or calls of another peer."""

    amount: float
    limit: str
    """What bounds it: memory, matrix or convolution (see `Roofline`), or a peer's name."""
    peer: str
    """The peer whose share of the limit is computed."""


@dataclass(frozen=True)
class Summary:
    """A line of the summary: which peer is in which column."""

    work: str
    ours: str
    torch_parametrization: str = ""
    torch_hook: str = ""
    batch_norm: str = ""
    goal: int = 0
    """Index of the case's goal."""


@dataclass(frozen=True)
class Case:
    """Peers that do the same work, or more of it than the base."""

    name: str
    peers: Mapping[str, Call]
    base: str
    """The peer to which the others are compared."""
    goals: tuple[Goal, ...] = ()
    work: Work | None = None
    examples: int | None = None
    """Examples that one call processes, where examples per second are of interest."""
    unit: str = "s"
    """s, B, or what a call counts."""
    rounds: int | None = None
    """Exact number of rounds, for measurements without noise."""
    summary: tuple[Summary, ...] = ()
    at_least_base: tuple[str, ...] = ()
    """Peers that do at least the base's work. If one measures faster than the base by more than its
    interval or the precision, that is noise and not a result."""


@dataclass(frozen=True)
class Benchmark:
    """Cases that answer one question about cost."""

    name: str
    """On the command line."""
    title: str
    cases: Callable[[Settings], Iterable[Case]]
    """Yields the cases; each is measured before the next is built."""
