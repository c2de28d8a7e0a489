"""`weightnorm sweep`: run a grid of experiments."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from weightnorm import Parameterization
from weightnorm.lab.cli.arguments import parse_known, refuse_singular, with_flags
from weightnorm.lab.cli.console import ERR, OUT, print_line
from weightnorm.lab.cli.experiments import EXPERIMENTS, parse_config, split_experiment
from weightnorm.lab.sweeps.grid import Grid, sweep
from weightnorm.lab.sweeps.summary import render


@dataclass(frozen=True)
class SweepOptions:
    """The grid. The flags of weightnorm run EXPERIMENT can be given too."""

    parameterizations: tuple[Parameterization, ...] = ()
    """Parameterizations; by default, all that the experiment compares."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates; by default, the preset's for each parameterization."""
    seeds: tuple[int, ...] = (1,)
    """Seeds."""
    jobs: int = 1
    """Runs at a time, here or on each machine of the cluster; threads are split between them."""
    cluster: str | None = None
    """Run on this Ray cluster instead: an address, or auto. The runs folder must be shared."""
    metric: str | None = None
    """The result that decides which learning rate is best; by default the experiment's own."""


def main(words: list[str]) -> int:
    module, rest = split_experiment(words, "sweep")
    axes: dict[str, str] = getattr(module, "AXES", {})
    kind = with_flags(SweepOptions, axes, "Values of this setting; the grid has a run for each.")
    options, rest = parse_known(kind, rest, f"sweep {module.NAME}")
    refuse_singular(rest, kind)
    base = parse_config(module, rest, f"sweep {module.NAME}")
    grid = Grid(
        experiment=module.NAME,
        base=base,
        parameterizations=options.parameterizations or base.COMPARED,
        learning_rates=options.learning_rates,
        seeds=options.seeds,
        axes={axes[flag]: values for flag in axes if (values := getattr(options, flag))},
    )
    return run_sweep(grid, ["sweep", *words], options)


def run_sweep(grid: Grid, words: list[str], options: SweepOptions) -> int:
    """Run a grid and print its results; returns the exit code."""
    module = EXPERIMENTS[grid.experiment]
    metric = options.metric or module.METRIC
    highest = metric in getattr(module, "HIGHER_IS_BETTER", ())
    result = sweep(
        grid, jobs=options.jobs, cluster=options.cluster, metric=metric, highest=highest,
        console=ERR,
    )  # fmt: skip
    OUT.print(render(result))
    if result.interrupted:
        print_line(ERR, f"to resume:  {shlex.join(['weightnorm', *words])}")
        return 130
    return 1 if result.failed else 0
