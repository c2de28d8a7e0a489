"""Several things timed side by side."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median


def interleaved(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The median seconds of each, all taking turns; the first round is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - began)
    return {name: median(times[1:]) for name, times in taken.items()}
