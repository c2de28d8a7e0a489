"""The CPU's model and instruction sets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from weightnorm.lab.runs.environment import processor

CPUINFO = Path("/proc/cpuinfo")
VECTOR = re.compile(r"(avx|amx|sse4|fma|f16c|neon|asimd|sve|bf16)")
"""Flags that concern floating-point vectors."""


def cpu() -> dict[str, Any]:
    """The CPU for a benchmark's record."""
    return {
        "model": processor(),
        "cores": os.cpu_count(),
        "instruction_sets": instruction_sets(),
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
    }


def instruction_sets(cpuinfo: Path = CPUINFO) -> list[str]:
    """Vector instruction sets such as avx512f; empty where the system does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        key, _, flags = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return sorted(flag for flag in flags.split() if VECTOR.match(flag))
    return []
