"""The command line: verb → function, no logic.

Exit codes: 0 done, 1 failed, 2 usage, 3 slower than before (bench --compare), 130 interrupted.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightnorm import Parameterization
from weightnorm.lab.checkpoint_files import convert_file, inspect_file
from weightnorm.lab.cli.arguments import (
    nearest,
    parse,
    parse_config,
    parse_known,
    refuse_singular,
    with_flags,
)
from weightnorm.lab.cli.bench import bench
from weightnorm.lab.data import fetch
from weightnorm.lab.data.catalog import DATA_SETS
from weightnorm.lab.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FileError,
    Interrupted,
    RecordError,
    RunError,
    UsageError,
)
from weightnorm.lab.experiments import classify, dqn, draw, vae
from weightnorm.lab.sweeps.grid import Grid, sweep
from weightnorm.lab.sweeps.summary import render

EXPERIMENTS: dict[str, ModuleType] = {module.NAME: module for module in (classify, vae, draw, dqn)}
OUT, ERR = Console(), Console(stderr=True)


def main(words: Sequence[str]) -> int:
    """Run a command; returns its exit code."""
    words = list(words)
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            OUT.print(_overview())
            return 0
        return VERBS[nearest(words[0], VERBS, "command")](words[1:])
    except (UsageError, ConfigError) as error:
        _complain("error", error)
        return 2
    except (RunError, DataError, CheckpointError, RecordError, FileError) as error:
        _complain("failed", error)
        return 1
    except Interrupted as stopped:
        _say(ERR, f"stopped; everything is saved in {stopped}")
        _say_how_to_go_on(words)
        return 130
    except KeyboardInterrupt:
        return 130


# — verbs —


@dataclass(frozen=True)
class NoOptions:
    """There is nothing to set."""


def list_(words: list[str]) -> int:
    """What can be run: experiments, presets and how long they take."""
    parse(NoOptions, words, "list", list_)
    table = Table("experiment", "preset", "settings", box=None)
    for name, module in EXPERIMENTS.items():
        table.add_row(f"[bold]{name}", "", module.TITLE)
        for preset in module.PRESETS:
            table.add_row("", preset, ", ".join(module.SIZES[preset]))
    OUT.print(table)
    OUT.print("\nweightnorm run EXPERIMENT --help  explains every setting", highlight=False)
    return 0


def run(words: list[str]) -> int:
    """Run one experiment, or go on with it: the same command resumes a run that was stopped."""
    module, words = _experiment(words, "run")
    record = module.run(parse_config(module, words, f"run {module.NAME}"), ERR)
    if os.environ.get("RANK", "0") == "0":  # under torchrun, the first rank speaks
        numbers = [f"{k.replace('_', ' ')} {v:.4g}" for k, v in (record.result or {}).items()]
        _say(OUT, f"{record.folder}: {', '.join(numbers)}")
    return 0


@dataclass(frozen=True)
class SweepOptions:
    """The grid. Any setting of the experiment may follow as a flag; see its own --help."""

    parameterizations: tuple[Parameterization, ...] = ()
    """Which; by default, all that the experiment compares."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates; by default, for each parameterization what the paper chose."""
    seeds: tuple[int, ...] = (1,)
    """Seeds."""
    jobs: int = 1
    """Runs at a time on this machine; its threads are split between them."""
    cluster: str | None = None
    """Run on this Ray cluster instead: an address, or auto. The runs folder must be shared."""
    metric: str | None = None
    """The result that decides which learning rate is best; by default the experiment's own, and
    it knows whether the lowest or the highest wins."""


def sweep_(words: list[str]) -> int:
    """Run a grid of experiments: parameterizations × learning rates × seeds."""
    module, rest = _experiment(words, "sweep")
    axes: dict[str, str] = getattr(module, "AXES", {})
    kind = with_flags(SweepOptions, axes, "More than one to range over.")
    options, rest = parse_known(kind, rest, f"sweep {module.NAME}", sweep_)
    refuse_singular(rest, kind)
    base = parse_config(module, rest, f"sweep {module.NAME}")
    grid = Grid(
        experiment=module.NAME,
        base=base,
        parameterizations=options.parameterizations or tuple(module.LEARNING_RATES[base.preset]),
        learning_rates=options.learning_rates,
        seeds=options.seeds,
        axes={axes[flag]: values for flag in axes if (values := getattr(options, flag))},
    )
    return _sweep(grid, ["sweep", *words], options)


def _sweep(grid: Grid, words: list[str], options: SweepOptions) -> int:
    module = EXPERIMENTS[grid.experiment]
    metric = options.metric or module.METRIC
    highest = metric in getattr(module, "HIGHER_IS_BETTER", ())
    result = sweep(
        grid, jobs=options.jobs, cluster=options.cluster, metric=metric, highest=highest,
        console=ERR,
    )  # fmt: skip
    OUT.print(render(result))
    if result.interrupted:
        _say_how_to_go_on(words)
        return 130
    return 1 if result.failed else 0


@dataclass(frozen=True)
class ClaimsOptions:
    """What the paper says about weight norm, claim by claim, with a verdict on each."""

    quick: bool = False
    """Embedded digits, under two minutes; else CIFAR-10, half an hour on two cores."""
    only: tuple[int, ...] = ()
    """Numbers of the claims to measure; by default all."""
    seeds: tuple[int, ...] = ()
    """Seeds behind each empirical claim; by default 1 to 5, or to 3 if quick."""
    jobs: int | None = None
    """Processes that measure; by default one for each core, or one if quick."""
    runs: Path = Path("runs")
    """Folder of the records: the experiments' are read, the claims' kept."""
    data_dir: Path | None = None
    """Folder of the data sets; else $WEIGHTNORM_DATA, else the user's cache."""


def claims(words: list[str]) -> int:
    """Measure what the paper claims; the same command goes on where it was stopped."""
    from weightnorm.lab.claims.context import Workbench
    from weightnorm.lab.claims.runner import measure, table

    options = parse(ClaimsOptions, words, "claims", claims)
    bench = Workbench(options.quick, options.seeds, options.data_dir, options.runs)
    folder = measure(bench, options.only, ERR, options.jobs)
    OUT.print(table(folder))
    _say(OUT, f"record: {folder}; weightnorm report {options.runs} draws it")
    return 0


@dataclass(frozen=True)
class ReportOptions:
    """One HTML page, and PNG and SVG of every figure, from the records below a folder."""

    runs: tyro.conf.Positional[Path] = Path("runs")
    """Folder that holds the records."""
    out: Path = Path("report")
    """Folder the page is written to."""


def report_(words: list[str]) -> int:
    """Turn records into figures, tables and one page."""
    from weightnorm.lab.errors import ReportError
    from weightnorm.lab.reports import report

    options = parse(ReportOptions, words, "report", report_)
    try:
        files = report(options.runs, options.out)
    except ReportError as error:
        raise RecordError(str(error)) from error
    for problem in files.problems:
        _say(ERR, f"left out: {problem}")
    _say(OUT, f"report: {files.page.resolve()}")
    return 0


@dataclass(frozen=True)
class DataOptions:
    """What data is there and what is not; each file is read and verified."""

    data_dir: Path | None = None
    """Folder of the data sets; else $WEIGHTNORM_DATA, else the user's cache."""
    download: tuple[str, ...] = ()
    """Data sets to download: cifar10, mnist, binarized-mnist, or all."""


def data(words: list[str]) -> int:
    """Show what data is there, and download what is not."""
    options = parse(DataOptions, words, "data", data)
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


@dataclass(frozen=True)
class ConvertOptions:
    """A checkpoint file in another format: .pt, .pth, .bin, .safetensors, or an index of shards."""

    source: tyro.conf.Positional[Path]
    """The checkpoint. Pickles are loaded as tensors only: no code in them runs."""
    target: tyro.conf.Positional[Path]
    """The file to write, of the same kind; it appears whole or not at all."""
    to: Literal["parametrize", "hook", "folded"]
    """torch's newer keys, its older ones (weight_g, weight_v), or plain weights."""
    weights: tuple[str, ...] = ()
    """Plain weights to decompose, by name or pattern such as '*.weight'."""
    dim: int | Literal["infer"] | None = "infer"
    """The kept axis, where shapes do not tell it: a flat g, or plain weights (else 0)."""


def convert(words: list[str]) -> int:
    """Move a checkpoint between torch's old keys, its new ones, and plain weights."""
    options = parse(ConvertOptions, words, "convert", convert)
    names = convert_file(options.source, options.target, options.to, options.weights, options.dim)
    _say(OUT, f"{options.target}: {len(names)} normalized weights, written as {options.to}")
    return 0


@dataclass(frozen=True)
class InspectOptions:
    """The normalized weights of a checkpoint file."""

    file: tyro.conf.Positional[Path]
    """The checkpoint: .pt, .pth, .bin, .safetensors, or an index of shards."""


def inspect(words: list[str]) -> int:
    """Show what is weight-normalized in a checkpoint: shape, axis, ‖v‖, g, dead units."""
    options = parse(InspectOptions, words, "inspect", inspect)
    rows, others = inspect_file(options.file)
    table = Table("weight", "format", "shape", "dim", "units", "mean ‖v‖", "mean |g|", "dead")
    for row in rows:
        shape, lengths = "×".join(map(str, row.shape)), (f"{row.v_norm:.4g}", f"{row.g:.4g}")
        table.add_row(
            escape(row.name), row.format, shape, str(row.dim), str(row.units), *lengths,
            str(row.dead or ""),
        )  # fmt: skip
    OUT.print(table)
    _say(OUT, f"{len(rows)} normalized weights, {others} other tensors")
    return 0


@dataclass(frozen=True)
class DemoOptions:
    """The paper's comparison of five parameterizations on embedded digits, in about a minute."""

    out: Path = Path("out")
    """Folder for the records and the report."""


def demo(words: list[str]) -> int:
    """See it work: the five parameterizations on embedded digits, and the report."""
    options = parse(DemoOptions, words, "demo", demo)
    runs = options.out / "runs"
    grid = Grid("classify", replace(classify.PRESETS["demo"], runs=runs))
    code = _sweep(grid, ["demo", *words], SweepOptions(jobs=2))
    return code or report_([str(runs), "--out", str(options.out / "report")])


VERBS: dict[str, Callable[[list[str]], int]] = {
    "list": list_,
    "run": run,
    "sweep": sweep_,
    "claims": claims,
    "bench": bench,
    "report": report_,
    "data": data,
    "convert": convert,
    "inspect": inspect,
    "demo": demo,
}


# — words —


def _overview() -> Table:
    table = Table(title="The experiments of the weight normalization paper", box=None)
    for name, verb in VERBS.items():
        table.add_row(f"[bold]weightnorm {name}", (verb.__doc__ or "").splitlines()[0])
    table.add_row("", "Each explains itself with --help. A good start: weightnorm demo")
    return table


def _experiment(words: list[str], verb: str) -> tuple[ModuleType, list[str]]:
    """The experiment that is named first, and the words after it."""
    if words and words[0] in ("-h", "--help"):
        OUT.print(f"usage: weightnorm {verb} EXPERIMENT [settings]\n", highlight=False)
        OUT.print(f"{VERBS[verb].__doc__}\n", highlight=False)
        list_([])
        raise SystemExit(0)
    if not words or words[0].startswith("-"):
        raise UsageError(f"which experiment? weightnorm {verb} {'|'.join(EXPERIMENTS)} [settings]")
    return EXPERIMENTS[nearest(words[0], EXPERIMENTS, "experiment")], words[1:]


def _say_how_to_go_on(words: list[str]) -> None:
    _say(ERR, f"to go on:  {shlex.join(['weightnorm', *words])}")


def _complain(kind: str, error: Exception) -> None:
    ERR.print(f"[bold red]{kind}[/] {escape(str(error))}", highlight=False, soft_wrap=True)


def _say(console: Console, text: str) -> None:
    """A line as it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
