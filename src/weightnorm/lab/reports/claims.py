"""The page of claims: a row for each, and the figures of the empirical ones."""

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
    """A part for each size of the measurement."""
    parts = tuple(part(record) for record in sorted(records, key=lambda r: r.preset))
    intro = (
        "What the paper states about weight normalization, measured. The rule behind a verdict is "
        "fixed in code; square brackets are 95 % bootstrap intervals."
    )
    return Section("The paper's claims", intro, parts)


def part(record: RunRecord) -> Section:
    rows = newest(record)
    counts = Counter(str(row.get("verdict")) for row in rows)
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    table = Table(f"{len(rows)} claims: {tally}", HEAD, tuple(map(cells, rows)), numeric=False)
    seen = [in_figures(record.preset, row) for row in rows if row.get("figures")]
    title = f"Claims: {record.preset}"
    return Section(title, SIZES.get(record.preset, ""), (table, *seen))


def in_figures(preset: str, row: Row) -> Section:
    """A claim's row once more, and below it what it styles like."""
    table = Table("", HEAD[1:], (cells(row)[1:],), numeric=False)
    plots = (plot(preset, row, shown) for shown in row["figures"])
    return Section(f"Claim {row['number']}", f"{row['statement']}.", (table, *plots))


def newest(record: RunRecord) -> list[Row]:
    """Each claim's last row, by number."""
    rows = {row["number"]: row for row in record.metrics if isinstance(row.get("number"), int)}
    return [rows[number] for number in sorted(rows)]


def cells(row: Row) -> tuple[str, ...]:
    fields = ("section", "measured", "value", "paper", "n", "verdict")
    name = f"{row['number']}. {row.get('statement', '')}"
    return (name, *(str(row.get(field, "—")) for field in fields))


def plot(preset: str, row: Row, shown: dict[str, Any]) -> Plot:
    styles = drawn_as([series["name"] for series in shown["series"]])
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


def drawn_as(names: list[str]) -> list[Style]:
    """A parameterization styles as everywhere, whatever stands behind a comma; what else there is
    styles like a parameterization that is not in the figure."""
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
