"""Sections of the report, and the one HTML page of them."""

from __future__ import annotations

import html
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from weightnorm.files.atomic import write_atomically
from weightnorm.lab.errors import ReportError
from weightnorm.lab.records import RunRecord, distinct_runs, find_records
from weightnorm.lab.report import bench, claims, tables
from weightnorm.lab.report.experiments import EXPERIMENTS, metric_of
from weightnorm.lab.report.figures import curve_figure, rate_figure, save
from weightnorm.lab.report.pictures import Picture
from weightnorm.lab.report.style import slug
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
WIDTH, WIDE = re.compile(rb'width="([\d.]+)pt"'), 400
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
    tally: Sequence[str] = ()
    """How many claims or goals have which verdict."""
    verdicts: Sequence[dict[str, str]] = ()
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
    files = {
        item: render(item)
        for section in sections
        for part in section.parts
        for item in part.items
        if not is_table(item)
    }
    page = TEMPLATES.get_template("page.html.j2").render(
        sections=sections,
        verdicts=[row for section in sections for part in section.parts for row in part.verdicts],
        tallies=[part for section in sections for part in section.parts if part.tally],
        image=lambda item: data_uri(*files[item]),
        note=VERDICTS,
        is_table=is_table,
        numeric_columns=tables.numeric_columns,
        folded=folded,
        is_wide=lambda item: is_wide(files[item][1]),
        runs=len(records),
        finished=sum(record.finished for record in records),
        problems=problems,
    )
    figures = {
        out / "figures" / f"{item.name}.{kind}": content for item, (kind, content) in files.items()
    }
    try:
        for path, content in {**figures, out / "index.html": page.encode()}.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    except OSError as error:
        raise ReportError(
            f"cannot write the report to {out}: {error.strerror}; choose another folder"
        ) from error
    return ReportFiles(out / "index.html", tuple(figures), tuple(problems))


def read(root: Path) -> tuple[list[RunRecord], list[str]]:
    """Read the runs below a folder, each once, and list the problems of the others."""
    if not root.is_dir():
        raise ReportError(f"{root} is not a folder; expected the folder that holds the runs")
    root = root.absolute()
    found, problems = find_records(root)
    known = [record for record in found if record.experiment in (*EXPERIMENTS, *LAST)]
    problems += [
        f"{record.folder}: there is no report of experiment {record.experiment}"
        for record in found
        if record not in known
    ]
    records, copies = distinct_runs(known)
    problems += [f"{copy.folder} is the same run as {kept.folder}" for copy, kept in copies]
    problems = sorted(problem.replace(f"{root}/", "") for problem in problems)
    if not records:
        raise ReportError(
            f"no runs to report on below {root}; create one with "
            "`weightnorm run classify --preset demo`, or name the folder that holds them"
            + "".join(f"\n  {problem}" for problem in problems)
        )
    return records, problems


def describe(records: Sequence[RunRecord]) -> list[Section]:
    """Describe each experiment in the paper's order, then the claims, then the costs."""
    sections = {**dict.fromkeys(EXPERIMENTS, experiment_section), "claims": claims_section}
    found = []
    for name, section in {**sections, "bench": bench_section}.items():
        if own := [record for record in records if record.experiment == name]:
            found.append(section(own))
    return found


def experiment_section(records: Sequence[RunRecord]) -> Section:
    """Describe the settings of an experiment; those without a comparison are folded."""
    name = records[0].experiment
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
    yield tables.provenance(one)


def claims_section(records: Sequence[RunRecord]) -> Section:
    intro = (
        "What the paper states about weight normalization, measured. The rule of each verdict is "
        "fixed in code; square brackets are 95 % intervals of the mean."
    )
    parts = [
        Part(
            f"claims: {record.preset}",
            claims.SIZES.get(record.preset, ""),
            [*claims.items(record)],
            claims.summary(record),
        )
        for record in sorted(records, key=lambda record: record.preset)
    ]
    return Section("claims", "The paper's claims", intro, parts)


def bench_section(records: Sequence[RunRecord]) -> Section:
    parts = [
        Part(title, bench.about(found), [*bench.items(found)], bench.tally(found))
        for record in sorted(records, key=lambda record: record.preset)
        if (found := record.result) and (title := f"bench: {record.preset}")
    ]
    return Section("bench", "Cost", bench.INTRO, parts)


def is_table(item: Item) -> bool:
    return isinstance(item.body, pd.DataFrame)


def is_wide(content: bytes) -> bool:
    width = WIDTH.search(content)
    return width is not None and float(width[1]) > WIDE


def folded(part: Part) -> dict[str, list[Item]]:
    """Return the figures, pictures and tables that the page shows on request."""
    groups: dict[str, list[Item]] = {"Figures": [], "Pictures": [], "Tables": []}
    for item in part.items:
        if item.folded:
            kind = "Tables" if is_table(item) else "Figures"
            groups["Pictures" if isinstance(item.body, Picture) else kind].append(item)
    return {kind: items for kind, items in groups.items() if items}


def render(item: Item, kind: str = "svg") -> tuple[str, bytes]:
    """Draw a figure or encode a picture: extension and content."""
    if isinstance(item.body, Picture):
        return item.body.file()
    assert callable(item.body)
    return kind, save(item.body, kind)


def data_uri(kind: str, content: bytes) -> str:
    mime = {"svg": "svg+xml"}.get(kind, kind)
    return f"data:image/{mime};base64,{b64encode(content).decode()}"
