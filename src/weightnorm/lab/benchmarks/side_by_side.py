"""Several things measured side by side: they take turns, so that whatever else the machine does
meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], float | None]
"""Does the work. What it returns is the measurement; None: how long it took."""


def interleaved(
    peers: Mapping[str, Call], rounds: int, least: float = 0.0
) -> dict[str, list[float]]:
    """What each peer took in each round.

    The first round is not counted. A call shorter than `least` seconds is repeated for that long,
    and the mean of the calls is one measurement.
    """
    first = {name: _measured(call, 1) for name, call in peers.items()}
    calls = {name: max(1, round(least / max(taken, 1e-6))) for name, taken in first.items()}
    taken: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name, call in peers.items():
            taken[name].append(_measured(call, calls[name]))
    return taken


def _measured(call: Call, calls: int) -> float:
    _wait()
    began, told = time.perf_counter(), None
    for _ in range(calls):
        told = call()
    _wait()
    return (time.perf_counter() - began) / calls if told is None else told


def _wait() -> None:
    """Let the device finish what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
