"""Progress: bars in a terminal, plain lines in a pipe or file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

NUMBER_WIDTH = 8
STATUS_SECONDS = 30.0
"""Time between status lines where there is no terminal."""


class ProgressBars:
    """Any number of bars below lines of text. Without a terminal only the lines are printed."""

    def __init__(self, console: Console) -> None:
        self.console, self.live = console, console.is_terminal
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
            disable=not self.live,
        )
        self._last = time.monotonic()
        self._bars.start()

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def add(self, name: str, total: int | None, done: int = 0) -> TaskID:
        """Add a bar; `total` is None while it is unknown."""
        return self._bars.add_task(name, total=total, completed=done, text="")

    def update(
        self, bar: TaskID, done: int | None = None, total: int | None = None, **fields: Any
    ) -> None:
        """Set the progress and total of a bar, its ``description``, or the ``text`` beside it."""
        self._bars.update(bar, completed=done, total=total, **fields)

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
        """Print a line if there is no terminal and none was printed for `STATUS_SECONDS`."""
        if not self.live and time.monotonic() - self._last > STATUS_SECONDS:
            self.print(text())

    def close(self) -> None:
        """Remove all bars from the screen."""
        self._bars.stop()


class EpochProgress:
    """Progress of one run: a bar for the epochs, one for the steps, a row of metrics per epoch."""

    def __init__(self, console: Console, title: str, epochs: int) -> None:
        self.epochs, self.epoch, self.steps = epochs, 0, 0
        self._text = ""
        self._columns: list[Column] = []
        """Those of the epoch and of the metrics that fit into the terminal."""
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
        self._bars.update(self._step_bar, done, text=self._text)
        at = f"epoch {self.epoch + 1}/{self.epochs}, step {done}/{self.steps}"
        self._bars.status(lambda: f"{at}  {self._text}")

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Print a row of metrics, the first time below their names."""
        self._bars.update(self._epoch_bar, self.epoch + 1)
        epoch, first = f"{self.epoch + 1}/{self.epochs}", not self._columns
        if first:
            self._columns = columns(
                metrics, 2 * len(str(self.epochs)) + 1, self._bars.console.width
            )
        cells = [epoch, *map(short_number, metrics.values())][: len(self._columns)]
        fresh = (column.copy() for column in self._columns)
        row = Table(*fresh, box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=first)
        row.add_row(*cells)
        self._bars.console.print(row, highlight=False)

    def start_part(self, name: str, count: int) -> None:
        """Start work that follows the last epoch."""
        self._bars.print(f"{name}: {count} parts")
        self._bars.reset(self._step_bar, count)
        self._bars.update(self._step_bar, 0, text="")
        self.steps = count

    def part(self, done: int) -> None:
        """Show that `done` parts are done."""
        self._bars.update(self._step_bar, done)
        self._bars.status(lambda: f"  {done} of {self.steps} parts")

    def close(self) -> None:
        """Remove the bars."""
        self._bars.close()


def columns(metrics: Mapping[str, float], first: int, width: int) -> list[Column]:
    """Return a column for the epoch, `first` wide, and one for each metric that fits the terminal.

    The others are left out; all metrics are in metrics.jsonl.
    """
    found: list[Column] = []
    for name, least in {"epoch": first, **dict.fromkeys(metrics, NUMBER_WIDTH)}.items():
        wide = max(least, *map(len, name.split("_")))
        width -= wide + 2
        if width < -2:
            break
        head = name.replace("_", " ")
        found.append(Column(head, width=wide, justify="right", vertical="bottom"))
    return found


def short_number(value: float) -> str:
    """Return a number with as many digits, at most four, as fit into a column.

    >>> short_number(0.00012345), short_number(1.2345e-07)
    ('0.000123', '1.23e-07')
    """
    texts = [f"{value:.{digits}g}" for digits in (4, 3, 2, 1)]
    return next((text for text in texts if len(text) <= NUMBER_WIDTH), texts[-1])
