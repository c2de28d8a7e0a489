"""Peak memory of a call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Largest number of bytes that torch's allocator had allocated during a call, beyond those
    before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    cpu = [ProfilerActivity.CPU]
    with _stderr_discarded(), profile(activities=cpu, profile_memory=True) as profiled:
        call()
    recorded = profiled.profiler.kineto_results.events()
    changes = [event for event in recorded if event.name() == "[memory]"]
    allocated = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        allocated += change.nbytes()
        peak = max(peak, allocated)
    return peak


@contextmanager
def _stderr_discarded() -> Iterator[None]:
    """Discard what is written to file descriptor 2: the profiler logs there from C++."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
