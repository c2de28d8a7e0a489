"""Atari games as DQN plays them (section 5.4), on ale-py's emulator, which ships the cartridges.

An action is held for four frames of the emulator. What the agent then sees is the maximum of the
last two, since sprites flicker, in grey and at 84×84. Sticky actions are off, the action set is the
game's minimal one, nothing limits the time of play, and a game begins with 0 to 30 no-ops.

ale-py's own vectorized environment is not this one: it resizes by area, makes 29 no-ops at most,
keeps stale frames at the end of a game, and cannot be saved. Where the two agree the tests hold
this module against it.
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
"""Frames of the emulator in one step of the agent."""
SIDE = 84
"""Pixels of what the agent sees."""
NO_OPS = 30
"""At most so many frames pass before the agent's first action."""


class Step(NamedTuple):
    """What an action led to."""

    frame: Pixels
    reward: float
    life_lost: bool
    over: bool
    """Whether the game has ended; then it goes on only after a new start."""


class Game(Protocol):
    """What an agent plays. Its chances are drawn from torch's global generator."""

    actions: int
    """How many there are."""
    shape: tuple[int, int]
    """Of a frame."""

    def start(self) -> Pixels:
        """Begin anew; the first frame."""

    def step(self, action: int) -> Step:
        """Play on."""

    def screen(self) -> Pixels:
        """What a person would see now, for pictures: (height, width, 3)."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Atari:
    """One game of ale-py's, by its name with dashes, such as ``space-invaders``.

    Note [a game is its actions]
        The emulator is deterministic, so the state of a game is the list of the actions since its
        start, and going back to it is playing them again. The emulator can save its state, too, but
        not what is left on the screen where a game (Q*bert for one) does not draw every line.
    """

    shape = (SIDE, SIDE)

    def __init__(self, game: str) -> None:
        from ale_py import ALEInterface, LoggerMode

        if game not in cartridges():
            raise DataError(f"ale-py has no game {game!r}")
        ALEInterface.setLoggerMode(LoggerMode.Error)
        self.emulator = ALEInterface()
        self.emulator.setFloat("repeat_action_probability", 0.0)
        self.emulator.setInt("max_num_frames_per_episode", 0)
        self.emulator.setInt("random_seed", 1)
        self.emulator.loadROM(cartridges()[game])
        self.buttons = self.emulator.getMinimalActionSet()
        self.actions = len(self.buttons)
        height, width = self.emulator.getScreenDims()
        self.resize = Bilinear((height, width), self.shape)
        self.last_two = np.zeros((2, height, width), np.uint8)
        self.no_ops = 0
        self.played: list[int] = []

    def start(self) -> Pixels:
        return self._start(int(torch.randint(NO_OPS + 1, ())))

    def step(self, action: int) -> Step:
        lives = self.emulator.lives()
        reward = self._hold(self.buttons[action], SKIP)
        self.played.append(action)
        over = self.emulator.game_over()
        return Step(self._seen(), reward, self.emulator.lives() < lives, over)

    def screen(self) -> Pixels:
        colours: Pixels = self.emulator.getScreenRGB()
        return colours

    def state_dict(self) -> dict[str, Any]:
        """See Note [a game is its actions]."""
        return {"no_ops": self.no_ops, "played": torch.tensor(self.played, dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start(state["no_ops"])
        for action in state["played"].tolist():
            self._hold(self.buttons[action], SKIP)
            self.played.append(action)

    def _start(self, no_ops: int) -> Pixels:
        self.emulator.reset_game()
        self.no_ops, self.played = no_ops, []
        self._hold(0, no_ops + 2)  # two frames at least, for there to be a maximum
        return self._seen()

    def _hold(self, button: Any, frames: int) -> float:
        """Let so many frames pass and remember the last two; the sum of the rewards."""
        reward = 0
        for left in reversed(range(frames)):
            reward += self.emulator.act(button)
            if left < 2:
                self.emulator.getScreenGrayscale(self.last_two[left])
        return float(reward)

    def _seen(self) -> Pixels:
        return self.resize(self.last_two.max(0))


@cache
def cartridges() -> dict[str, Path]:
    """The games that one can play alone, by name."""
    from ale_py import ALEInterface, roms

    paths = {name: roms.get_rom_path(name) for name in sorted(roms.get_all_rom_ids())}
    return {
        name.replace("_", "-"): path
        for name, path in paths.items()
        if path is not None and ALEInterface.isSupportedROM(path)
    }


class Bilinear:
    """Images resized by bilinear interpolation, in whole numbers, so that they are the same bits
    everywhere.

    The centres of the pixels are aligned: pixel i of n looks at (i + ½)·N/n − ½ among N, kept
    within the image, and weighs its two neighbours there in 1/(2n). The mean is rounded to the
    nearest grey, halves up. This is torch's ``interpolate(mode="bilinear")`` and OpenCV's
    ``INTER_LINEAR`` up to their rounding.
    """

    def __init__(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        (self.rows, weights), (self.columns, self.column_weights) = (
            neighbours(N, n) for N, n in zip(source, target, strict=True)
        )
        self.row_weights = weights[:, :, None]
        self.whole = 4 * target[0] * target[1]

    def __call__(self, image: Pixels) -> Pixels:
        upper, lower = self.row_weights
        tall = image[self.rows[0]] * upper + image[self.rows[1]] * lower  # (84, 160)
        left, right = self.column_weights
        total = tall[:, self.columns[0]] * left + tall[:, self.columns[1]] * right  # (84, 84)
        rounded: Pixels = ((total + self.whole // 2) // self.whole).astype(np.uint8)
        return rounded


def neighbours(source: int, target: int) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """For each of `target` pixels the two of `source` around it, and their weights in 1/(2·target).

    >>> neighbours(4, 2)
    (array([[0, 2],
           [1, 3]]), array([[2, 2],
           [2, 2]], dtype=int32))
    """
    place = (2 * np.arange(target) + 1) * source - target
    place = place.clip(0, 2 * target * (source - 1))
    first, beyond = np.divmod(place, 2 * target)
    second = np.minimum(first + 1, source - 1)
    return np.stack([first, second]), np.stack([2 * target - beyond, beyond]).astype(np.int32)
