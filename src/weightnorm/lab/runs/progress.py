"""How far a run is: bars in a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Reporter(Protocol):
    """What a run tells about itself."""

    def epoch(self, number: int, steps: int, done: int) -> None:
        """An epoch begins, or goes on after `done` steps."""

    def step(self, done: int, live: str) -> None:
        """A step is done."""

    def row(self, text: str) -> None:
        """An epoch's metrics."""

    def close(self) -> None:
        """Nothing more comes."""


class Silent:
    """For every rank but the first."""

    def epoch(self, number: int, steps: int, done: int) -> None: ...

    def step(self, done: int, live: str) -> None: ...

    def row(self, text: str) -> None: ...

    def close(self) -> None: ...


class Lines:
    """One line an epoch, and one now and then within long ones."""

    def __init__(self, console: Console, title: str, epochs: int, seconds: float = 30.0) -> None:
        self.console, self.title, self.epochs, self.seconds = console, title, epochs, seconds
        self.number = self.steps = 0
        self.live = ""
        self.last = time.monotonic()
        console.print(title, highlight=False)

    def epoch(self, number: int, steps: int, done: int) -> None:
        self.number, self.steps = number, steps

    def step(self, done: int, live: str) -> None:
        self.live = live or self.live
        if time.monotonic() - self.last > self.seconds:
            self._say(f"step {done}/{self.steps}  {self.live}")

    def row(self, text: str) -> None:
        self._say(text)

    def close(self) -> None: ...

    def _say(self, text: str) -> None:
        self.last = time.monotonic()
        self.console.print(
            f"epoch {self.number + 1}/{self.epochs}  {text}", highlight=False, soft_wrap=True
        )


class Bars:
    """A bar for the epochs and one for the steps, with the time that is left and live metrics."""

    def __init__(self, console: Console, title: str, epochs: int) -> None:
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[live]}"),
            console=console,
        )
        console.print(f"[bold]{title}")
        self.epochs = self.progress.add_task("epochs", total=epochs, live="")
        self.steps = self.progress.add_task("steps", total=None, live="")
        self.total = epochs
        self.number = 0
        self.progress.start()

    def epoch(self, number: int, steps: int, done: int) -> None:
        self.number = number
        self.progress.update(self.epochs, completed=number)
        self.progress.reset(self.steps, total=steps, completed=done)

    def step(self, done: int, live: str) -> None:
        self.progress.update(self.steps, completed=done)
        if live:
            self.progress.update(self.steps, live=live)

    def row(self, text: str) -> None:
        self.progress.update(self.epochs, completed=self.number + 1)
        self.progress.console.print(f"epoch {self.number + 1}/{self.total}  {text}")

    def close(self) -> None:
        self.progress.stop()


def reporter(console: Console, title: str, epochs: int) -> Reporter:
    """Bars where a person looks on, lines where a file does."""
    return (Bars if console.is_terminal else Lines)(console, title, epochs)
