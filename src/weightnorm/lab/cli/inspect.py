"""The verb `inspect`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.markup import escape
from rich.table import Table

from weightnorm.lab.checkpoint_files import inspect_file
from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.console import OUT, print_line


@dataclass(frozen=True)
class InspectOptions:
    """The normalized weights of a checkpoint file."""

    file: tyro.conf.Positional[Path]
    """The checkpoint: .pt, .pth, .bin, .safetensors, or an index of shards."""


def main(words: list[str]) -> int:
    options = parse(InspectOptions, words, "inspect")
    rows, others = inspect_file(options.file)
    table = Table("weight", "format", "shape", "dim", "units", "mean ‖v‖", "mean |g|", "dead")
    for row in rows:
        shape, lengths = "×".join(map(str, row.shape)), (f"{row.v_norm:.4g}", f"{row.g:.4g}")
        table.add_row(
            escape(row.name), row.format, shape, str(row.dim), str(row.units), *lengths,
            str(row.dead or ""),
        )  # fmt: skip
    OUT.print(table)
    print_line(OUT, f"{len(rows)} normalized weights, {others} other tensors")
    return 0
