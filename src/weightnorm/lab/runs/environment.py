"""What a run ran on: commit, versions, device, threads."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device, world: int) -> dict[str, Any]:
    """A row for sessions.jsonl."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "weightnorm": version("weightnorm"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": processor(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "ranks": world,
    }


def pick_device(name: str) -> torch.device:
    """The device of that name; ``auto`` takes the best there is."""
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit this code is at, with a plus if it was changed since; None outside git."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
