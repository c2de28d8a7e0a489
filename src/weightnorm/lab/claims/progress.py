"""Which claim is being measured and how far: bars in a terminal, a line now and then in a pipe."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from weightnorm.lab.claims.claim import Claim, Measured

SECONDS = 30.0
"""Between lines in a pipe."""


class Shown:
    """The claims, and the parts of the one at hand."""

    def __init__(self, console: Console, claims: int) -> None:
        self.console, self.total, self.count = console, claims, 0
        self.bars = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.claims = self.bars.add_task("claims", total=claims)
        self.parts = self.bars.add_task("parts", total=None)
        self.began = self.last = time.monotonic()
        self.bars.start()

    def begin(self, claim: Claim) -> None:
        self.count += 1
        self.began = self.last = time.monotonic()
        self.bars.reset(self.parts, total=None)
        self._say(f"claim {claim.number} ({self.count} of {self.total}): {claim.statement}")

    def part(self, done: int, total: int) -> None:
        self.bars.update(self.parts, completed=done, total=total)
        if not self.console.is_terminal and time.monotonic() - self.last > SECONDS:
            self.last = time.monotonic()
            self._say(f"  {done} of {total} parts after {self._elapsed()}")

    def end(self, found: Measured) -> None:
        self.bars.update(self.claims, completed=self.count)
        self._say(f"  {found.verdict} ({self._elapsed()}): {found.value}")

    def close(self) -> None:
        self.bars.stop()

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self.began:.0f} s"

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
