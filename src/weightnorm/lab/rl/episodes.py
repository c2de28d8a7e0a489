"""Play episodes and accumulate returns."""

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
    """Plays episodes one after the other and accumulates their returns."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.total, self.games, self.current = 0.0, 0, 0.0

    def reset(self) -> Pixels:
        """Start a new episode and return its first frame."""
        self.current = 0.0
        return self.game.reset()

    def step(self, action: int) -> Step:
        """Take an action. At the end of an episode the frame is the first of the next one."""
        step = self.game.step(action)
        self.current += step.reward
        if not step.over:
            return step
        self.total += self.current
        self.games += 1
        return step._replace(frame=self.reset())

    def reset_score(self) -> None:
        """Forget the returns of the finished episodes."""
        self.total, self.games = 0.0, 0

    @property
    def score(self) -> float:
        """Mean return of the finished episodes; before the first has ended, its return so far."""
        return self.total / self.games if self.games else self.current

    def state_dict(self) -> dict[str, Any]:
        returns = {"total": self.total, "games": self.games, "current": self.current}
        return {"game": self.game.state_dict(), **returns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.game.load_state_dict(state["game"])
        self.total, self.games, self.current = state["total"], state["games"], state["current"]


class Evaluator(Player):
    """Plays whole games with a fixed policy: a lost life does not end an episode."""

    def __init__(self, game: Game) -> None:
        super().__init__(game)
        self.frames = torch.zeros(1, HISTORY, *game.shape, dtype=torch.uint8)

    def start(self) -> None:
        """Start the first game of an evaluation."""
        self.reset_score()
        self._append_frame(self.reset(), first=True)

    def play_step(self, actor: nn.Module, epsilon: float) -> None:
        """Play one ε-greedy step."""
        step = self.step(epsilon_greedy(actor, lambda: self.frames, epsilon, self.game.actions))
        self._append_frame(step.frame, first=step.over)

    def _append_frame(self, frame: Pixels, first: bool) -> None:
        earlier = torch.zeros_like(self.frames) if first else self.frames
        self.frames = torch.cat([earlier[:, 1:], torch.from_numpy(frame)[None, None]], 1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "frames": self.frames}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.frames = state["frames"]


class InitialBaseline:
    """Measurements before the first update, as a baseline of the agent.

    The score of random play, and the states whose mean value is recorded after each epoch.
    """

    def __init__(self) -> None:
        self.score = math.nan
        self.states = torch.empty(0, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score, "states": self.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.score, self.states = state["score"], state["states"]


@torch.no_grad()
def epsilon_greedy(
    actor: nn.Module, state: Callable[[], Tensor], epsilon: float, actions: int
) -> int:
    """Return a random action with probability ε, else the action of the highest value."""
    if torch.rand(()).item() < epsilon:
        return int(torch.randint(actions, ()))
    device = next(actor.parameters()).device
    return int(actor(state().to(device)).argmax())
