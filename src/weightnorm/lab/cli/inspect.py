"""The verb `inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.markup import escape
from rich.table import Column, Table

from weightnorm.files.errors import printable
from weightnorm.files.inspect import WeightSummary, inspect_file
from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.console import OUT, print_line


@dataclass(frozen=True)
class InspectOptions:
    """A row for each normalized weight: format, shape, kept axis, mean ‖v‖, mean |g|, dead units
    (g = 0 or v = 0). Nothing in the file is executed."""

    file: tyro.conf.Positional[Path]
    """The checkpoint: .pt, .pth, .bin, .ckpt, .safetensors, or the .safetensors.index.json of
    shards."""


def main(words: list[str]) -> int:
    options = parse(InspectOptions, words, "inspect")
    contents = inspect_file(options.file)
    rows, others = contents.weights, contents.others
    if rows:
        OUT.print(_table(rows))
    print_line(OUT, f"{len(rows)} normalized weights, {others} other tensors")
    return 0


def _table(rows: list[WeightSummary]) -> Table:
    names = ("format", "shape", "dim", "units", "mean ‖v‖", "mean |g|", "dead")
    columns = [Column(name, no_wrap=name != "format") for name in names]
    table = Table(Column("weight", overflow="fold"), *columns, box=None, padding=(0, 1))
    for row in rows:
        table.add_row(
            escape(printable(row.name)),
            row.format,
            "×".join(map(str, row.shape)),
            "?" if row.dim == "ambiguous" else str(row.dim),
            str(row.units),
            "?" if row.dim == "ambiguous" else f"{row.v_norm:.4g}",
            f"{row.g:.4g}",
            str(row.dead or ""),
        )
    return table
