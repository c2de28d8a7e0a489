"""Communication of a training step, and its time by the α–β model: a message of S bytes takes
α + S/β seconds.

An all-reduce over n ranks takes the shorter of a ring, 2(n − 1)·α + 2(n − 1)/n·S/β, and a tree,
2⌈log₂n⌉·(α + S/β). An all-gather of S bytes per rank takes ⌈log₂n⌉·α + (n − 1)·S/β.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepTraffic:
    """Communication of one model in one parameterization; numbers are per rank and step."""

    model: str
    parameterization: str
    ranks: int
    gradient_bytes: int
    """All-reduce of the gradients, one message."""
    all_reduce_bytes: int
    """All-reduce of batch statistics."""
    all_reduce_calls: int
    """Number of such messages; each waits for the one before it."""
    all_gather_bytes: int
    """All-gather of batch statistics."""
    all_gather_calls: int
    """Number of such messages."""
    sent_bytes: float
    """Bytes written to sockets, headers included."""

    @property
    def ring_bytes(self) -> float:
        """Bytes that ring algorithms send, without headers."""
        n = self.ranks
        reduced = self.gradient_bytes + self.all_reduce_bytes
        return 2 * (n - 1) / n * reduced + (n - 1) * self.all_gather_bytes


@dataclass(frozen=True)
class Link:
    """An assumed link between ranks: α in seconds, β in bytes per second."""

    name: str
    latency: float
    bandwidth: float

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds for an all-reduce."""
        hops, depth = 2 * (ranks - 1), 2 * math.ceil(math.log2(ranks))
        ring = hops * self.latency + hops / ranks * size / self.bandwidth
        return min(ring, depth * (self.latency + size / self.bandwidth))

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds for an all-gather."""
        return math.ceil(math.log2(ranks)) * self.latency + (ranks - 1) * size / self.bandwidth

    def step(self, traffic: StepTraffic, ranks: int) -> tuple[float, float]:
        """Seconds for the gradients and for the batch statistics of a training step."""
        statistics = 0.0
        if calls := traffic.all_reduce_calls:
            statistics += calls * self.all_reduce(traffic.all_reduce_bytes / calls, ranks)
        if calls := traffic.all_gather_calls:
            statistics += calls * self.all_gather(traffic.all_gather_bytes / calls, ranks)
        return self.all_reduce(traffic.gradient_bytes, ranks), statistics


LINKS = (
    (Link("NVLink 4", latency=2e-6, bandwidth=450e9), 8),
    (Link("InfiniBand NDR", latency=5e-6, bandwidth=50e9), 64),
)
"""Nominal bandwidth per direction and GPU, assumed latency; and the number of ranks."""


def measured_table(rows: list[StepTraffic]) -> str:
    """Table of bytes per rank and step, in Markdown."""
    lines = [
        "| model | parameterization | ranks | gradients | statistics | in messages | sent | ring |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {r.model} | {r.parameterization} | {r.ranks} | {r.gradient_bytes:,} "
        f"| {r.all_reduce_bytes + r.all_gather_bytes:,} "
        f"| {r.all_reduce_calls + r.all_gather_calls} "
        f"| {r.sent_bytes:,.0f} | {r.ring_bytes:,.0f} |"
        for r in rows
        if r.ranks > 1
    ]
    return "\n".join(lines)


def estimated_table(rows: list[StepTraffic]) -> str:
    """Table of microseconds per step, in Markdown."""
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
