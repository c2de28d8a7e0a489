"""Who plays: game after game, keeping the score."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm.lab.rl.atari import Game, Pixels, Step

HISTORY = 4
"""Frames in a state."""


class Player:
    """Plays one game after the other. The score is the mean return of those that are over, or what
    the first has brought so far."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.total, self.games, self.current = 0.0, 0, 0.0

    def start(self) -> Pixels:
        """A new game; its first frame."""
        self.current = 0.0
        return self.game.start()

    def step(self, action: int) -> Step:
        """Play on; after the end of a game the frame is the first of the next."""
        step = self.game.step(action)
        self.current += step.reward
        if not step.over:
            return step
        self.total += self.current
        self.games += 1
        return step._replace(frame=self.start())

    def count_anew(self) -> None:
        """Forget the games that are over."""
        self.total, self.games = 0.0, 0

    @property
    def score(self) -> float:
        return self.total / self.games if self.games else self.current

    def state_dict(self) -> dict[str, Any]:
        tally = {"total": self.total, "games": self.games, "current": self.current}
        return {"game": self.game.state_dict(), **tally}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.game.load_state_dict(state["game"])
        self.total, self.games, self.current = state["total"], state["games"], state["current"]


class Tester(Player):
    """Plays without learning: whole games, a loss of a life being no end."""

    def __init__(self, game: Game) -> None:
        super().__init__(game)
        self.frames = torch.zeros(1, HISTORY, *game.shape, dtype=torch.uint8)

    def begin(self) -> None:
        """A new game, and no games before it."""
        self.count_anew()
        self._see(self.start(), first=True)

    def play(self, actor: nn.Module, epsilon: float) -> None:
        """One step."""
        step = self.step(choose(actor, lambda: self.frames, epsilon, self.game.actions))
        self._see(step.frame, first=step.over)

    def _see(self, frame: Pixels, first: bool) -> None:
        earlier = torch.zeros_like(self.frames) if first else self.frames
        self.frames = torch.cat([earlier[:, 1:], torch.from_numpy(frame)[None, None]], 1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "frames": self.frames}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.frames = state["frames"]


class Beginning:
    """What is noted when learning begins, to measure the agent against: the score of random play
    until then, and states that are valued after each epoch."""

    def __init__(self) -> None:
        self.score = math.nan
        self.states = torch.empty(0, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score, "states": self.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.score, self.states = state["score"], state["states"]


@torch.no_grad()
def choose(actor: nn.Module, state: Callable[[], Tensor], epsilon: float, actions: int) -> int:
    """The action of the highest value or, with probability ε, any."""
    if torch.rand(()).item() < epsilon:
        return int(torch.randint(actions, ()))
    device = next(actor.parameters()).device
    return int(actor(state().to(device)).argmax())
