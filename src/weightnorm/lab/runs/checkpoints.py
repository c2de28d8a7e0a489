"""A checkpoint that survives a kill at any moment: two generations, each replaced whole."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightnorm.lab.errors import CheckpointError


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write the newest generation and keep the one before it."""
    memory = io.BytesIO()  # torch.save on a full disk raises anything but OSError
    torch.save(state, memory)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(memory.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            path.replace(previous(path))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """The newest generation that can be read; None if there never was one.

    Runs resume exactly from either, so falling back costs time and nothing else.
    """
    failures = []
    for generation in (path, previous(path)):
        if not generation.exists():
            continue
        try:
            state: dict[str, Any] = torch.load(generation, map_location="cpu", weights_only=True)
            return state
        except Exception as error:  # torch raises many kinds for a damaged file
            failures.append(f"{generation}: {type(error).__name__}: {str(error).splitlines()[0]}")
    if failures:
        raise CheckpointError(
            "the checkpoint is damaged; delete the run's folder to start over\n"
            + "\n".join(failures)
        )
    return None


def previous(path: Path) -> Path:
    return path.with_name(f"{path.stem}-previous{path.suffix}")


def random_state() -> dict[str, Tensor | list[Tensor]]:
    """What torch draws its next random numbers from, on every device."""
    state: dict[str, Tensor | list[Tensor]] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Go back to it."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
