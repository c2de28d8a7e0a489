"""`weightnorm report`: write the report, or the tables and figures of the documents."""

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
    docs: Path | None = None
    """Instead of a page, update the tables and figures of README.md and docs/ in this repository
    from the records in its docs/results."""


def main(words: list[str]) -> int:
    from weightnorm.lab.reports import report, update_documents

    options = parse(ReportOptions, words, "report")
    if options.docs is not None:
        for path in update_documents(options.docs):
            print_line(OUT, f"updated: {path}")
        return 0
    files = report(options.runs, options.out)
    for problem in files.problems:
        print_line(ERR, f"left out: {problem}")
    print_line(OUT, f"report: {files.page.resolve()}")
    return 0
