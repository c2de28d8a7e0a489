"""Provenance of a run: commit, versions, device, threads."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from weightnorm.lab.errors import ConfigError


def environment(device: torch.device, world: int) -> dict[str, Any]:
    """Return a row for sessions.jsonl."""
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
    """Return the device of that name; ``auto`` is the fastest one available.

    Raises ConfigError if this machine does not have it.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type != "cpu":
            torch.zeros(1, device=device).item()
    except Exception as error:  # torch raises many kinds, depending on the backend
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise ConfigError(
            f"device is {name}; expected a device of this machine, such as cpu, or auto ({reason})"
        ) from None
    return device


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return the autocast context of a data type, such as bfloat16; none for float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, precision))


def device_name(device: torch.device) -> str:
    """Return the GPU's product name, or else the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def processor() -> str:
    """Return the processor's name if the system provides it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit(file: Path = Path(__file__)) -> str | None:
    """Return the commit of the repository that `file` belongs to, with a ``+`` if src was changed.

    None if the package is installed elsewhere: git would name whatever repository surrounds it.
    """
    file = file.resolve()
    try:
        root = Path(_git(file.parent, "rev-parse", "--show-toplevel"))
        inside = Path("src/weightnorm/lab/runs", file.name)
        if file != (root / inside).resolve() or not _git(root, "ls-files", "--", str(inside)):
            return None
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *words: str) -> str:
    # Without variables such as GIT_DIR, which a git hook sets to another repository.
    variables = {name: x for name, x in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
        env=variables,
    )
    return done.stdout.strip()
