"""Tables and the chart of a benchmark record."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from weightnorm.lab.records import Row
from weightnorm.lab.report.figures import LEGEND_ROW, WIDTH, legend, panels
from weightnorm.lab.report.style import INK, STYLES, Style
from weightnorm.lab.report.tables import Item, frame

COLUMNS = {
    "ours": ("ours", STYLES["weight-norm"]),
    "torch parametrization": ("torch_parametrization", STYLES["mean-only-batch-norm"]),
    "torch hook": ("torch_hook", Style("", "#7a7f87", "s")),
    "batch norm": ("batch_norm", STYLES["batch-norm"]),
}
"""Column of the summary → field of a case that names the implementation, and its style."""
NO_BREAK = "\N{NO-BREAK SPACE}"
SMALL = 0.1
ROW = 0.27
"""Inches: height of a row of the chart."""
NOISE = "noise"
MARKS = {"met": "✓", "within noise": "~", "missed": "✗"}
INTRO = (
    "Implementations of the same work, timed in alternation: interquartile means of the ratios "
    "within a round, with 95 % bootstrap intervals. A goal is met if the whole interval is within "
    "it, missed if none of it is. Noise: an implementation that does at least the work of the "
    "reference measured faster than it."
)


def items(record: Row) -> Iterator[Item]:
    """Yield summary, chart, goals, and the measurements of every case."""
    yield summary(record)
    caption = "Dashed: plain weights (for mean-only batch norm, BN: the convolution alone)."
    title = "Cost relative to plain weights"
    yield Item(title, partial(overview, record), [caption], folded=True, name="bench-summary")
    rows = [
        {
            "work": f"{benchmark['title']}: {case['case']}",
            "goal": goal["goal"],
            "measured": interval(goal, 3),
            "": goal["verdict"],
        }
        for benchmark, case in cases(record)
        for goal in case["goals"]
    ]
    yield Item("Goals", frame(rows), folded=True)
    yield from details(record)


def cases(record: Row) -> Iterator[tuple[Row, Row]]:
    """Yield (benchmark, case) of every case."""
    for benchmark in record["benchmarks"]:
        for case in benchmark["cases"]:
            yield benchmark, case


def about(record: Row) -> str:
    """Describe the machine: processor, vector instructions, threads and torch."""
    where = record["environment"]
    cpu = where.get("cpu", {})
    bfloat16 = ", bfloat16" if "avx512_bf16" in cpu.get("instruction_sets", ()) else ""
    instructions = f" ({cpu['torch_uses']}{bfloat16})" if "torch_uses" in cpu else ""
    return (
        f"{where['machine']}{instructions}, {where['device']}, {where['threads']} threads, "
        f"torch {where['torch']}, at least {record['settings']['rounds']} rounds."
    )


def tally(record: Row) -> list[str]:
    """Count the goals by verdict."""
    counts = Counter(goal["verdict"] for _, case in cases(record) for goal in case["goals"])
    found = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return [f"{counts.total()} goals for cost: {found}."] if counts else []


# — tables —


def summary(record: Row) -> Item:
    """Tabulate cost relative to the plain network: ours, torch's two, batch norm, and the goal."""
    rows = []
    for case, line in summary_lines(record):
        names = {column: line[field] for column, (field, _) in COLUMNS.items()}
        cells = {column: relative(case, name) if name else "—" for column, name in names.items()}
        goal = short_goal(case["goals"][line["goal"]])
        rows.append({"work": line["work"].replace(" ", NO_BREAK), **cells, "goal": goal})
    note = (
        "Time of a training step, unless something else is named, relative to plain weights; for "
        "mean-only batch norm (BN) after a convolution relative to the convolution alone. With "
        "95 % intervals; lower is better. Goal for ours: ✓ met, ~ within noise, ✗ missed."
    )
    return Item("Summary", frame(rows), [note])


def summary_lines(record: Row) -> Iterator[tuple[Row, Row]]:
    """Yield each line of the summary with its case."""
    for _, case in cases(record):
        for line in case["summary"]:
            yield case, line


def short_goal(goal: Row) -> str:
    """Shorten a goal and its verdict for the summary.

    >>> short_goal({"goal": "weight norm ≤ 1.01 × plain", "verdict": "met"})
    '≤\xa01.01\xa0✓'
    >>> short_goal({"goal": "extra cost of a ≤ 0.5 × that of batch norm", "verdict": "missed"})
    "extra ≤ 0.5 × BN's ✗"
    """
    extra = "extra " if goal["goal"].startswith("extra cost") else ""
    text = f"{extra}≤{goal['goal'].partition('≤')[2]}"
    text = re.sub(r" × (plain|standard|forward pass)$", "", text)
    text = text.replace("that of batch norm", "BN's")
    text = f"{text} {MARKS[goal['verdict']]}"
    return text.replace(" ", NO_BREAK) if len(text) < 12 else text


def details(record: Row) -> Iterator[Item]:
    """Yield a table of every implementation of every case for each benchmark."""
    for benchmark in record["benchmarks"]:
        yield Item(benchmark["title"], results(benchmark), folded=True)


def results(benchmark: Row) -> pd.DataFrame:
    """Tabulate every implementation of every case of a benchmark."""
    return frame(
        [
            {
                "case": "" if index else case["case"],
                "implementation": name,
                "median": amount(case, name),
                "relative": relative(case, name, 3),
            }
            for case in benchmark["cases"]
            for index, name in enumerate(case["results"])
        ]
    )


# — cells —


def amount(case: Row, name: str) -> str:
    """Return the median of an implementation, with examples per second where recorded."""
    value = case["results"][name]["median"]
    if case["unit"] == "B":
        return f"{value / 2**20:,.1f} MB"
    if case["unit"] != "s":
        count = f"{value:,.0f}" if value == round(value) else f"{value:,.2f}"
        return f"{count} {case['unit']}"
    rate = f" ({case['examples'] / value:,.0f}/s)" if case["examples"] else ""
    time = f"{1000 * value:,.0f}" if value >= 1 else f"{1000 * value:.3g}"
    return f"{time} ms{rate}"


def relative(case: Row, name: str, digits: int = 2) -> str:
    """Return the ratio of an implementation to the base with its interval."""
    if name == case["base"]:
        return "1"
    result = case["results"][name]
    return NOISE if result["noise"] else interval(result, digits)


def interval(value: Row, digits: int = 2) -> str:
    """Return a value with its interval; a small one, such as a share of a step, with more digits.

    >>> interval({"value": 1.004, "low": 0.97, "high": None})
    '1.00\xa0[0.97,\xa0∞]'
    >>> interval({"value": 0.0061, "low": 0.006, "high": 0.0063})
    '0.0061\xa0[0.0060,\xa00.0063]'
    """
    numbers = (value["value"], value["low"], value["high"])
    if all(x is not None and abs(x) < SMALL for x in numbers):
        digits += 2
    middle, low, high = ("∞" if x in (None, math.inf) else f"{x:.{digits}f}" for x in numbers)
    if low == middle == high:
        return middle
    return f"{middle} [{low}, {high}]".replace(" ", NO_BREAK)


# — chart —


def overview(record: Row) -> Figure:
    """Draw the summary: a row of dots for each case, with a dashed line at plain weights.

    An implementation whose ratio is noise, or whose interval is unbounded, has no dot.
    """
    lines = [
        (case, line)
        for case, line in summary_lines(record)
        if case["results"][line["ours"]]["value"] >= SMALL  # else it is a share, not a ratio
    ]
    figure, (axes,) = panels()
    figure.set_size_inches(WIDTH * 1.3, 0.8 + LEGEND_ROW + ROW * len(lines))
    axes.axvline(1, linestyle="--", color=INK, linewidth=1)
    handles: dict[str, Any] = {}
    for row, (case, line) in enumerate(lines):
        named = {c: (line[field], style) for c, (field, style) in COLUMNS.items() if line[field]}
        for index, (column, (name, style)) in enumerate(named.items()):
            result = case["results"][name]
            if result["noise"] or None in (result["value"], result["low"], result["high"]):
                continue
            y = row + 0.18 * (index - (len(named) - 1) / 2)
            axes.plot([result["low"], result["high"]], [y, y], color=style.color, linewidth=1.2)
            (handles[column],) = axes.plot(
                result["value"], y, style.marker, color=style.color, markersize=5
            )
    axes.set_yticks(range(len(lines)), [line["work"] for _, line in lines], size=9)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlabel("relative to plain weights")
    legend(figure, handles, "dot: interquartile mean; line through it: 95 % interval")
    return figure
