"""Sections of the report, and the one HTML page of them."""

from __future__ import annotations

import html
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from weightnorm.files.atomic import write_atomically
from weightnorm.lab.errors import ReportError
from weightnorm.lab.records import RunRecord, distinct_runs, find_records
from weightnorm.lab.report import bench, claims, tables
from weightnorm.lab.report.experiments import EXPERIMENTS, metric_of
from weightnorm.lab.report.figures import curve_figure, rate_figure, save
from weightnorm.lab.report.pictures import Picture
from weightnorm.lab.report.style import INK, PAPER, slug
from weightnorm.lab.report.tables import Item, Setting

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def intervals(cell: str) -> str:
    """Return a cell as HTML, intervals in small type, so that tables of ratios fit a screen.

    >>> intervals("<1.02 [0.99, 1.05]")
    '&lt;1.02 <small>[0.99, 1.05]</small>'
    """
    return re.sub(r"(\[[^][]+,[^][]+\])", r"<small>\1</small>", html.escape(cell))


TEMPLATES.filters["intervals"] = intervals
LAST = ("claims", "bench")
WIDTH, WIDE = re.compile(r'viewBox="0 0 ([\d.]+)'), 400
"""Width of a figure in points, and above which it takes two columns."""
VERDICTS = (
    "Mean ± standard deviation over runs, each method at its best learning rate. Standard: the "
    "same without the method. The difference is paired over n seeds. ▲ better, ▼ worse: its 95 % "
    "interval excludes 0; △, ▽: it includes 0, or n = 1."
)


@dataclass(frozen=True, eq=False)
class Part:
    """One setting of an experiment, or one record of claims or benchmarks."""

    title: str
    intro: str
    items: Sequence[Item]
    findings: Sequence[str] = ()
    """Sentences of what was found, with numbers, for the documents."""
    verdicts: Sequence[dict[str, str]] = ()
    numbers: str = ""
    """Which claims have which verdict."""
    folded: bool = False

    @property
    def name(self) -> str:
        return slug(self.title)


@dataclass(frozen=True, eq=False)
class Section:
    """One experiment, all claims, or all benchmarks."""

    experiment: str
    title: str
    intro: str
    parts: Sequence[Part]
    unfolded: Sequence[Item] = ()
    """Tables over several settings."""


@dataclass(frozen=True)
class ReportFiles:
    """Paths of the files written, and the problems of records that were left out."""

    page: Path
    figures: tuple[Path, ...]
    problems: tuple[str, ...]


def write_report(root: Path, out: Path) -> ReportFiles:
    """Write out/index.html and out/figures/* about every run below `root`.

    The same records give the same bytes.
    """
    records, problems = read(root)
    sections = describe(records)
    inline, files, wide = {}, {}, set()
    for section in sections:
        for item in [*section.unfolded, *(item for part in section.parts for item in part.items)]:
            if not is_table(item):
                kind, content, alt = render(item)
                if kind == "svg" and float(WIDTH.search(content.decode())[1]) > WIDE:  # type: ignore[index]
                    wide.add(item)
                files[f"figures/{item.name}.{kind}"] = content
                inline[item] = element(item.name, kind, content, alt)
    page = TEMPLATES.get_template("page.html.j2").render(
        sections=sections,
        verdicts=[row for section in sections for part in section.parts for row in part.verdicts],
        summaries=[
            part for section in sections if section.experiment in LAST for part in section.parts
        ],
        inline=inline,
        note=VERDICTS,
        is_table=is_table,
        folded=folded,
        wide=wide.__contains__,
        runs=len(records),
        finished=sum(record.finished for record in records),
        problems=problems,
    )
    _write(out, {**files, "index.html": page.encode()})
    return ReportFiles(out / "index.html", tuple(out / name for name in files), tuple(problems))


def read(root: Path) -> tuple[list[RunRecord], list[str]]:
    """Read the runs below a folder, each once, and list the problems of the others."""
    if not root.is_dir():
        raise ReportError(f"{root} is not a folder; expected the folder that holds the runs")
    root = root.absolute()
    found, problems = find_records(root)
    faults = {record.folder: fault for record in found if (fault := _fault(record))}
    problems += [f"{folder.relative_to(root)}: {fault}" for folder, fault in faults.items()]
    records, copies = distinct_runs(record for record in found if record.folder not in faults)
    for copy, kept in copies:
        here, there = (record.folder.relative_to(root) for record in (copy, kept))
        problems.append(f"{here} is the same run as {there}")
    problems = sorted(problem.replace(f"{root}/", "") for problem in problems)
    if not records:
        raise ReportError(
            f"no runs to report on below {root}; create one with "
            "`weightnorm run classify --preset demo`, or name the folder that holds them"
            + "".join(f"\n  {problem}" for problem in problems)
        )
    return records, problems


def _fault(record: RunRecord) -> str:
    """Return why a record cannot be shown; empty if it can. Of claims and benchmarks more is read
    than numbers, so they are tried."""
    if record.experiment in EXPERIMENTS:
        return ""
    if record.experiment not in LAST:
        return f"there is no report of experiment {record.experiment}"
    try:
        for item in _part(record).items:
            if callable(item.body):
                item.body()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return f"it is damaged ({type(error).__name__}: {error})"
    return ""


def describe(records: Sequence[RunRecord]) -> list[Section]:
    """Describe each experiment in the paper's order, then the claims, then the costs."""
    found = []
    for name in (*EXPERIMENTS, *LAST):
        if own := [record for record in records if record.experiment == name]:
            section = _records_section if name in LAST else experiment_section
            found.append(section(name, own))
    return found


def experiment_section(name: str, records: Sequence[RunRecord]) -> Section:
    """Describe the settings of an experiment; those without a comparison are folded."""
    every = tables.settings(name, records)
    main = [one for one in every if tables.is_main(one, every)]
    side = [one for one in every if one not in main]
    parts = [
        Part(
            one.title,
            f"{one.progress}.",
            [*setting_items(one)],
            verdicts=[*tables.verdicts(one)] if one in main else (),
            folded=one in side,
        )
        for one in main + side
    ]
    about = every[0].about
    alone = [one for one in side if not one.compares]
    more = tables.every_rate(alone, next(iter(about.results))) if alone else ()
    return Section(name, about.title, about.intro, parts, [*more])


def setting_items(one: Setting) -> Iterator[Item]:
    """Yield figures and tables of a setting: what is compared first, what explains it folded."""
    about = one.about

    def curves(metrics: Sequence[str], folded: bool) -> Iterator[Item]:
        for metric in metrics:
            if one.has(f"{metric}:all epochs"):
                label = metric_of(metric).label
                of, number = about.paper_figure
                title = f"{label[0].upper()}{label[1:]}"
                title += f" (the paper's figure {number})" * (metric == of)
                draw = partial(curve_figure, one, metric)
                yield Item(title, draw, folded=folded, name=slug(f"{one.name} {metric}"))

    yield from curves(about.curves, folded=False)
    yield from tables.results(one)
    yield from tables.differences(one)
    yield from tables.epochs_to_common(one)
    yield from curves(about.more_curves, folded=True)
    if len(one.rates) > len(one.methods) and one.done:
        title = f"{metric_of(one.metric).label} by learning rate".capitalize()
        yield Item(title, partial(rate_figure, one), folded=True, name=slug(f"{one.name} rate"))
        yield from tables.every_rate([one], "Every learning rate")
    if about.pictures is not None:
        for method, done in one.done.items():
            for picture in about.pictures(done, one.style(method).name):
                name = slug(f"{one.name} {method} {picture.name}")
                yield Item(picture.title, picture, [picture.caption], folded=True, name=name)
    yield from tables.not_counted(one)
    yield from tables.times(one)
    yield tables.provenance(one)


def _records_section(name: str, records: Sequence[RunRecord]) -> Section:
    ordered = sorted(records, key=lambda record: record.preset)
    parts = [_part(record) for record in ordered if record.result or name == "claims"]
    if name == "bench":
        return Section(name, "Cost", bench.INTRO, parts)
    intro = (
        "What the paper states about weight normalization, measured. The criterion of each verdict "
        "is fixed in code; square brackets are 95 % intervals of the mean."
    )
    return Section(name, "The paper's claims", intro, parts)


def _part(record: RunRecord) -> Part:
    title = f"{record.experiment}: {record.preset}"
    if record.experiment == "claims":
        intro, numbers = claims.SIZES.get(record.preset, ""), claims.numbers_by_verdict(record)
        items = [*claims.items(record)]
        return Part(title, intro, items, claims.findings(record), numbers=numbers)
    if record.result is None:
        return Part(title, "Not finished.", [])
    found = record.result
    return Part(title, bench.about(found), [*bench.items(found)], bench.findings(found))


def is_table(item: Item) -> bool:
    return isinstance(item.body, pd.DataFrame)


def folded(part: Part) -> dict[str, list[Item]]:
    """Return the figures, pictures and tables that the page shows on request."""
    groups: dict[str, list[Item]] = {"Figures": [], "Pictures": [], "Tables": []}
    for item in part.items:
        if item.folded:
            kind = "Tables" if is_table(item) else "Figures"
            groups["Pictures" if isinstance(item.body, Picture) else kind].append(item)
    return {kind: items for kind, items in groups.items() if items}


def render(item: Item, kind: str = "svg") -> tuple[str, bytes, str]:
    """Draw a figure or encode a picture: extension, content and text alternative."""
    if isinstance(item.body, Picture):
        return *item.body.file(), f"{item.title}. {' '.join(item.notes)}"
    assert callable(item.body)
    content, alt = save(item.body, kind)
    return kind, content, f"{item.title}: {alt}"


def element(name: str, kind: str, content: bytes, alt: str) -> str:
    """Return a figure as an element of the page.

    Ids get the figure's name as prefix; INK becomes the text color, which follows the color scheme.
    """
    alt = html.escape(alt)
    if kind != "svg":
        data = b64encode(content).decode()
        return f'<img src="data:image/{kind};base64,{data}" alt="{alt}">'
    found = re.search(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', text := content.decode())
    assert found is not None, f"figure {name} has no viewBox"
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text[found.end() :])
    body = body.replace(INK, "currentColor").replace(PAPER, "none").strip()
    return f'<svg {found[1]} role="img" aria-label="{alt}">{body}'


def _write(out: Path, files: dict[str, Any]) -> None:
    try:
        for name, content in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(out / name, content)
    except OSError as error:
        raise ReportError(
            f"cannot write the report to {out}: {error.strerror}; choose another folder"
        ) from error
