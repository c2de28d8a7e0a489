"""The verb `data`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.console import OUT
from weightnorm.lab.data import fetch
from weightnorm.lab.data.catalog import DATA_SETS
from weightnorm.lab.errors import nearest


@dataclass(frozen=True)
class DataOptions:
    """What data is there and what is not; each file is read and verified."""

    data_dir: Path | None = None
    """Folder of the data sets; else $WEIGHTNORM_DATA, else the user's cache."""
    download: tuple[str, ...] = ()
    """Data sets to download: cifar10, mnist, binarized-mnist, or all."""


def main(words: list[str]) -> int:
    options = parse(DataOptions, words, "data")
    wanted = tuple(DATA_SETS) if "all" in options.download else options.download
    for name in [nearest(name, DATA_SETS, "data set") for name in wanted]:
        fetch.fetch(name, options.data_dir)
    looks = {"valid": "[green]ok", "missing": "[yellow]missing", "corrupt": "[red]corrupt"}
    table = Table("data set", "file", "state", "bytes", box=None)
    for found in fetch.status(options.data_dir):
        table.add_row(f"[bold]{found.name}", str(found.folder), "", "")
        for file in found.files:
            table.add_row("", file.path.name, looks[file.state], f"{file.file.size:,}")
    table.add_row("[bold]digits", "in scikit-learn", looks["valid"], "")
    OUT.print(table)
    return 0
