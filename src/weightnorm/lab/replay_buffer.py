"""Replay buffer in a memory-mapped file: a ring in which each frame is stored once.

Note [the margin]
    A killed run resumes from its last checkpoint, or from the one before if that is damaged. By
    then it has written more transitions to the ring. It will write the same ones again, but the
    transitions they replaced would be lost. So the ring is longer than the range that is sampled:
    the oldest `margin` frames are kept and not sampled. With a checkpoint at least every
    `margin`/2 steps nothing is lost, and a checkpoint contains no frames.

Note [checksums]
    Each slot has a CRC-32, computed as it is written. A checkpoint records one number, the CRC-32
    of the checksums of all slots that can still be sampled, so its cost does not depend on the size
    of the frames. A resumed run computes the slots' checksums from the file once and compares.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightnorm.lab.errors import DataError

HISTORY = 4
"""Frames in a state (Mnih et al. 2015)."""


@dataclass(frozen=True)
class Transitions:
    """Transitions. The states are valid until the next batch is sampled."""

    states: Tensor
    """uint8, (B, history, height, width), the newest frame last."""
    actions: Tensor
    rewards: Tensor
    terminal: Tensor
    """1 where the life ended, else 0."""
    next_states: Tensor

    def to(self, device: torch.device) -> Transitions:
        """Copy the transitions to a device."""
        return Transitions(*(x.to(device) for x in vars(self).values()))


class ReplayBuffer:
    """Stores the last `capacity` transitions and samples batches of them.

    A state is the last `history` frames of one life; frames from before its first are zero.

    Args:
        path: the file, created if it does not exist. All of its disk space is allocated at once.
        capacity: number of transitions that can be sampled.
        shape: height and width of a frame.
        history: frames in a state.
        margin: see Note [the margin]; by default a twentieth of the capacity, at least 2000.
        pin: sample batches into page-locked memory, for copies to a GPU.
    """

    def __init__(
        self,
        path: Path,
        capacity: int,
        shape: tuple[int, int],
        *,
        history: int = HISTORY,
        margin: int | None = None,
        pin: bool = False,
    ) -> None:
        self.path, self.capacity, self.history, self._pin = path, capacity, history, pin
        self.margin = max(capacity // 20, 2000) if margin is None else margin
        self.slots = capacity + history + self.margin
        self.steps = 0
        """Transitions so far. Transition t is in slot t modulo `slots`, with the frame before it;
        the frame after the newest transition is already stored."""
        self._created = not path.exists()
        n = self.slots
        columns = ((n,), np.float32), ((n, *shape), np.uint8), ((n,), np.uint8), ((n,), np.uint8)
        self._arrays = _map_arrays(path, *columns)
        self.rewards, self.frames, self.actions, self.terminal = map(torch.from_numpy, self._arrays)
        self._checksums = np.zeros(self.slots, np.uint32)
        self._sampled = torch.empty(0, dtype=torch.uint8)

    def start(self, frame: NDArray[np.uint8]) -> None:
        """Store the first frame."""
        self.terminal.fill_(1)  # slots from before the first frame belong to no life
        self._store_frame(frame)

    def append(
        self, action: int, reward: float, terminal: bool, next_frame: NDArray[np.uint8]
    ) -> None:
        """Store the action taken at the newest frame, and its outcome."""
        slot = self.steps % self.slots
        self.actions[slot], self.rewards[slot], self.terminal[slot] = action, reward, terminal
        self._checksums[slot] = self._checksum_of(slot)
        self.steps += 1
        self._store_frame(next_frame)

    def _store_frame(self, frame: NDArray[np.uint8]) -> None:
        self.frames[self.steps % self.slots] = torch.from_numpy(frame)

    def sample(self, count: int) -> Transitions:
        """Sample transitions uniformly, with replacement."""
        length, past = self.history + 1, self.history - 1
        shape = (count, length, *self.frames.shape[1:])
        if self._sampled.shape != shape:
            self._sampled = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pin)
        times = torch.randint(max(0, self.steps - self.capacity), self.steps, (count,))

        # Frames from `past` before each time to one after it.
        slots = (times[:, None] + torch.arange(-past, 2)) % self.slots
        rows = self._sampled.view(count * length, -1)
        torch.index_select(self.frames.flatten(1), 0, slots.flatten(), out=rows)
        ends = self.terminal[slots[:, :past]]
        earlier = ends.flip(1).cummax(1).values.flip(1)  # a life ended there or later
        which, frame = earlier.nonzero(as_tuple=True)
        rows.index_fill_(0, which * length + frame, 0)

        now = slots[:, past]
        return Transitions(
            self._sampled[:, :-1],
            self.actions[now].long(),
            self.rewards[now],
            self.terminal[now].float(),
            self._sampled[:, 1:],
        )

    # — resuming —

    def state_dict(self) -> dict[str, Any]:
        """Return the position and a checksum of the file, whose data is synced to disk first."""
        for array in self._arrays:
            array.flush()
        return {"steps": self.steps, "checksum": self._checksum()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a checkpoint.

        Raises:
            DataError: if the file is missing, or its content is not that of the checkpoint.
        """
        way_out = "delete the run's folder to start over"
        if self._created:
            self.path.unlink()
            raise DataError(f"{self.path} is missing; {way_out}")
        self.steps = state["steps"]
        first = self._first_needed()
        self.terminal[np.arange(min(first, 0), 0) % self.slots] = 1  # see `start`
        for time in range(max(first, 0), self.steps):
            self._checksums[time % self.slots] = self._checksum_of(time % self.slots)
        if self._checksum() != state["checksum"]:
            raise DataError(
                f"{self.path} is damaged: its frames are not those of the checkpoint at step "
                f"{self.steps}; {way_out}"
            )

    def _first_needed(self) -> int:
        """Time of the oldest frame that a sample may contain; negative before the first frame."""
        return max(0, self.steps - self.capacity) - (self.history - 1)

    def _checksum(self) -> int:
        """See Note [checksums]. The newest slot has a frame and no transition yet."""
        times = np.arange(max(self._first_needed(), 0), self.steps)
        _, frames, _, _ = self._arrays
        newest = crc32(frames[self.steps % self.slots].tobytes())
        return crc32(self._checksums[times % self.slots].tobytes(), newest)

    def _checksum_of(self, slot: int) -> int:
        """Return the checksum of a slot's frame and transition."""
        reward, frame, action, terminal = (array[slot] for array in self._arrays)
        return crc32(struct.pack("<fBB", reward, action, terminal), crc32(frame.tobytes()))


MappedArray = np.memmap[Any, np.dtype[Any]]


def _map_arrays(path: Path, *columns: tuple[tuple[int, ...], type]) -> list[MappedArray]:
    """Map arrays of these shapes and types, one after the other in a file."""
    sizes = [prod(shape) * np.dtype(kind).itemsize for shape, kind in columns]
    _allocate(path, sum(sizes))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        np.memmap(path, kind, "r+", start, shape)
        for start, (shape, kind) in zip(starts, columns, strict=True)
    ]


def _allocate(path: Path, size: int) -> None:
    """Extend a file to `size` bytes on disk. Raises OSError if the disk is full; otherwise a later
    write to the mapping would end the process with SIGBUS."""
    try:
        with path.open("ab") as file:
            missing = size - file.tell()
            if missing > 0 and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS and Windows
                for start in range(0, missing, 2**20):
                    file.write(bytes(min(2**20, missing - start)))
    except OSError:
        path.unlink()
        raise
