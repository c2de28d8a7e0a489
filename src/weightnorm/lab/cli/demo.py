"""The verb `demo`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from weightnorm.lab.cli import report
from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.sweep import SweepOptions, run_sweep
from weightnorm.lab.experiments import classify
from weightnorm.lab.sweeps.grid import Grid


@dataclass(frozen=True)
class DemoOptions:
    """The paper's comparison of five parameterizations on embedded digits, in about a minute."""

    out: Path = Path("out")
    """Folder for the records and the report."""


def main(words: list[str]) -> int:
    options = parse(DemoOptions, words, "demo")
    runs = options.out / "runs"
    grid = Grid("classify", replace(classify.PRESETS["demo"], runs=runs))
    code = run_sweep(grid, ["demo", *words], SweepOptions(jobs=2))
    return code or report.main([str(runs), "--out", str(options.out / "report")])
