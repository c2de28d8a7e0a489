"""Terminal output that the verbs share."""

from __future__ import annotations

from rich.console import Console

from weightnorm.files.errors import printable

OUT, ERR = Console(), Console(stderr=True)


def print_line(console: Console, text: str) -> None:
    """Print one line as it is: no markup, no wrapping, control characters escaped."""
    console.print(printable(text, keep="\n"), markup=False, highlight=False, soft_wrap=True)
