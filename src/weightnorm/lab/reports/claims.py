"""Report section of the paper's claims: verdicts, measurements and figures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, groupby
from typing import Any

from weightnorm.lab.claims.rows import latest_rows
from weightnorm.lab.records import Row, RunRecord
from weightnorm.lab.reports.document import Line, Plot, PlotPanels, Section, Table, slug
from weightnorm.lab.reports.style import STYLES, Style

SIZES = {
    "quick": "Embedded digits and a small dense network: a fast check, not evidence.",
    "full": "CIFAR-10 at half its size and ConvPool-CNN-C at an eighth of its width; the noise of "
    "batch statistics at CIFAR-10's own size, the step's time with the paper's own network.",
    "long": "Claim 6 over ten epochs of MNIST, with three hidden layers of 256 units.",
    "long-quick": "Claim 6 by the same protocol on embedded digits: a fast check, not evidence.",
}
PLURALS = {
    "holds": "hold",
    "holds qualitatively": "hold qualitatively",
    "does not hold here": "do not hold here",
}


def section(records: list[RunRecord]) -> Section:
    """Describe all measurements of the claims, one part for each size."""
    parts = tuple(part(record) for record in sorted(records, key=lambda r: r.preset))
    intro = (
        "What the paper states about weight normalization, measured. The criterion of each verdict "
        "is fixed in code; square brackets are 95 % intervals of the mean."
    )
    return Section("The paper's claims", intro, parts)


def part(record: RunRecord) -> Section:
    """Describe one measurement: the verdicts, the figures, then every value."""
    rows = latest_rows(record.metrics)
    figures = [claim_figures(record.preset, row) for row in rows if row.get("figures")]
    return Section(
        f"claims: {record.preset}",
        SIZES.get(record.preset, ""),
        (verdicts(rows), *figures, measurements(rows)),
        (f"{len(rows)} claims ({record.preset}): {tally(rows)}.",),
    )


def tally(rows: list[Row]) -> str:
    """Count the verdicts.

    >>> tally([{"verdict": "holds"}, {"verdict": "not shown"}, {"verdict": "holds"}])
    '2 hold, 1 not shown'
    """
    counts = Counter(str(row.get("verdict")) for row in rows)
    return ", ".join(
        f"{count} {PLURALS.get(verdict, verdict) if count > 1 else verdict}"
        for verdict, count in counts.most_common()
    )


def verdicts(rows: list[Row]) -> Table:
    """Tabulate each claim's verdict."""
    cells = tuple(
        (f"{row['id']}. {_text(row, 'statement')}", _text(row, "n"), _text(row, "verdict"))
        for row in rows
    )
    return Table("Verdicts", ("claim", "n", "verdict"), cells, numeric=False)


def measurements(rows: list[Row]) -> Table:
    """Tabulate what was measured for each claim, and the paper's value."""
    fields = ("section", "rule", "value", "paper")
    cells = tuple(
        (row["id"], *(_lines(row) if f == "value" else _text(row, f) for f in fields))
        for row in rows
    )
    return Table(
        "Measurements", ("claim", "section", "measured", "value", "paper"), cells, numeric=False
    )


def claim_figures(preset: str, row: Row) -> Section:
    """Describe one claim with its figures."""
    plots = tuple(_plots_and_panels(preset, row))
    words = f"{row['statement']}: {row['verdict']}, n = {row['n']}. {row['value']}."
    return Section(f"Claim {row['id']}", words, plots)


def _plots_and_panels(preset: str, row: Row) -> Iterator[Plot | PlotPanels]:
    """Yield the figures of a claim; those with the same title of panels become one."""
    for title, figures in groupby(row["figures"], lambda figure: figure.get("panels", "")):
        plots = tuple(plot(preset, row, figure) for figure in figures)
        if title:
            name = slug(f"claim {preset} {row['id']} {title}")
            yield PlotPanels(name, title, plots[0].caption, plots)
        else:
            yield from plots


def _lines(row: Row) -> str:
    """Return the value with one statement to a line: some claims are measured by many numbers.

    >>> _lines({"value": "a 1 (n = 2; best); b 2"})
    'a 1 (n = 2; best)\\nb 2'
    """
    return re.sub(r"; (?![^()]*\))", "\n", _text(row, "value"))


def _text(row: Row, field: str) -> str:
    return str(row.get(field, "—"))


def plot(preset: str, row: Row, figure: dict[str, Any]) -> Plot:
    styles = line_styles([series["name"] for series in figure["series"]])
    lines = tuple(map(line, figure["series"], styles))
    bands = " Band: range over seeds." if any(one.low for one in lines) else ""
    return Plot(
        slug(f"claim {preset} {row['id']} {figure['title']}"),
        figure["title"],
        f"{row['verdict'].capitalize()}, n = {row['n']}.{bands}",
        figure["x"],
        figure["y"],
        lines,
        log_x=figure.get("log_x", False),
        log_y=figure.get("log_y", False),
    )


def line_styles(names: list[str]) -> list[Style]:
    """Return the style of each line.

    The name up to a comma is a parameterization, which has its usual style; any other line takes
    the style of a parameterization that is not in the figure.
    """
    kinds = [name.partition(",")[0] for name in names]
    free = cycle([style for kind, style in STYLES.items() if kind not in kinds] or STYLES.values())
    styles = []
    for index, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        first = kind in STYLES and kind not in kinds[:index]
        words = name.replace(kind, STYLES[kind].name) if kind in STYLES else name
        styles.append(replace(STYLES[kind] if first else next(free), name=words))
    return styles


def line(series: dict[str, Any], style: Style) -> Line:
    x, y, low, high = (tuple(series[key]) for key in ("x", "y", "low", "high"))
    return Line(style.name, style, x, y, low=low, high=high)
