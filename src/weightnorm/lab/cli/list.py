"""`weightnorm list`: list the experiments and their presets."""

from __future__ import annotations

from dataclasses import dataclass

from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.experiments import print_experiments


@dataclass(frozen=True)
class NoOptions:
    """There are no settings."""


def main(words: list[str]) -> int:
    parse(NoOptions, words, "list")
    print_experiments()
    return 0
