"""The verb `claims`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.console import ERR, OUT, print_line


@dataclass(frozen=True)
class ClaimsOptions:
    """The paper's claims about weight norm, each measured and given a verdict."""

    quick: bool = False
    """Embedded digits, under two minutes; else CIFAR-10, 40 minutes on one core."""
    long: bool = False
    """Claim 6, the range of learning rates, over ten epochs of MNIST, about an hour on two cores.
    It has a record of its own."""
    only: tuple[int, ...] = ()
    """Numbers of the claims to measure; by default all."""
    seeds: tuple[int, ...] = ()
    """Seeds of each empirical claim; by default 1 to 5, or to 3 with --quick or --long."""
    jobs: int | None = None
    """Worker processes, of one thread each; by default one per core, or one if quick."""
    runs: Path = Path("runs")
    """Folder to which the record is written."""
    records: Path | None = None
    """Folder of the experiments' records, for claims 18 and 20; by default that of --runs."""
    data_dir: Path | None = None
    """Folder of the data sets; else $WEIGHTNORM_DATA, else the user's cache."""


def main(words: list[str]) -> int:
    from weightnorm.lab.claims.context import Context
    from weightnorm.lab.claims.runner import measure, table

    options = parse(ClaimsOptions, words, "claims")
    context = Context(
        quick=options.quick,
        long=options.long,
        seeds=options.seeds,
        data_dir=options.data_dir,
        runs=options.runs,
        experiment_records=options.records,
    )
    folder = measure(context, options.only, ERR, options.jobs)
    OUT.print(table(folder))
    print_line(OUT, f"record: {folder}; weightnorm report {options.runs} shows its figures")
    return 0
