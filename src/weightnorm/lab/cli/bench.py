"""The verb `bench`: measure, keep, show, compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.errors import UsageError, nearest, require
from weightnorm.lab.files import write_atomically
from weightnorm.lab.malloc import keep_freed_memory
from weightnorm.lab.runs.environment import pick_device
from weightnorm.lab.runs.records import Row

if TYPE_CHECKING:
    from weightnorm.lab.benchmarks.benchmark import Setting

OUT, ERR = Console(), Console(stderr=True)
SLOWER = 3
"""Exit code if something got slower."""
BEGIN, END = "<!-- table: make bench -->", "<!-- end of table -->"
VERDICTS = {"met": "green", "within noise": "yellow", "missed": "red"}


@dataclass(frozen=True)
class BenchOptions:
    """Rows of peers that do the same work and take turns: what each costs relative to a base, with
    intervals, and whether the goals are met."""

    rows: tyro.conf.Positional[tuple[str, ...]] = ()
    """Which rows; by default all. --list names them."""
    list: bool = False
    """Only name the rows."""
    quick: bool = False
    """Tiny sizes, seconds: shows that everything works; its numbers mean nothing."""
    rounds: int | None = None
    """Measurements of each peer; by default 10, or 2 if quick."""
    threads: int | None = None
    """Threads of torch; by default its own choice."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto for the best there is."""
    out: Path = Path("runs/bench")
    """Folder for the record, result.json, and a chart of each row."""
    compare: Path | None = None
    """An older result.json. What got slower by more than noise is named, and the exit code is 3."""
    page: Path | None = None
    """Also put the table into this page of Markdown, between its marks."""


def main(words: list[str]) -> int:
    options = parse(BenchOptions, words, "bench")
    from weightnorm.lab.benchmarks import runner as benchmark
    from weightnorm.lab.benchmarks.compare import load
    from weightnorm.lab.benchmarks.registry import ROWS

    if options.list:
        _list({row.name: row.title for row in ROWS.values()})
        return 0
    keep_freed_memory()  # as the lab's runs do
    rows = [ROWS[nearest(name, ROWS, "row")] for name in options.rows or ROWS]
    setting = _setting(options)
    old = load(options.compare) if options.compare else None
    if options.page:
        _around(options.page)  # refused before the work, not after
    path = benchmark.write(benchmark.bench(rows, setting, ERR, _show), options.out)
    record = load(path)
    _keep(record, options)
    return _compare(old, record) if old else 0


def _list(titles: dict[str, str]) -> None:
    table = Table(box=None, show_header=False)
    for name, title in titles.items():
        table.add_row(f"[bold]{name}", escape(title))
    OUT.print(table)


def _setting(options: BenchOptions) -> Setting:
    import torch

    from weightnorm.lab.benchmarks.benchmark import Setting

    rounds = (2 if options.quick else 10) if options.rounds is None else options.rounds
    require(rounds >= 1, "rounds", rounds, "1 or more")
    if options.threads is not None:
        require(options.threads >= 1, "threads", options.threads, "1 or more")
        torch.set_num_threads(options.threads)
    return Setting(pick_device(options.device), options.quick, rounds)


def _around(page: Path) -> tuple[str, str]:
    """What stands before and after the page's table."""
    try:
        text = page.read_text()
    except OSError as error:
        raise UsageError(f"cannot read {page}: {error.strerror}") from None
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise UsageError(f"{page} has no place for the table: expected {BEGIN} … {END}")
    return text.split(BEGIN)[0], text.split(END)[1]


def _keep(record: Row, options: BenchOptions) -> None:
    from weightnorm.lab.reports.bench import about, charts, markdown
    from weightnorm.lab.reports.figures import render_figures

    _say(f"\n{about(record)}\nrecord: {options.out / 'result.json'}")
    for old in options.out.glob("bench-*"):
        old.unlink()
    for drawing in render_figures(charts(record)).values():
        for kind, content in drawing.files.items():
            write_atomically(options.out / f"{drawing.name}.{kind}", content)
    if options.page:
        before, after = _around(options.page)
        text = f"{before}{BEGIN}\n\n{markdown(record)}\n\n{END}{after}"
        write_atomically(options.page, text.encode())


def _show(row: Row) -> None:
    from weightnorm.lab.reports.bench import amount, judged, ratio, share

    OUT.print(f"\n[bold]{row['name']}[/]: {escape(row['title'])}", highlight=False)
    for case in row["cases"]:
        table = Table("", "", "to the base", title=escape(case["case"]), box=None)
        table.title_justify = "left"
        for peer in case["samples"]:
            relative = case["ratios"].get(peer)
            table.add_row(peer, amount(case, peer), ratio(relative) if relative else "1")
        OUT.print(table)
        for goal in case["goals"]:
            says, value, verdict = map(escape, judged(goal))
            OUT.print(f"  [{VERDICTS[verdict]}]{verdict}[/]: {says}: {value}", highlight=False)
        if case["share"]:
            OUT.print(f"  {escape(share(case))}", highlight=False)


def _compare(old: Row, new: Row) -> int:
    from weightnorm.lab.benchmarks.compare import compare

    found = compare(old, new)
    if found.caution:
        _say(f"not the same conditions: {found.caution}")
    for change in (*found.slower, *found.faster):
        word = "slower" if change.slower else "faster"
        was, now = (f"{x.middle:.3f} [{x.low:.3f}, {x.high:.3f}]" for x in (change.old, change.new))
        _say(f"{word}: {change.row}, {change.case}: {change.goal}: was {was}, is {now}")
    _say(f"{len(found.changes)} goals compared, {len(found.slower)} slower")
    return SLOWER if found.slower else 0


def _say(text: str) -> None:
    """A line as it is: no markup, no wrapping."""
    OUT.print(text, markup=False, highlight=False, soft_wrap=True)
