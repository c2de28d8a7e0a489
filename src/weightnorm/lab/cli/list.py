"""The verb `list`."""

from __future__ import annotations

from dataclasses import dataclass

from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.experiments import print_experiments


@dataclass(frozen=True)
class NoOptions:
    """There is nothing to set."""


def main(words: list[str]) -> int:
    parse(NoOptions, words, "list")
    print_experiments()
    return 0
