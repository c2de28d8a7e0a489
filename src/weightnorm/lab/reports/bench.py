"""The benchmark's record as a table, in three dresses, and as a bar chart for each row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import median

from weightnorm.lab.reports.document import Bar, BarChart, BarGroup, Section, Table, slug
from weightnorm.lab.reports.style import STYLES, Style
from weightnorm.lab.runs.records import Row, RunRecord

HEAD = ("work", "base", "relative to it", "goal", "measured", "", "of the machine's limit")
OTHERS = Style("", "#7a7f87", "x")
COLOURS = (
    ("mean-only", "weight-norm-mean-only"),
    ("torch", "mean-only-batch-norm"),
    ("batch norm", "batch-norm"),
    ("weight norm", "weight-norm"),
    ("ours", "weight-norm"),
    ("form", "weight-norm"),
    ("initialization", "weight-norm"),
    ("lab", "weight-norm"),
    ("standard", "standard"),
)
"""Part of a peer's name → whose color it has; the first that fits."""


def section(records: list[RunRecord]) -> Section:
    parts = tuple(part(record) for record in records if record.result)
    intro = (
        "Peers take turns within one run; ratios of medians over rounds, each divided by its "
        "pace, with 95 % bootstrap intervals. A goal is met if the whole interval keeps it."
    )
    return Section("What it costs", intro, parts)


def part(record: RunRecord) -> Section:
    assert record.result is not None
    table = Table("Goals", HEAD, tuple(cells(record.result)), numeric=False)
    return Section(
        f"Benchmark: {record.preset}", about(record.result), (table, *charts(record.result))
    )


def about(found: Row) -> str:
    """The machine and its limits, in a sentence."""
    where, limits = found["environment"], found["limits"]
    return (
        f"{where['machine']}, {where['device']}, {where['threads']} threads, torch "
        f"{where['torch']}, {found['setting']['rounds']} rounds. It copies "
        f"{limits['memory'] / 1e9:.3g} GB/s (read and written), multiplies matrices at "
        f"{limits['matrix'] / 1e9:.3g} and convolves at {limits['convolution'] / 1e9:.3g} GFLOP/s."
    )


def cells(found: Row) -> Iterator[tuple[str, ...]]:
    """A line for each goal; the first of a case has what was measured too."""
    for row in found["rows"]:
        for case in row["cases"]:
            ratios = [f"{name} {ratio(value)}" for name, value in case["ratios"].items()]
            base = f"{case['base']}, {amount(case, case['base'])}"
            head = (f"{row['title']}: {case['case']}", base, "; ".join(ratios))
            far = share(case)
            for goal in case["goals"]:
                yield (*head, *judged(goal), far)
                head, far = ("", "", ""), ""


def amount(case: Row, peer: str) -> str:
    """What a peer took, with examples a second where they are of interest."""
    value = median(case["samples"][peer])
    if case["unit"] == "B":
        return f"{value / 2**20:,.1f} MB"
    rate = f" ({case['examples'] / value:,.0f}/s)" if case["examples"] else ""
    return f"{1000 * value:.3g} ms{rate}"


def ratio(value: list[float | None]) -> str:
    middle, low, high = ("∞" if x in (None, math.inf) else f"{x:.3f}" for x in value)
    return f"{middle} [{low}, {high}]"


def judged(goal: Row) -> tuple[str, str, str]:
    return goal["says"], ratio(goal["value"]), goal["verdict"]


def share(case: Row) -> str:
    """How far from the limit."""
    found = case["share"]
    return f"{found['peer']}: {100 * found['value']:.0f} % of {found['limit']}" if found else ""


def markdown(found: Row) -> str:
    """The table, for a page of the documentation."""
    lines = [about(found), "", "| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    lines += ["| " + " | ".join(line) + " |" for line in cells(found)]
    return "\n".join(lines)


def charts(found: Row) -> Iterator[BarChart]:
    for row in found["rows"]:
        goals = [goal for case in row["cases"] for goal in case["goals"]]
        told = "; ".join(f"{goal['says']}: {goal['verdict']}" for goal in goals)
        yield BarChart(
            slug(f"bench {row['name']}"),
            row["title"],
            f"Dashed: the base. {told}." if told else "Dashed: the base.",
            "relative to the base",
            tuple(groups(row["cases"])),
        )


def groups(cases: Iterable[Row]) -> Iterator[BarGroup]:
    for case in cases:
        bars = [
            Bar(name, color(name), *value)
            for name, value in case["ratios"].items()
            if None not in value
        ]
        yield BarGroup(
            f"{case['case']} (base: {case['base']}, {amount(case, case['base'])})", tuple(bars)
        )


def color(peer: str) -> Style:
    return next((STYLES[kind] for word, kind in COLOURS if word in peer), OTHERS)
