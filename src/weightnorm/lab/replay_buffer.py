"""Replay buffer in a memory-mapped file: a ring in which each frame is stored once.

Note [the margin]
    A killed run resumes from its last checkpoint, or from the one before if that is damaged. By
    then it has written more transitions to the ring. It will write the same ones again, but the
    transitions they replaced would be lost. So the ring is longer than the range that is sampled:
    the oldest `margin` frames are kept and not sampled. With a checkpoint at least every
    `margin`/2 steps nothing is lost, and a checkpoint contains no frames.

Note [checksums]
    Each slot has a CRC-32, computed from the data as it is appended. A checkpoint records one
    number, the CRC-32 of the checksums of all slots that can still be sampled, so its cost does not
    depend on the size of the frames. A resumed run computes the slots' checksums from the file once
    and compares.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightnorm.lab.errors import DataError


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
        history: int = 4,
        margin: int | None = None,
        pin: bool = False,
    ) -> None:
        self.path, self.capacity, self.history, self._pin = path, capacity, history, pin
        self.margin = max(capacity // 20, 2000) if margin is None else margin
        self.slots = capacity + history + self.margin
        self.steps = 0
        """Transitions so far. Transition t is in slot t modulo `slots`, with the frame before it;
        the frame after the newest transition is already stored."""
        column = (self.slots,)
        self._created = not path.exists()
        self._arrays = _map_arrays(
            path,
            (column, np.float32),
            ((*column, *shape), np.uint8),
            (column, np.uint8),
            (column, np.uint8),
        )
        self.rewards, self.frames, self.actions, self.terminal = map(torch.from_numpy, self._arrays)
        self._checksums = np.zeros(self.slots, np.uint32)
        self._sampled = torch.empty(0, dtype=torch.uint8)

    def append_frame(self, frame: NDArray[np.uint8]) -> None:
        """Store the first frame, or the frame that followed the newest transition."""
        if not self.steps:
            self.terminal.fill_(1)  # slots from before the first frame belong to no life
        slot = self.steps % self.slots
        self.frames[slot] = torch.from_numpy(frame)
        self._checksums[slot] = crc32(frame.tobytes())

    def append_transition(self, action: int, reward: float, terminal: bool) -> None:
        """Store the action taken at the newest frame and its outcome."""
        slot = self.steps % self.slots
        self.actions[slot], self.rewards[slot], self.terminal[slot] = action, reward, terminal
        self._checksums[slot] = crc32(_packed(reward, action, terminal), self._checksums[slot])
        self.steps += 1

    def state(self) -> Tensor:
        """Return the state at the newest frame: (1, history, height, width)."""
        out = torch.empty((1, self.history, *self.frames.shape[1:]), dtype=torch.uint8)
        return self._stack_frames(torch.tensor([self.steps]), out)

    def sample(self, count: int) -> Transitions:
        """Sample transitions uniformly, with replacement."""
        shape = (count, self.history + 1, *self.frames.shape[1:])
        if self._sampled.shape != shape:
            self._sampled = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pin)
        times = torch.randint(max(0, self.steps - self.capacity), self.steps, (count,))
        frames, slots = self._stack_frames(times, self._sampled), times % self.slots
        return Transitions(
            frames[:, :-1],
            self.actions[slots].long(),
            self.rewards[slots],
            self.terminal[slots].float(),
            frames[:, 1:],
        )

    def _stack_frames(self, times: Tensor, out: Tensor) -> Tensor:
        """Fill `out` (n, length, height, width) with consecutive frames, starting history − 1
        before each time; frames from before its life are zero."""
        past, length = self.history - 1, out.shape[1]
        slots = (times[:, None] + torch.arange(-past, length - past)) % self.slots
        frames, rows = self.frames.flatten(1), out.view(slots.numel(), -1)
        torch.index_select(frames, 0, slots.flatten(), out=rows)
        ends = self.terminal[slots[:, :past]]
        earlier = ends.flip(1).cummax(1).values.flip(1)  # a life ended there or later
        which, frame = earlier.nonzero(as_tuple=True)
        rows.index_fill_(0, which * length + frame, 0)
        return out

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
        self.terminal[np.arange(min(first, 0), 0) % self.slots] = 1  # see append_frame
        rewards, frames, actions, terminal = self._arrays
        for time in range(max(first, 0), self.steps + 1):
            slot = time % self.slots
            self._checksums[slot] = crc32(frames[slot].tobytes())
            if time < self.steps:
                transition = _packed(rewards[slot], actions[slot], terminal[slot])
                self._checksums[slot] = crc32(transition, self._checksums[slot])
        if self._checksum() != state["checksum"]:
            raise DataError(
                f"{self.path} is damaged: its frames are not those of the checkpoint at step "
                f"{self.steps}; {way_out}"
            )

    def _first_needed(self) -> int:
        """Time of the oldest frame that a sample may contain; negative before the first frame."""
        return max(0, self.steps - self.capacity) - (self.history - 1)

    def _checksum(self) -> int:
        times = np.arange(max(self._first_needed(), 0), self.steps + 1)
        return crc32(self._checksums[times % self.slots].tobytes())


def _packed(reward: float, action: int, terminal: bool) -> bytes:
    """Return the bytes of a transition that its checksum covers.

    >>> len(_packed(1.0, 3, False))
    6
    """
    return struct.pack("<fBB", reward, action, terminal)


MappedArray = np.memmap[Any, np.dtype[Any]]


def allocate(file: IO[bytes], size: int) -> None:
    """Extend a file, opened to append, to `size` bytes. Raises OSError if the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:  # macOS and Windows
        while (left := size - file.tell()) > 0:
            file.write(bytes(min(left, 1 << 20)))


def _map_arrays(path: Path, *columns: tuple[tuple[int, ...], type]) -> list[MappedArray]:
    """Map arrays of these shapes and types, one after the other in a file.

    Disk space is allocated here, so that a full disk raises OSError; a later write to the mapping
    would end the process with SIGBUS.
    """
    sizes = [prod(shape) * np.dtype(kind).itemsize for shape, kind in columns]
    with path.open("ab") as file:
        if file.tell() < sum(sizes):
            try:
                allocate(file, sum(sizes))
            except OSError:
                path.unlink()
                raise
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        np.memmap(path, kind, "r+", start, shape)
        for start, (shape, kind) in zip(starts, columns, strict=True)
    ]
