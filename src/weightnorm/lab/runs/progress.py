"""Progress: bars in a terminal, plain lines in a pipe or file."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

STATUS_SECONDS = 30.0
"""Time between status lines where there is no terminal."""


class ProgressBars:
    """Any number of bars below lines of text. Without a terminal only the lines are printed."""

    def __init__(self, console: Console, status_seconds: float = STATUS_SECONDS) -> None:
        self.console, self.status_seconds = console, status_seconds
        self._bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._last = time.monotonic()
        self._bars.start()

    def add(self, name: str, total: int | None, done: int = 0) -> TaskID:
        """Add a bar; `total` is None while it is unknown."""
        return self._bars.add_task(name, total=total, completed=done, text="")

    def update(
        self,
        bar: TaskID,
        done: int | None = None,
        text: str | None = None,
        total: int | None = None,
    ) -> None:
        """Set the progress, text or total of a bar; None keeps the value."""
        if text is None:
            self._bars.update(bar, completed=done, total=total)
        else:
            self._bars.update(bar, completed=done, total=total, text=text)

    def reset(self, bar: TaskID, total: int | None, done: int = 0) -> None:
        """Start a bar again, with its clock at 0."""
        self._bars.reset(bar, total=total, completed=done)

    def remove(self, bar: TaskID) -> None:
        """Remove a bar."""
        self._bars.remove_task(bar)

    def print(self, text: str) -> None:
        """Print a line above the bars, without markup."""
        self._last = time.monotonic()
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def status(self, text: Callable[[], str]) -> None:
        """Print a line if there is no terminal and none was printed for `status_seconds`."""
        if not self.console.is_terminal and time.monotonic() - self._last > self.status_seconds:
            self.print(text())

    def close(self) -> None:
        """Remove all bars from the screen."""
        self._bars.stop()


class EpochProgress:
    """Progress of one run: a bar for the epochs, one for the steps, a line per epoch."""

    def __init__(self, console: Console, title: str, epochs: int) -> None:
        self.epochs, self.epoch, self.steps = epochs, 0, 0
        self._text = ""
        self._bars = ProgressBars(console)
        self._bars.print(title)
        self._epoch_bar = self._bars.add("epochs", epochs)
        self._step_bar = self._bars.add("steps", None)

    def start_epoch(self, epoch: int, steps: int, done: int) -> None:
        """Start an epoch (counted from 0), or resume it after `done` steps."""
        self.epoch, self.steps = epoch, steps
        self._bars.update(self._epoch_bar, epoch)
        self._bars.reset(self._step_bar, steps, done)

    def step(self, done: int, text: str = "") -> None:
        """Show that `done` steps are done; `text` replaces the metrics beside the bar."""
        self._text = text or self._text
        self._bars.update(self._step_bar, done, self._text)
        self._bars.status(lambda: self._line(f"step {done}/{self.steps}  {self._text}"))

    def end_epoch(self, text: str) -> None:
        """Print the metrics of an epoch."""
        self._bars.update(self._epoch_bar, self.epoch + 1)
        self._bars.print(self._line(text))

    def start_part(self, name: str, count: int) -> None:
        """Start work that follows the last epoch."""
        self._bars.print(f"{name}: {count} parts")
        self._bars.reset(self._step_bar, count)
        self._bars.update(self._step_bar, 0, "")
        self.steps = count

    def part(self, done: int) -> None:
        """Show that `done` parts are done."""
        self._bars.update(self._step_bar, done)
        self._bars.status(lambda: f"  {done} of {self.steps} parts")

    def close(self) -> None:
        """Remove the bars."""
        self._bars.close()

    def _line(self, text: str) -> str:
        return f"epoch {self.epoch + 1}/{self.epochs}  {text}"
