"""The page of claims: a row for each, and the figures of the empirical ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

from weightnorm.lab.records import Row, RunRecord
from weightnorm.lab.reports.looks import look
from weightnorm.lab.reports.section import Line, Plot, Section, Table, slug

HEAD = ("claim", "section", "measured", "value", "the paper says", "n", "verdict")
SIZES = {
    "quick": "Embedded digits and a small dense network: a look at every claim, not the last word.",
    "full": "CIFAR-10 and a narrow ConvPool-CNN-C.",
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
    plots = [plot(record.preset, row, shown) for row in rows for shown in row.get("figures") or []]
    title = f"Claims: {record.preset}"
    return Section(title, SIZES.get(record.preset, ""), (table, *plots))


def newest(record: RunRecord) -> list[Row]:
    """Each claim's last row, by number."""
    rows = {row["number"]: row for row in record.metrics if isinstance(row.get("number"), int)}
    return [rows[number] for number in sorted(rows)]


def cells(row: Row) -> tuple[str, ...]:
    fields = ("section", "measured", "value", "paper", "n", "verdict")
    name = f"{row['number']}. {row.get('statement', '')}"
    return (name, *(str(row.get(field, "—")) for field in fields))


def plot(preset: str, row: Row, shown: dict[str, Any]) -> Plot:
    lines = tuple(line(series, index) for index, series in enumerate(shown["series"]))
    bands = " Band: 95 % interval of the mean." if any(one.low for one in lines) else ""
    return Plot(
        slug(f"claim {preset} {row['number']} {shown['title']}"),
        f"Claim {row['number']}: {shown['title']}",
        f"{row['verdict'].capitalize()}, n = {row['n']}.{bands}",
        shown["x"],
        shown["y"],
        lines,
        log_x=shown.get("log_x", False),
        log_y=shown.get("log_y", False),
    )


def line(series: dict[str, Any], index: int) -> Line:
    x, y, low, high = (tuple(series[key]) for key in ("x", "y", "low", "high"))
    return Line(series["name"], look(series["name"], index), x, y, low=low, high=high)
