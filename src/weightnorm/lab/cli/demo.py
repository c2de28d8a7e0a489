"""`weightnorm demo`: five parameterizations on embedded digits, three seeds, with a report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from weightnorm.lab import classify
from weightnorm.lab.cli import report
from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.console import OUT, print_line
from weightnorm.lab.cli.sweep import SweepOptions, run_sweep
from weightnorm.lab.sweeps.grid import Grid


@dataclass(frozen=True)
class DemoOptions:
    """The paper's comparison of five parameterizations on embedded digits, in three minutes."""

    out: Path = Path("out")
    """Folder for the records and the report."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds."""


def main(words: list[str]) -> int:
    from weightnorm.lab.reports import epochs_comparison, read

    options = parse(DemoOptions, words, "demo")
    runs = options.out / "runs"
    grid = Grid("classify", replace(classify.PRESETS["demo"], runs=runs), seeds=options.seeds)
    code = run_sweep(grid, ["demo", *words], SweepOptions(jobs=2))
    if code:
        return code
    folders = {job.folder.absolute() for job in grid.plan()}
    mine = [record for record in read(runs)[0] if record.folder in folders]
    print_line(OUT, epochs_comparison(mine))
    return report.main([str(runs), "--out", str(options.out / "report")])
