"""Peak memory of a call."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

# The profiler logs every start and stop to stderr. It reads this when it is first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Largest number of bytes that torch's allocator had allocated during a call, beyond those
    before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    recorded = profiled.profiler.kineto_results.events()
    changes = [event for event in recorded if event.name() == "[memory]"]
    allocated = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        allocated += change.nbytes()
        peak = max(peak, allocated)
    return peak
