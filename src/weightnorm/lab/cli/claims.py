"""The verb `claims`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.console import ERR, OUT, print_line


@dataclass(frozen=True)
class ClaimsOptions:
    """What the paper says about weight norm, claim by claim, with a verdict on each."""

    quick: bool = False
    """Embedded digits, under two minutes; else CIFAR-10, half an hour on two cores."""
    only: tuple[int, ...] = ()
    """Numbers of the claims to measure; by default all."""
    seeds: tuple[int, ...] = ()
    """Seeds behind each empirical claim; by default 1 to 5, or to 3 if quick."""
    jobs: int | None = None
    """Processes that measure; by default one for each core, or one if quick."""
    runs: Path = Path("runs")
    """Folder of the records: the experiments' are read, the claims' kept."""
    data_dir: Path | None = None
    """Folder of the data sets; else $WEIGHTNORM_DATA, else the user's cache."""


def main(words: list[str]) -> int:
    from weightnorm.lab.claims.context import Workbench
    from weightnorm.lab.claims.runner import measure, table

    options = parse(ClaimsOptions, words, "claims")
    bench = Workbench(options.quick, options.seeds, options.data_dir, options.runs)
    folder = measure(bench, options.only, ERR, options.jobs)
    OUT.print(table(folder))
    print_line(OUT, f"record: {folder}; weightnorm report {options.runs} draws it")
    return 0
