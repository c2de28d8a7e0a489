"""The command line: a function for each command, whose arguments are the command's options.

Exit codes: 0 done, 1 failed, 2 usage, 3 slower than before (bench --compare), 130 interrupted.
A `run` that diverged has failed, also when the command is repeated; a `sweep` with diverged runs
has not.

Only torch is needed to import this module: a command imports what it needs, and an error names the
extra that installs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from weightnorm import Parameterization, __version__
from weightnorm.files.commands import convert, inspect
from weightnorm.files.errors import FileError, printable
from weightnorm.lab.errors import ConfigError, Interrupted, LabError, nearest

if TYPE_CHECKING:
    from weightnorm.lab.sweep import Grid

EXPERIMENTS = ("classify", "vae", "draw", "dqn", "language")
SLOWER = 3
"""Exit code of bench --compare if a value got worse."""


# — experiments —


def list_experiments() -> None:
    """List the experiments and their presets."""
    for name in EXPERIMENTS:
        module = experiment(name)
        say(f"{name}: {module.TITLE}")
        for preset, config in module.PRESETS.items():
            words, _, data = preset.partition(" ")
            words = f"--preset {words} --data {data}" if data else f"--preset {words}"
            _item(f"  {words}", 32, config.about)
    say("\nweightnorm run EXPERIMENT --help explains every setting")


def run(words: list[str]) -> int:
    """Run one experiment, or resume it."""
    from weightnorm.lab.records import is_number

    module, words = split_experiment("run", words)
    config = parse_config(module, words, f"run {module.NAME}")
    record = module.run(config, console(stderr=True))
    if os.environ.get("RANK", "0") == "0":  # under torchrun, only the first rank prints
        result = {key: value for key, value in (record.result or {}).items() if is_number(value)}
        numbers = ", ".join(f"{key.replace('_', ' ')} {x:.4g}" for key, x in result.items())
        say(f"record: {record.folder}\n{numbers}")
    return 0


@dataclass(frozen=True)
class SweepOptions:
    """The grid. The options of weightnorm run EXPERIMENT can be given too."""

    parameterizations: tuple[Parameterization, ...] = ()
    """Parameterizations; by default, all that the experiment compares."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates; by default, the preset's for each parameterization."""
    seeds: tuple[int, ...] = (1,)
    """Seeds."""
    jobs: int = 1
    """Runs at a time, here or on each machine of the cluster; threads are split between them."""
    cluster: str | None = None
    """Run on this Ray cluster instead: an address, or auto. The output folder must be shared."""
    metric: str | None = None
    """The result that decides which learning rate is best; by default the experiment's own."""
    dry_run: bool = False
    """Only print the commands of the runs that are left."""


def sweep(words: list[str]) -> int:
    """Run a grid: parameterizations × learning rates × seeds."""
    from weightnorm.lab.sweep import Grid

    module, rest = split_experiment("sweep", words)
    name, axes = f"sweep {module.NAME}", getattr(module, "AXES", {})
    # A flag with any number of values for each further field that the experiment lets vary.
    values = [(flag, tuple[str, ...], dataclasses.field(default=())) for flag in axes]
    kind = dataclasses.make_dataclass("Options", values, bases=(SweepOptions,), frozen=True)
    kind.__doc__ = SweepOptions.__doc__
    options, rest = parse(kind, rest, name, return_unknown_args=True)
    for flag in (word.partition("=")[0].replace("_", "-") for word in rest):
        if flag.removeprefix("--").replace("-", "_") + "s" in vars(options):
            raise ConfigError(f"a grid takes {flag}s, one value or more; got {flag}")
    base = parse_config(module, rest, name)
    grid = Grid(
        experiment=module.NAME,
        base=base,
        parameterizations=options.parameterizations or base.COMPARED,
        learning_rates=options.learning_rates,
        seeds=options.seeds,
        axes={axes[flag]: given for flag in axes if (given := getattr(options, flag))},
    )
    return run_sweep(grid, ["sweep", *words], options)


def run_sweep(grid: Grid, words: list[str], options: SweepOptions) -> int:
    """Run a grid and print its results; returns the exit code."""
    from weightnorm.lab.sweep import summary_table, sweep

    module = experiment(grid.experiment)
    if options.dry_run:
        jobs = grid.plan(("weightnorm", "run"))
        left = [job for job in jobs if not job.record().finished]
        for job in left:
            say(shlex.join(job.words))
        print(f"{len(jobs)} runs, {len(jobs) - len(left)} of them finished", file=sys.stderr)
        return 0
    metric = options.metric or module.METRIC
    result = sweep(
        grid,
        jobs=options.jobs,
        cluster=options.cluster,
        metric=metric,
        highest=metric in getattr(module, "HIGHER_IS_BETTER", ()),
        console=console(stderr=True),
    )
    console().print(summary_table(result))
    if result.interrupted:
        print(f"to resume:  {shlex.join(['weightnorm', *words])}", file=sys.stderr)
        return Interrupted.exit_code
    return 1 if result.failed else 0


def demo(out: Path = Path("out"), seeds: tuple[int, ...] = (1, 2, 3)) -> int:
    """Compare five parameterizations in three minutes.

    Args:
        out: folder for the records and the report.
        seeds: seeds.
    """
    from weightnorm.lab.report import epochs_comparison, read
    from weightnorm.lab.sweep import Grid

    base = replace(experiment("classify").PRESETS["demo"], out=out / "runs")
    grid = Grid("classify", base, seeds=seeds)
    words = ["demo", "--out", str(out), "--seeds", *map(str, seeds)]
    if code := run_sweep(grid, words, SweepOptions(jobs=2)):
        return code
    folders = {job.folder.absolute() for job in grid.plan()}
    say(epochs_comparison([r for r in read(out / "runs")[0] if r.folder in folders]))
    report(out / "runs", out=out / "report")
    return 0


def status(folder: Path = Path("runs"), /) -> None:
    """Show the state, epoch and result of runs.

    Args:
        folder: folder of records, such as the --out of runs.
    """
    from weightnorm.lab.files import is_locked
    from weightnorm.lab.records import find_records, is_number

    records, problems = find_records(folder)
    states: Counter[str] = Counter()
    for setting, runs in groupby(records, lambda run: run.folder.relative_to(folder).parent.parent):
        say(f"{setting}")
        for record in runs:
            state = "running" if is_locked(record.folder) else "stopped"
            if record.finished:
                state = "diverged" if record.diverged else "finished"
            states[state] += 1
            place = record.folder.relative_to(folder / setting)
            epochs = f"{len(record.metrics)}/{record.config.get('epochs', '–')}"
            row = record.result or (record.metrics[-1] if record.metrics else {})
            name = record.experiment
            metric = experiment(name).METRIC if name in EXPERIMENTS else ""
            value = (
                f"{metric.replace('_', ' ')} {row[metric]:.4g}"
                if is_number(row.get(metric))
                else ""
            )
            say(f"  {place!s:20} {state:8} {epochs:>6}  {value}".rstrip())
    for problem in problems:
        say(f"cannot be read: {problem}")
    say(", ".join(f"{n} {state}" for state, n in states.items()) or f"no runs in {folder}")


# — claims, benchmarks, reports, data —


def claims(
    quick: bool = False,
    only: tuple[int, ...] = (),
    seeds: tuple[int, ...] = (),
    jobs: int | None = None,
    out: Path = Path("runs"),
    records: Path | None = None,
    data_dir: Path | None = None,
    list: bool = False,
) -> None:
    """Measure the paper's claims, or resume measuring.

    Args:
        quick: embedded digits and small networks, a few minutes; else CIFAR-10 and MNIST, hours on
            two cores.
        only: numbers of the claims to measure; by default all.
        seeds: seeds of the empirical claims; by default those of the record, or else 11 to 15, and
            1 to 3 with --quick.
        jobs: worker processes, of one thread each; by default one per core, or one if quick.
        out: folder to which the record is written.
        records: folder of the experiments' and benchmarks' records, for claims 16, 18, 20, 22 and
            24; by default that of --out.
        data_dir: folder of the data sets; else $WEIGHTNORM_DATA, else the user's cache.
        list: list the claims and stop.
    """
    from weightnorm.lab.claims.runner import describe, listing, measure

    if list:
        say(listing())
        return
    folder = measure(
        quick=quick,
        only=only,
        seeds=seeds,
        jobs=jobs,
        runs=out,
        records=records,
        data_dir=data_dir,
        console=console(stderr=True),
        on_claim=lambda rows: say(describe(rows)),
    )
    say(f"record: {folder}; weightnorm report {out} shows its figures")


def bench(
    benchmarks: tuple[str, ...] = (),
    /,
    list: bool = False,
    quick: bool = False,
    rounds: int | None = None,
    seconds: float = 240.0,
    threads: int | None = None,
    device: str = "auto",
    out: Path = Path("runs/bench"),
    compare: Path | None = None,
) -> int:
    """Measure the cost of weight norm and its alternatives.

    Args:
        benchmarks: names of benchmarks; by default all. See --list.
        list: list the benchmarks and stop.
        quick: tiny sizes, seconds: shows that everything works; its numbers mean nothing.
        rounds: least number of rounds; by default 10, or 2 if quick.
        seconds: time in which a case of the summary may add rounds until its ratios are within
            ±2 %; other cases have a tenth of it.
        threads: threads of torch; by default its own choice.
        device: cpu, cuda, cuda:1, mps, or auto for the best available.
        out: folder for the record; `weightnorm report` shows it with charts. Other benchmarks of a
            record that is there are kept.
        compare: an older result.json to compare with; the exit code is 3 if a value got worse.
    """
    from weightnorm.lab import bench_output
    from weightnorm.lab.bench.registry import BENCHMARKS

    if list:
        for name, benchmark in BENCHMARKS.items():
            _item(name, 16, benchmark.title)
        return 0
    chosen = [BENCHMARKS[nearest(x, BENCHMARKS, "benchmark")] for x in benchmarks or BENCHMARKS]
    settings = bench_output.settings(quick, rounds, seconds, threads, device)
    slower = bench_output.measure(chosen, settings, out, compare, console(), console(stderr=True))
    return SLOWER if slower else 0


def report(runs: Path = Path("runs"), /, out: Path = Path("report")) -> None:
    """Write figures, tables and a page from records.

    Args:
        runs: folder that holds the records.
        out: folder the page is written to, with a file of every figure.
    """
    from weightnorm.lab.report import write_report

    files = write_report(runs, out)
    for problem in files.problems:
        print(printable(f"left out: {problem}"), file=sys.stderr)
    say(f"report: {files.page.resolve()}")


def tables(root: Path, /) -> None:
    """Update the tables and figures of README.md and docs/ from docs/results.

    Args:
        root: the repository.
    """
    from weightnorm.lab.report import update_documents

    for path in update_documents(root):
        say(f"updated: {path}")


def data(data_dir: Path | None = None, download: tuple[str, ...] = ()) -> None:
    """Show and download the data sets, verifying checksums.

    Args:
        data_dir: folder of the data sets; else $WEIGHTNORM_DATA, else the user's cache.
        download: data sets to download: cifar10, mnist, binarized-mnist, or all.
    """
    from weightnorm.lab.data import DATA_SETS, fetch, read_published
    from weightnorm.lab.data import data_dir as folder_of

    wanted = tuple(DATA_SETS) if "all" in download else download
    for name in [nearest(name, DATA_SETS, "data set") for name in wanted]:
        fetch(name, data_dir)
    for name, data_set in DATA_SETS.items():
        folder = folder_of(data_dir) / data_set.folder
        say(f"{name}: {folder}")
        width = max(map(len, data_set.files))
        for file, digest in data_set.files.items():
            try:
                state = "missing" if read_published(folder / file, digest) is None else "valid"
            except LabError as error:
                state = f"refused: {error}"
            say(f"  {file:{width}}  {state}")
    say("digits: in scikit-learn")


COMMANDS: dict[str, Callable[..., int | None]] = {
    "list": list_experiments,
    "run": run,
    "sweep": sweep,
    "status": status,
    "claims": claims,
    "bench": bench,
    "report": report,
    "tables": tables,
    "data": data,
    "convert": convert,
    "inspect": inspect,
    "demo": demo,
}
FOR_MAINTAINERS = ("tables",)
"""Commands that the overview does not show."""
EXTRAS = {"convert": "files", "inspect": "files", "ray": "ray"}
"""The extra that installs what a command needs, or a package, if it is not `lab`."""


# — the entry —


def main(words: Sequence[str]) -> int:
    """Run a command; returns its exit code."""
    words = [*words]
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            say(_overview())
            return 0
        if words[0] == "--version":
            say(f"weightnorm {__version__}")
            return 0
        code = _run(nearest(words[0], COMMANDS, "command"), words[1:])
        sys.stdout.flush()
        return code
    except Interrupted as stopped:
        _print_error(f"stopped; everything is saved in {stopped}")
        _print_error(f"to resume:  {shlex.join(['weightnorm', *words])}")
        return stopped.exit_code
    except LabError as error:
        _print_error(f"{'error' if error.exit_code == 2 else 'failed'}: {error}")
        return error.exit_code
    except BrokenPipeError:  # standard output was closed, as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (FileError, OSError) as error:  # a folder that cannot be made, a full disk
        _print_error(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        return Interrupted.exit_code


def _run(name: str, words: list[str]) -> int:
    command = COMMANDS[name]
    try:
        code = command(words) if command in (run, sweep) else parse(command, words, name)
    except ModuleNotFoundError as error:
        package = (error.name or "weightnorm").partition(".")[0]
        if package == "weightnorm":
            raise
        extra = EXTRAS.get(package) or EXTRAS.get(name, "lab")
        raise LabError(
            f"weightnorm {name} needs the package {package}, which is not installed: "
            f"pip install 'weightnorm[{extra}]'"
        ) from error
    return code or 0


def _overview() -> str:
    shown = [name for name in COMMANDS if name not in FOR_MAINTAINERS]
    width = max(map(len, shown))
    return "\n".join(
        [
            "Experiments of the weight normalization paper, and checkpoint tools.\n",
            *(f"  weightnorm {name:{width}}  {_summary(COMMANDS[name])}" for name in shown),
            "\nEach has a --help. Start with: weightnorm demo",
        ]
    )


def _summary(command: Callable[..., object]) -> str:
    return (command.__doc__ or "").partition("\n")[0]


def _print_error(text: str) -> None:
    print(printable(text, keep="\n"), file=sys.stderr)


# — parsing —


def parse(kind: Callable[..., Any], words: list[str], name: str, **more: Any) -> Any:
    """Parse options with tyro; SystemExit(0) after help, SystemExit(2) after an error."""
    import tyro

    config = (tyro.conf.EnumChoicesFromValues,)
    return tyro.cli(kind, args=words, prog=f"weightnorm {name}", config=config, **more)


def experiment(name: str) -> ModuleType:
    """Import an experiment."""
    return import_module(f"weightnorm.lab.{name}")


def split_experiment(command: str, words: list[str]) -> tuple[ModuleType, list[str]]:
    """Return the experiment, the first word, and the words after it."""
    if words and words[0] in ("-h", "--help"):
        say(f"usage: weightnorm {command} EXPERIMENT [settings]\n")
        say(f"{_summary(COMMANDS[command])}\n")
        list_experiments()
        raise SystemExit(0)
    if not words or words[0].startswith("-"):
        names = "|".join(EXPERIMENTS)
        raise ConfigError(f"which experiment? weightnorm {command} {names} [settings]")
    return experiment(nearest(words[0], EXPERIMENTS, "experiment")), words[1:]


def parse_config(module: ModuleType, words: list[str], name: str) -> Any:
    """Parse the config of an experiment: the preset that is named, changed by the other flags."""
    from weightnorm.lab.config import find_preset

    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    named.add_argument("--preset", nargs="?")
    named.add_argument("--data", nargs="?")
    given, _ = named.parse_known_args(words)
    known = given.preset in module.PRESETS  # else parse() below raises the error
    default = find_preset(module.PRESETS, given.preset if known else "cpu", given.data or "")
    return parse(type(default), words, name, default=default)


# — the terminal —


def say(text: str) -> None:
    """Print text as it is, with control characters escaped."""
    print(printable(text, keep="\n"))


def console(stderr: bool = False) -> Any:
    """Return a console for tables and progress."""
    from rich.console import Console

    return Console(stderr=stderr)


def _item(name: str, width: int, text: str) -> None:
    """Print a line of a list, wrapped at 80 columns."""
    say(textwrap.fill(f"{name:{width}}{text}", 80, subsequent_indent=" " * width))
