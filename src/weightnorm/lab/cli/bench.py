"""The verb `bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from rich.markup import escape
from rich.table import Table

from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.console import ERR, OUT, print_line
from weightnorm.lab.errors import nearest, require

if TYPE_CHECKING:
    from weightnorm.lab.bench.benchmark import Settings

SLOWER = 3
"""Exit code of --compare if a goal's value got worse."""
VERDICTS = {"met": "green", "within noise": "yellow", "missed": "red"}


@dataclass(frozen=True)
class BenchOptions:
    """Measure weight norm and its alternatives, interleaved: ratios with intervals, and goals."""

    benchmarks: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names of benchmarks; by default all. See --list."""
    list: bool = False
    """List the benchmarks and stop."""
    quick: bool = False
    """Tiny sizes, seconds: shows that everything works; its numbers mean nothing."""
    rounds: int | None = None
    """Least number of rounds; by default 10, or 2 if quick."""
    seconds: float = 240.0
    """Time in which a case of the summary may add rounds until its ratios are within ±2 %; other
    cases have a tenth of it."""
    threads: int | None = None
    """Threads of torch; by default its own choice."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto for the best available."""
    out: Path = Path("runs/bench")
    """Folder for the record; `weightnorm report` shows it with charts. Other benchmarks of a record
    that is there are kept."""
    compare: Path | None = None
    """An older result.json to compare with; the exit code is 3 if a goal's value got worse."""


def main(words: list[str]) -> int:
    options = parse(BenchOptions, words, "bench")
    from weightnorm.lab.bench.benchmark import load, run
    from weightnorm.lab.bench.registry import BENCHMARKS
    from weightnorm.lab.reports.bench import about

    if options.list:
        _list({name: benchmark.title for name, benchmark in BENCHMARKS.items()})
        return 0
    names = options.benchmarks or BENCHMARKS
    benchmarks = [BENCHMARKS[nearest(name, BENCHMARKS, "benchmark")] for name in names]
    settings = _settings(options)
    old = load(options.compare) if options.compare else None
    path = run(benchmarks, settings, ERR, options.out, _print_benchmark)
    record = load(path)
    print_line(OUT, f"\n{about(record)}\nrecord: {path}")
    return _compare(old, record) if old else 0


def _list(titles: dict[str, str]) -> None:
    table = Table(box=None, show_header=False)
    for name, title in titles.items():
        table.add_row(f"[bold]{name}", escape(title))
    OUT.print(table)


def _settings(options: BenchOptions) -> Settings:
    import torch

    from weightnorm.lab.bench.benchmark import Settings
    from weightnorm.lab.environment import pick_device

    rounds = (2 if options.quick else 10) if options.rounds is None else options.rounds
    require(rounds >= 1, "rounds", rounds, "1 or more")
    require(options.seconds >= 0, "seconds", options.seconds, "0 or more")
    if options.threads is not None:
        require(options.threads >= 1, "threads", options.threads, "1 or more")
        torch.set_num_threads(options.threads)
    return Settings(pick_device(options.device), options.quick, rounds, options.seconds)


def _print_benchmark(benchmark: dict[str, Any]) -> None:
    from weightnorm.lab.reports.bench import amount, interval, relative, share

    OUT.print(f"\n[bold]{benchmark['name']}[/]: {escape(benchmark['title'])}", highlight=False)
    for case in benchmark["cases"]:
        table = Table("", "", "relative", title=escape(case["case"]), box=None)
        table.title_justify = "left"
        for peer in case["results"]:
            table.add_row(peer, amount(case, peer), relative(case, peer, 3))
        OUT.print(table)
        for goal in case["goals"]:
            text = escape(f"{goal['goal']}: {interval(goal, 3)}")
            color, verdict = VERDICTS[goal["verdict"]], goal["verdict"]
            OUT.print(f"  [{color}]{verdict}[/]: {text}", highlight=False)
        if case["share"]:
            OUT.print(f"  {escape(share(case))}", highlight=False)


def _compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    from weightnorm.lab.bench.benchmark import compare, differing_conditions

    changes = compare(old, new)
    if differing := differing_conditions(old["environment"], new["environment"]):
        print_line(OUT, f"the records are of different conditions: other {', '.join(differing)}")
    slower = [change for change in changes if change.slower]
    for change in (*slower, *(change for change in changes if change.faster)):
        word = "slower" if change.slower else "faster"
        was, now = (f"{x.value:.3f} [{x.low:.3f}, {x.high:.3f}]" for x in (change.old, change.new))
        place = f"{change.benchmark}, {change.case}"
        print_line(OUT, f"{word}: {place}: {change.goal}: was {was}, is {now}")
    print_line(OUT, f"{len(changes)} goals compared, {len(slower)} slower")
    return SLOWER if slower else 0
