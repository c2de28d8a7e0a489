"""The command line: verb → function, no logic.

Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import tyro
from rich.console import Console
from rich.table import Table

from weightnorm import Parameterization
from weightnorm.lab.data import fetch
from weightnorm.lab.data.catalog import DATA_SETS
from weightnorm.lab.data.fetch import DataError
from weightnorm.lab.experiments import classify
from weightnorm.lab.experiments.checkpoints import CheckpointError
from weightnorm.lab.experiments.config import ConfigError, RunConfig
from weightnorm.lab.experiments.run import Interrupted, RunError, resume_command
from weightnorm.lab.records import RecordError

EXPERIMENTS: dict[str, ModuleType] = {"classify": classify}
OUT, ERR = Console(), Console(stderr=True)
T = TypeVar("T")


class UsageError(Exception):
    """Words that make no command; the message names the nearest ones that do."""


def main(words: Sequence[str]) -> int:
    """Run a command; returns its exit code."""
    words = list(words)
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            OUT.print(_overview())
            return 0
        return VERBS[_nearest(words[0], VERBS, "command")](words[1:])
    except (UsageError, ConfigError) as error:
        ERR.print(f"[bold red]error[/] {error}", highlight=False, soft_wrap=True)
        return 2
    except (RunError, DataError, CheckpointError, RecordError) as error:
        ERR.print(f"[bold red]failed[/] {error}", highlight=False, soft_wrap=True)
        return 1
    except Interrupted as stopped:
        ERR.print(f"stopped; everything is saved in {stopped}", highlight=False, soft_wrap=True)
        ERR.print(f"to go on:  {resume_command(words)}", highlight=False, soft_wrap=True)
        return 130
    except KeyboardInterrupt:
        return 130


# — verbs —


def list_(words: list[str]) -> int:
    """What can be run: experiments, presets and how long they take."""
    _parse(_Nothing, words, "list", list_)
    table = Table("experiment", "preset", "what", "settings")
    for name, module in EXPERIMENTS.items():
        for preset, config in module.PRESETS.items():
            settings = ", ".join(module.SIZES[preset])
            first = (name, module.TITLE) if preset == next(iter(module.PRESETS)) else ("", "")
            table.add_row(first[0], preset, first[1], settings)
            assert config.preset == preset
    OUT.print(table)
    OUT.print("weightnorm run EXPERIMENT --help  shows every setting")
    return 0


def run(words: list[str]) -> int:
    """Run one experiment, or go on with it. The same command resumes a run that was stopped."""
    module, rest = _experiment(words, "run")
    config = _config(module, rest, f"run {module.NAME}")
    record = module.run(config, ERR)
    numbers = ", ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in (record.result or {}).items())
    if _speaks():
        OUT.print(f"{record.folder}: {numbers}", highlight=False, soft_wrap=True)
    return 0


@dataclass(frozen=True)
class SweepOptions:
    """The grid. Any setting of the experiment may follow as a flag; see its own --help."""

    parameterizations: tuple[Parameterization, ...] = tuple(Parameterization)
    """Which of the five."""
    learning_rates: tuple[float, ...] = ()
    """Learning rates; by default, for each parameterization what the paper chose."""
    seeds: tuple[int, ...] = (1,)
    """Seeds."""
    jobs: int = 1
    """Runs at a time on this machine; its threads are split between them."""
    cluster: str | None = None
    """Run on this Ray cluster instead: an address, or auto. The runs folder must be shared."""
    metric: str = "test_error"
    """The result that decides which learning rate is best: lowest wins."""


def sweep_(words: list[str]) -> int:
    """Run a grid of experiments: parameterizations × learning rates × seeds."""
    module, rest = _experiment(words, "sweep")
    options, rest = _parse_known(SweepOptions, rest, f"sweep {module.NAME}", sweep_)
    base = _config(module, rest, f"sweep {module.NAME}")
    grid = Grid(
        experiment=module.NAME,
        base=base,
        parameterizations=options.parameterizations,
        learning_rates=options.learning_rates,
        seeds=options.seeds,
    )
    result = sweep(
        grid, jobs=options.jobs, cluster=options.cluster, metric=options.metric, console=ERR
    )
    OUT.print(render(result))
    if result.interrupted:
        ERR.print(f"to go on:  {resume_command(['sweep', *words])}", soft_wrap=True)
        return 130
    return 1 if result.failed else 0


@dataclass(frozen=True)
class ReportOptions:
    """One HTML page, and PNG and SVG of every figure, from the records below a folder."""

    runs: tyro.conf.Positional[Path] = Path("runs")
    """Folder that holds the records."""
    out: Path = Path("report")
    """Folder the page is written to."""


def report_(words: list[str]) -> int:
    """Turn records into figures, tables and one page."""
    options = _parse(ReportOptions, words, "report", report_)
    files = report(options.runs, options.out)
    for problem in files.problems:
        ERR.print(f"[yellow]left out[/] {problem}", highlight=False, soft_wrap=True)
    OUT.print(f"{files.page.resolve()}", highlight=False, soft_wrap=True)
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
    options = _parse(DataOptions, words, "data", data)
    wanted = tuple(DATA_SETS) if "all" in options.download else options.download
    for name in wanted:
        fetch.fetch(_nearest(name, DATA_SETS, "data set"), options.data_dir)
    table = Table("data set", "file", "state", "size", "folder")
    for found in fetch.status(options.data_dir):
        for i, file in enumerate(found.files):
            state = {"valid": "[green]ok", "missing": "[yellow]missing", "corrupt": "[red]corrupt"}
            names = (found.name, str(found.folder)) if i == 0 else ("", "")
            size = f"{file.file.size:,}"
            table.add_row(names[0], file.path.name, state[file.state], size, names[1])
    table.add_row("digits", "(in scikit-learn)", "[green]ok", "", "")
    OUT.print(table)
    return 0


@dataclass(frozen=True)
class DemoOptions:
    """The paper's comparison of five parameterizations on embedded digits, in about a minute."""

    out: Path = Path("out")
    """Folder for the records and the report."""


def demo(words: list[str]) -> int:
    """See it work: the five parameterizations on embedded digits, and the report."""
    options = _parse(DemoOptions, words, "demo", demo)
    base = replace(classify.PRESETS["demo"], runs=options.out / "runs")
    grid = Grid("classify", base, tuple(Parameterization), (), (1,))
    result = sweep(grid, jobs=2, console=ERR)
    OUT.print(render(result))
    if result.interrupted:
        return 130
    if result.failed:
        return 1
    return report_([str(base.runs), "--out", str(options.out / "report")])


VERBS: dict[str, Callable[[list[str]], int]] = {
    "list": list_,
    "run": run,
    "sweep": sweep_,
    "report": report_,
    "data": data,
    "demo": demo,
}


# — parsing —


@dataclass(frozen=True)
class _Nothing:
    """No options."""


def _overview() -> Table:
    table = Table(title="weightnorm: the experiments of the weight normalization paper", box=None)
    for name, verb in VERBS.items():
        summary = (verb.__doc__ or "").splitlines()[0]
        table.add_row(f"weightnorm {name}", summary)
    table.add_row("", "Each has --help. Start with: weightnorm demo")
    return table


def _nearest(word: str, known: typing.Iterable[str], kind: str) -> str:
    """The word itself if it is known; else an error that names the nearest."""
    names = list(known)
    if word in names:
        return word
    near = get_close_matches(word, names, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
    raise UsageError(f"there is no {kind} {word!r}; {hint}")


def _experiment(words: list[str], verb: str) -> tuple[ModuleType, list[str]]:
    if not words or words[0].startswith("-"):
        if words and words[0] in ("-h", "--help"):
            OUT.print(f"usage: weightnorm {verb} EXPERIMENT [settings]", highlight=False)
            OUT.print(VERBS[verb].__doc__ or "", highlight=False)
            list_([])
            raise SystemExit(0)
        raise UsageError(f"which experiment? weightnorm {verb} {'|'.join(EXPERIMENTS)} [settings]")
    return EXPERIMENTS[_nearest(words[0], EXPERIMENTS, "experiment")], words[1:]


def _config(module: ModuleType, words: list[str], prog: str) -> Any:
    """The experiment's config: the preset, then the flags."""
    preset = module.PRESETS["cpu"]
    for i, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--preset":
            value = value or (words[i + 1] if i + 1 < len(words) else "")
            preset = module.PRESETS.get(value, preset)  # an unknown one is refused below
    config: RunConfig = _parse(type(preset), words, prog, module.run, default=preset)
    if not any(word.partition("=")[0] == "--learning-rate" for word in words):
        config = replace(config, learning_rate=module.LEARNING_RATES[config.parameterization])
    return config


def _parse(kind: type[T], words: list[str], verb: str, about: Any, default: Any = None) -> T:
    parsed, _ = _parse_with(kind, words, verb, about, default, known_only=True)
    return parsed


def _parse_known(kind: type[T], words: list[str], verb: str, about: Any) -> tuple[T, list[str]]:
    return _parse_with(kind, words, verb, about, None, known_only=False)


def _parse_with(
    kind: type[T], words: list[str], verb: str, about: Any, default: Any, known_only: bool
) -> tuple[T, list[str]]:
    options: dict[str, Any] = {
        "args": words,
        "prog": f"weightnorm {verb}",
        "description": f"{(about.__doc__ or '').splitlines()[0]}\n\n{kind.__doc__}",
        "config": (tyro.conf.EnumChoicesFromValues,),
        "return_unknown_args": not known_only,
    }
    if default is not None:
        options["default"] = default
    try:
        parsed: Any = tyro.cli(kind, **options)
    except SystemExit as stop:
        if stop.code == 2:
            _name_nearest(kind, words)
        raise
    return (parsed, []) if known_only else parsed


def _name_nearest(kind: Any, words: list[str]) -> None:
    """After a refusal: for a value that is not among a field's choices, the nearest that is."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        choices = [str(c.value) for c in hint] if _is_enum(hint) else typing.get_args(hint)
        flag = f"--{field.name.replace('_', '-')}"
        for word, value in zip(words, words[1:], strict=False):
            known = [c for c in choices if isinstance(c, str)]
            if word == flag and known and value not in known:
                near = get_close_matches(value, known, 1)
                if near:
                    ERR.print(f"did you mean {flag} {near[0]}?", highlight=False)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _speaks() -> bool:
    """Whether this process is the one that prints: the first rank, or the only one."""
    import os

    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
