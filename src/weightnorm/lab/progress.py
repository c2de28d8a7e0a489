"""Progress: bars in a terminal, plain lines in a pipe or file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from textwrap import wrap

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

NUMBER_WIDTH = 8
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
    """Progress of one run: a bar for the epochs, one for the steps, a row of metrics per epoch."""

    def __init__(self, console: Console, title: str, epochs: int) -> None:
        self.epochs, self.epoch, self.steps = epochs, 0, 0
        self.width = console.width
        self._text = ""
        self._columns: dict[str, int] = {}
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
        at = f"epoch {self.epoch + 1}/{self.epochs}, step {done}/{self.steps}"
        self._bars.status(lambda: f"{at}  {self._text}")

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Print a row of metrics, the first time below their names."""
        self._bars.update(self._epoch_bar, self.epoch + 1)
        first = len(f"{self.epochs}/{self.epochs}")
        if not self._columns:
            self._columns, header = table_header(metrics, max(first, len("epoch")), self.width)
            for line in header:
                self._bars.print(line)
        row = [f"{self.epoch + 1}/{self.epochs}".rjust(max(first, len("epoch")))]
        row += [short_number(metrics[name], width) for name, width in self._columns.items()]
        self._bars.print("  ".join(row))

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


def table_header(names: Iterable[str], first: int, width: int) -> tuple[dict[str, int], list[str]]:
    """Return the width of each column, and the lines of their names, which are broken at spaces.

    The column of epochs comes before, `first` wide. Columns that do not fit into `width` are left
    out; all metrics are in metrics.jsonl.

    >>> print(*table_header(["train_loss", "train_negative_elbo"], 5, 80)[1], sep="\\n")
                        train
              train  negative
    epoch      loss      elbo
    """
    columns: dict[str, int] = {}
    heads = {}
    left = width - first
    for name in names:
        words = wrap(name.replace("_", " "), NUMBER_WIDTH, break_long_words=False)
        columns[name] = max(NUMBER_WIDTH, *map(len, words))
        left -= columns[name] + 2
        if left < 0:
            del columns[name]
            break
        heads[name] = words
    height = max(map(len, heads.values()), default=1)
    lines = []
    for i in range(height):
        cells = [("epoch" if i == height - 1 else "").rjust(first)]
        for name, words in heads.items():
            above = height - len(words)
            cells.append((words[i - above] if i >= above else "").rjust(columns[name]))
        lines.append("  ".join(cells))
    return columns, lines


def short_number(value: float, width: int) -> str:
    """Return a number with as many digits, at most four, as fit, right-justified.

    >>> short_number(0.00012345, 8), short_number(1.2345e-07, 8)
    ('0.000123', '1.23e-07')
    """
    texts = [f"{value:.{digits}g}" for digits in (4, 3, 2, 1)]
    return next((text for text in texts if len(text) <= width), texts[-1]).rjust(width)
