"""What an agent has lived through, to be drawn from at random: a ring in which each frame is stored
once, in a file that is mapped into memory.

Note [the margin]
    A run that was killed goes on from its last checkpoint, or the one before if that is damaged. By
    then more has been written to the ring. The run will write the same once more, but what it wrote
    over would be lost. So the ring is longer than what is drawn from: the oldest `margin` frames
    are kept and not drawn. With a checkpoint at least every `margin`/2 steps nothing is ever lost,
    and a checkpoint holds no frames.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightnorm.lab.errors import DataError


@dataclass(frozen=True)
class Batch:
    """Transitions; the states are valid until the next batch is drawn."""

    states: Tensor
    """uint8, (B, history, height, width), the newest frame last."""
    actions: Tensor
    rewards: Tensor
    terminal: Tensor
    """1 where the life ended, else 0."""
    next_states: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(x.to(device) for x in vars(self).values()))


class Replay:
    """The last `capacity` transitions. A state is the last `history` frames of one life; those from
    before its beginning are black.

    Args:
        path: the file, made if it is not there. Its whole size is taken from the disk at once.
        capacity: how many transitions are drawn from.
        shape: of a frame.
        history: frames in a state.
        margin: see Note [the margin]; by default a twentieth of the capacity, or 2000.
        pin: draw batches into page-locked memory, for a GPU.
    """

    def __init__(
        self,
        path: Path,
        capacity: int,
        shape: tuple[int, int],
        *,
        history: int = 4,
        margin: int | None = None,
        pin: bool = False,
    ) -> None:
        self.path, self.capacity, self.history, self._pin = path, capacity, history, pin
        self.margin = max(capacity // 20, 2000) if margin is None else margin
        self.slots = capacity + history + self.margin
        self.steps = 0
        """Transitions so far. Number t lies in slot t modulo `slots`, with the frame it began at;
        the frame after the newest is there already."""
        column = (self.slots,)
        self._new = not path.exists()
        self._maps = _mapped(
            path,
            (column, np.float32),
            ((*column, *shape), np.uint8),
            (column, np.uint8),
            (column, np.uint8),
        )
        self.rewards, self.frames, self.actions, self.terminal = map(torch.from_numpy, self._maps)
        self._drawn = torch.empty(0, dtype=torch.uint8)

    def see(self, frame: NDArray[np.uint8]) -> None:
        """The next frame: the first of all, or the one that followed what was recorded last."""
        if not self.steps:
            self.terminal.fill_(1)  # nothing came before
        self.frames[self.steps % self.slots] = torch.from_numpy(frame)

    def record(self, action: int, reward: float, terminal: bool) -> None:
        """What was done at the newest frame, and what came of it."""
        slot = self.steps % self.slots
        self.actions[slot], self.rewards[slot], self.terminal[slot] = action, reward, terminal
        self.steps += 1

    def state(self) -> Tensor:
        """The state at the newest frame: (1, history, height, width)."""
        room = torch.empty((1, self.history, *self.frames.shape[1:]), dtype=torch.uint8)
        return self._stacks(torch.tensor([self.steps]), room)

    def draw(self, count: int) -> Batch:
        """Transitions, each with the same chance."""
        shape = (count, self.history + 1, *self.frames.shape[1:])
        if self._drawn.shape != shape:
            self._drawn = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pin)
        times = torch.randint(max(0, self.steps - self.capacity), self.steps, (count,))
        frames, slots = self._stacks(times, self._drawn), times % self.slots
        return Batch(
            frames[:, :-1],
            self.actions[slots].long(),
            self.rewards[slots],
            self.terminal[slots].float(),
            frames[:, 1:],
        )

    def _stacks(self, times: Tensor, room: Tensor) -> Tensor:
        """Fill `room` (n, length, height, width) with the frames from history − 1 before each time
        on; those from before its life are black."""
        past, length = self.history - 1, room.shape[1]
        slots = (times[:, None] + torch.arange(-past, length - past)) % self.slots
        frames, rows = self.frames.flatten(1), room.view(slots.numel(), -1)
        torch.index_select(frames, 0, slots.flatten(), out=rows)
        ends = self.terminal[slots[:, :past]]
        earlier = ends.flip(1).cummax(1).values.flip(1)  # a life ended there or later
        which, frame = earlier.nonzero(as_tuple=True)
        rows.index_fill_(0, which * length + frame, 0)
        return room

    def state_dict(self) -> dict[str, Any]:
        """How far it is. All else is in the file, and on the disk when this returns."""
        for array in self._maps:
            array.flush()
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._new and state["steps"]:
            raise DataError(f"{self.path} is missing; delete the run's folder to start over")
        self.steps = state["steps"]

    def discard(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)


Map = np.memmap[Any, np.dtype[Any]]


def _mapped(path: Path, *columns: tuple[tuple[int, ...], type]) -> list[Map]:
    """Arrays of these shapes and types, one after the other in a file.

    A full disk is an error here; later, where a map is written to, it would be the process's end.
    """
    sizes = [prod(shape) * np.dtype(kind).itemsize for shape, kind in columns]
    with path.open("ab") as file:
        if file.tell() < sum(sizes):
            try:
                os.posix_fallocate(file.fileno(), 0, sum(sizes))
            except OSError:
                path.unlink()
                raise
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        np.memmap(path, kind, "r+", start, shape)
        for start, (shape, kind) in zip(starts, columns, strict=True)
    ]
