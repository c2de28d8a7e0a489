"""What is measured: a row is a question, a case is one set of peers that answer it in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from weightnorm.lab.benchmarks.goals import Goal
from weightnorm.lab.benchmarks.interleaved import Call

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """What a row is measured with."""

    device: torch.device
    quick: bool = False
    rounds: int = 10

    def size(self, full: T, quick: T) -> T:
        """A size at which it matters, or one that only shows that it works."""
        return quick if self.quick else full

    @property
    def least(self) -> float:
        """Seconds that one measurement takes at least."""
        return self.size(0.02, 0.0)

    @property
    def budget(self) -> float:
        """Seconds that a case may take before it keeps to its least number of rounds."""
        return self.size(20.0, 0.0)


@dataclass(frozen=True)
class Work:
    """What one call cannot do without: bytes moved, floating-point operations, or copies."""

    amount: float
    limit: str
    """Of the machine: memory, matrix or convolution; or a peer, and so many of its calls."""
    peer: str
    """Whose distance to the machine's limit is of interest."""


@dataclass(frozen=True)
class Case:
    """Peers that do the same work."""

    name: str
    peers: Mapping[str, Call]
    base: str
    """The peer that the others are compared to."""
    goals: tuple[Goal, ...] = ()
    work: Work | None = None
    examples: int | None = None
    """How many one call goes through, where examples a second are of interest."""
    unit: Literal["s", "B"] = "s"
    rounds: int | None = None
    """Exactly so many, in place of the setting's and what its budget allows."""


@dataclass(frozen=True)
class Row:
    """A question about cost."""

    name: str
    """On the command line."""
    title: str
    cases: Callable[[Setting], Iterable[Case]]
    """Each is measured before the next is built."""
