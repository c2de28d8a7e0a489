"""Atari environments with DQN's preprocessing (section 5.4), on ale-py's emulator and its ROMs.

An action is repeated for four emulator frames. The observation is the pixelwise maximum of the last
two, since sprites flicker, in greyscale and at 84×84. Sticky actions are off, the action set is the
game's minimal one, there is no time limit, and a game starts with 0 to 30 no-ops.

ale-py's own vectorized environment differs: it resizes by area, makes at most 29 no-ops, returns
stale frames at the end of a game, and has no state dict. The tests compare both where they agree.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from weightnorm.lab.errors import DataError

Pixels = NDArray[np.uint8]

SKIP = 4
"""Emulator frames in one step of the agent."""
SIDE = 84
"""Height and width of an observation."""
NO_OPS = 30
"""Largest number of no-op frames at the start of a game."""


class Step(NamedTuple):
    """Outcome of an action."""

    frame: Pixels
    reward: float
    life_lost: bool
    over: bool
    """Whether the game has ended; `reset` starts the next one."""


class Game(Protocol):
    """Environment of an agent. Its random numbers come from torch's global generator."""

    actions: int
    """Number of actions."""
    shape: tuple[int, int]
    """Height and width of a frame."""

    def reset(self) -> Pixels:
        """Start a new game and return its first frame."""

    def step(self, action: int) -> Step:
        """Take an action."""

    def render(self) -> Pixels:
        """Return the screen in colour: (height, width, 3)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Atari:
    """A game of ale-py, by its name with dashes, such as ``space-invaders``.

    Note [state of a game]
        The emulator is deterministic, so a game is saved as the list of its actions and restored by
        replaying them. The emulator's own saved state lacks what remains on the screen from earlier
        frames, which matters where a game (Q*bert for one) does not redraw every line.
    """

    shape = (SIDE, SIDE)

    def __init__(self, game: str) -> None:
        from ale_py import ALEInterface, LoggerMode

        if game not in rom_paths():
            raise DataError(f"ale-py has no game {game!r}")
        ALEInterface.setLoggerMode(LoggerMode.Error)
        self.emulator = ALEInterface()
        self.emulator.setFloat("repeat_action_probability", 0.0)
        self.emulator.setInt("max_num_frames_per_episode", 0)
        self.emulator.setInt("random_seed", 1)
        self.emulator.loadROM(rom_paths()[game])
        self.action_set = self.emulator.getMinimalActionSet()
        self.actions = len(self.action_set)
        height, width = self.emulator.getScreenDims()
        self.resize = Bilinear((height, width), self.shape)
        self.last_two = np.zeros((2, height, width), np.uint8)
        self.no_ops = 0
        self.taken: list[int] = []

    def reset(self) -> Pixels:
        return self._reset(int(torch.randint(NO_OPS + 1, ())))

    def step(self, action: int) -> Step:
        lives = self.emulator.lives()
        reward = self._repeat(self.action_set[action], SKIP)
        self.taken.append(action)
        over = self.emulator.game_over()
        return Step(self._observation(), reward, self.emulator.lives() < lives, over)

    def render(self) -> Pixels:
        colours: Pixels = self.emulator.getScreenRGB()
        return colours

    def state_dict(self) -> dict[str, Any]:
        """See Note [state of a game]."""
        return {"no_ops": self.no_ops, "played": torch.tensor(self.taken, dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reset(state["no_ops"])
        for action in state["played"].tolist():
            self._repeat(self.action_set[action], SKIP)
            self.taken.append(action)

    def _reset(self, no_ops: int) -> Pixels:
        self.emulator.reset_game()
        self.no_ops, self.taken = no_ops, []
        self._repeat(0, no_ops + 2)  # at least two frames, for the maximum
        return self._observation()

    def _repeat(self, action: Any, frames: int) -> float:
        """Repeat an action, keep the last two frames, and return the sum of the rewards."""
        reward = 0
        for left in reversed(range(frames)):
            reward += self.emulator.act(action)
            if left < 2:
                self.emulator.getScreenGrayscale(self.last_two[left])
        return float(reward)

    def _observation(self) -> Pixels:
        return self.resize(self.last_two.max(0))


@cache
def rom_paths() -> dict[str, Path]:
    """Return the ROMs of all single-player games, by name."""
    from ale_py import ALEInterface, roms

    paths = {name: roms.get_rom_path(name) for name in sorted(roms.get_all_rom_ids())}
    return {
        name.replace("_", "-"): path
        for name, path in paths.items()
        if path is not None and ALEInterface.isSupportedROM(path)
    }


class Bilinear:
    """Resizes images by bilinear interpolation in integer arithmetic, bit-equal on all machines.

    The centres of the pixels are aligned: pixel i of n samples the source of N pixels at
    (i + ½)·N/n − ½, clamped to the image, with the weights of its two neighbours in units of
    1/(2n). The result is rounded to the nearest integer, halves up. It equals torch's
    ``interpolate(mode="bilinear")`` and OpenCV's ``INTER_LINEAR`` up to their rounding.
    """

    def __init__(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        (self.rows, weights), (self.columns, self.column_weights) = (
            neighbour_weights(N, n) for N, n in zip(source, target, strict=True)
        )
        self.row_weights = weights[:, :, None]
        self.denominator = 4 * target[0] * target[1]

    def __call__(self, image: Pixels) -> Pixels:
        upper, lower = self.row_weights
        tall = image[self.rows[0]] * upper + image[self.rows[1]] * lower  # (84, 160)
        left, right = self.column_weights
        total = tall[:, self.columns[0]] * left + tall[:, self.columns[1]] * right  # (84, 84)
        rounded: Pixels = ((total + self.denominator // 2) // self.denominator).astype(np.uint8)
        return rounded


def neighbour_weights(source: int, target: int) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Return the two source pixels around each target pixel, and their weights in 1/(2·target).

    >>> neighbour_weights(4, 2)
    (array([[0, 2],
           [1, 3]]), array([[2, 2],
           [2, 2]], dtype=int32))
    """
    position = (2 * np.arange(target) + 1) * source - target
    position = position.clip(0, 2 * target * (source - 1))
    first, fraction = np.divmod(position, 2 * target)
    second = np.minimum(first + 1, source - 1)
    return np.stack([first, second]), np.stack([2 * target - fraction, fraction]).astype(np.int32)
