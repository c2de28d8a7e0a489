"""`weightnorm data`: show and download the data sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.console import OUT, print_line
from weightnorm.lab.data import fetch
from weightnorm.lab.data.catalog import DATA_SETS
from weightnorm.lab.errors import nearest

STATES = {
    "valid": "[green]ok",
    "missing": "[yellow]missing",
    "corrupt": "[red]corrupt",
    "unreadable": "[red]unreadable",
}


@dataclass(frozen=True)
class DataOptions:
    """Check which data sets are complete; the checksum of each file is verified."""

    data_dir: Path | None = None
    """Folder of the data sets; else $WEIGHTNORM_DATA, else the user's cache."""
    download: tuple[str, ...] = ()
    """Data sets to download: cifar10, mnist, binarized-mnist, or all."""


def main(words: list[str]) -> int:
    options = parse(DataOptions, words, "data")
    wanted = tuple(DATA_SETS) if "all" in options.download else options.download
    for name in [nearest(name, DATA_SETS, "data set") for name in wanted]:
        fetch.fetch(name, options.data_dir)
    for data_set in fetch.status(options.data_dir):
        print_line(OUT, f"{data_set.name}: {data_set.folder}")
        table = Table.grid(padding=(0, 2))
        for file in data_set.files:
            table.add_row("", file.path.name, STATES[file.state], f"{file.file.size:,} bytes")
        OUT.print(table)
    print_line(OUT, "digits: in scikit-learn")
    return 0
