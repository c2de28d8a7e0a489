"""Bytes that a call holds at once, at most."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """What torch's allocator had given out at the worst moment, beyond what it had before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    recorded = profiled.profiler.kineto_results.events()
    changes = [event for event in recorded if event.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak
