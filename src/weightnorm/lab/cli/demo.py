"""`weightnorm demo`: five parameterizations on embedded digits, three seeds, with a report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from weightnorm.lab.cli import report
from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.console import OUT, print_line
from weightnorm.lab.cli.sweep import SweepOptions, run_sweep
from weightnorm.lab.experiments import classify
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
    print_line(OUT, epochs_comparison(read(runs)[0]))
    return report.main([str(runs), "--out", str(options.out / "report")])
