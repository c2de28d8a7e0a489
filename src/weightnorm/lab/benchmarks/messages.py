"""What a training step sends between ranks, as a value and in tables; and how long that takes on a
link, by the α–β model: a message of S bytes takes α + S/β seconds to the next rank.

A sum over n ranks goes around a ring, 2(n − 1)·α + 2(n − 1)/n·S/β, or up and down a tree,
2⌈log₂n⌉·(α + S/β), whichever is quicker. To tell S bytes to all takes ⌈log₂n⌉·α + (n − 1)·S/β.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One model in one parameterization on so many ranks; all numbers are per rank and step."""

    model: str
    parameterization: str
    ranks: int
    gradients: int
    """Bytes handed to the sum of the gradients, in one message."""
    summed: int
    """Bytes of batch statistics handed to sums."""
    sums: int
    """In how many messages; each waits for the one before it."""
    gathered: int
    """Bytes of batch statistics that every rank tells all others."""
    gathers: int
    """In how many messages."""
    sent: float
    """Bytes written to sockets, headers included."""

    @property
    def expected(self) -> float:
        """Bytes that rings send, without headers."""
        n = self.ranks
        return 2 * (n - 1) / n * (self.gradients + self.summed) + (n - 1) * self.gathered


@dataclass(frozen=True)
class Link:
    """An assumption about what joins the ranks: α in seconds, β in bytes a second."""

    name: str
    latency: float
    bandwidth: float

    def sum(self, size: float, ranks: int) -> float:
        """Seconds for a sum over ranks."""
        hops, depth = 2 * (ranks - 1), 2 * math.ceil(math.log2(ranks))
        ring = hops * self.latency + hops / ranks * size / self.bandwidth
        return min(ring, depth * (self.latency + size / self.bandwidth))

    def gather(self, size: float, ranks: int) -> float:
        """Seconds for telling something to everybody."""
        return math.ceil(math.log2(ranks)) * self.latency + (ranks - 1) * size / self.bandwidth

    def step(self, row: Row, ranks: int) -> tuple[float, float]:
        """Seconds for (the sum of the gradients, the batch statistics) of a training step."""
        statistics = 0.0
        if row.sums:
            statistics += row.sums * self.sum(row.summed / row.sums, ranks)
        if row.gathers:
            statistics += row.gathers * self.gather(row.gathered / row.gathers, ranks)
        return self.sum(row.gradients, ranks), statistics


LINKS = (
    (Link("NVLink 4", latency=2e-6, bandwidth=450e9), 8),
    (Link("InfiniBand NDR", latency=5e-6, bandwidth=50e9), 64),
)
"""Nominal bandwidth of one direction and one GPU, assumed latency; and on how many ranks."""


def measured_table(rows: list[Row]) -> str:
    """Bytes per rank and step, in Markdown."""
    lines = [
        "| model | parameterization | ranks | gradients | statistics | in messages | sent | ring |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {r.model} | {r.parameterization} | {r.ranks} | {r.gradients:,} "
        f"| {r.summed + r.gathered:,} | {r.sums + r.gathers} | {r.sent:,.0f} | {r.expected:,.0f} |"
        for r in rows
        if r.ranks > 1
    ]
    return "\n".join(lines)


def estimated_table(rows: list[Row]) -> str:
    """Microseconds a step, in Markdown."""
    lines = [
        "| model | parameterization | link | ranks | gradients, µs | statistics, µs |",
        "|---|---|---|--:|--:|--:|",
    ]
    for link, ranks in LINKS:
        for r in (row for row in rows if row.ranks == 2):
            gradients, statistics = (f"{1e6 * s:,.0f}" for s in link.step(r, ranks))
            head = f"| {r.model} | {r.parameterization} | {link.name} | {ranks} "
            lines.append(f"{head}| {gradients} | {statistics} |")
    return "\n".join(lines)
