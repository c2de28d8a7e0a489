"""The verb `report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.console import ERR, OUT, print_line


@dataclass(frozen=True)
class ReportOptions:
    """One HTML page, and PNG and SVG of every figure, from the records below a folder."""

    runs: tyro.conf.Positional[Path] = Path("runs")
    """Folder that holds the records."""
    out: Path = Path("report")
    """Folder the page is written to."""


def main(words: list[str]) -> int:
    from weightnorm.lab.reports import report

    options = parse(ReportOptions, words, "report")
    files = report(options.runs, options.out)
    for problem in files.problems:
        print_line(ERR, f"left out: {problem}")
    print_line(OUT, f"report: {files.page.resolve()}")
    return 0
