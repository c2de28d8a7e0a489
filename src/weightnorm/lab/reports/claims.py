"""Report section of the paper's claims: verdicts, measurements and figures."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import cycle
from typing import Any

from weightnorm.lab.reports.document import Line, Plot, Section, Table, slug
from weightnorm.lab.reports.style import STYLES, Style
from weightnorm.lab.runs.records import Row, RunRecord

HEAD = ("claim", "section", "measured", "value", "the paper says", "n", "verdict")
SIZES = {
    "quick": "Embedded digits and a small dense network: small, to see every claim measured.",
    "full": "CIFAR-10 at half its size and ConvPool-CNN-C at an eighth of its width; the noise of "
    "batch statistics at CIFAR-10's own size, the step's time with the paper's own network.",
}


def section(records: list[RunRecord]) -> Section:
    """Describe all measurements of the claims, one part for each size."""
    parts = tuple(part(record) for record in sorted(records, key=lambda r: r.preset))
    intro = (
        "What the paper states about weight normalization, measured. The criterion of each verdict "
        "is fixed in code; square brackets are 95 % bootstrap intervals."
    )
    return Section("The paper's claims", intro, parts)


def part(record: RunRecord) -> Section:
    rows = newest(record)
    counts = Counter(str(row.get("verdict")) for row in rows)
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    table = Table(f"{len(rows)} claims: {tally}", HEAD, tuple(map(cells, rows)), numeric=False)
    seen = [in_figures(record.preset, row) for row in rows if row.get("figures")]
    title = f"Claims: {record.preset}"
    found = (f"{len(rows)} claims ({record.preset}): {tally}.",)
    return Section(title, SIZES.get(record.preset, ""), (table, *seen), found)


def in_figures(preset: str, row: Row) -> Section:
    """Describe one claim with its figures."""
    table = Table("", HEAD[1:], (cells(row)[1:],), numeric=False)
    plots = (plot(preset, row, shown) for shown in row["figures"])
    return Section(f"Claim {row['number']}", f"{row['statement']}.", (table, *plots))


def newest(record: RunRecord) -> list[Row]:
    """Return the last row of each claim, by number."""
    rows = {row["number"]: row for row in record.metrics if isinstance(row.get("number"), int)}
    return [rows[number] for number in sorted(rows)]


def cells(row: Row) -> tuple[str, ...]:
    fields = ("section", "measured", "value", "paper", "n", "verdict")
    name = f"{row['number']}. {row.get('statement', '')}"
    return (name, *(str(row.get(field, "—")) for field in fields))


def plot(preset: str, row: Row, shown: dict[str, Any]) -> Plot:
    styles = line_styles([series["name"] for series in shown["series"]])
    lines = tuple(map(line, shown["series"], styles))
    bands = " Band: 95 % interval of the mean." if any(one.low for one in lines) else ""
    return Plot(
        slug(f"claim {preset} {row['number']} {shown['title']}"),
        shown["title"],
        f"{row['verdict'].capitalize()}, n = {row['n']}.{bands}",
        shown["x"],
        shown["y"],
        lines,
        log_x=shown.get("log_x", False),
        log_y=shown.get("log_y", False),
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
