"""Report section of the benchmarks: a summary, one chart, then every case and goal."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from weightnorm.lab.records import Row, RunRecord
from weightnorm.lab.reports.document import Bar, BarChart, BarGroup, Section, Table
from weightnorm.lab.reports.style import STYLES, Style

COLUMNS = {
    "ours": "ours",
    "torch parametrization": "torch_parametrization",
    "torch hook": "torch_hook",
    "batch norm": "batch_norm",
}
"""Column of the summary → field of a case's summary that names the implementation."""
SMALL = 0.1
NOISE = "noise"
NO_BREAK = "\N{NO-BREAK SPACE}"
MARKS = {"met": "✓", "within noise": "~", "missed": "✗"}
LIMITS = {
    "matrix": "measured throughput of matrix products",
    "convolution": "measured throughput of convolutions",
    "memory": "measured memory bandwidth",
    "copy of the weight": "speed of copying the weight",
}
COLUMN_STYLES = {
    "ours": STYLES["weight-norm"],
    "torch parametrization": STYLES["mean-only-batch-norm"],
    "torch hook": Style("", "#7a7f87", "s"),
    "batch norm": STYLES["batch-norm"],
}


def section(records: list[RunRecord]) -> Section:
    """Describe the benchmarks, one part for each record."""
    parts = tuple(part(record) for record in records if record.result)
    intro = (
        "Implementations of the same work, timed in alternation: interquartile means of the ratios "
        "within a round, with 95 % bootstrap intervals. A goal is met if the whole interval is "
        "within it, missed if none of it is. Noise: an implementation that does at least the work "
        "of the reference measured faster than it."
    )
    return Section("Cost", intro, parts)


def part(record: RunRecord) -> Section:
    """Describe one record: summary, chart, goals, and the measurements of every case."""
    found = record.result
    assert found is not None
    content: list[Table | BarChart] = [summary(found), overview_chart(found), goals(found)]
    return Section(
        f"bench: {record.preset}", about(found), (*content, *details(found)), findings(found)
    )


def about(found: Row) -> str:
    """Describe the machine; older records have its measured limits."""
    where, limits = found["environment"], found.get("limits")
    speeds = (
        f" Copies: {limits['memory'] / 1e9:.3g} GB/s (read and written); matrix products: "
        f"{limits['matrix'] / 1e9:.3g} GFLOP/s; convolutions: "
        f"{limits['convolution'] / 1e9:.3g} GFLOP/s."
        if limits
        else ""
    )
    return (
        f"{where['machine']}{instructions(where)}, {where['device']}, {where['threads']} threads, "
        f"torch {where['torch']}, at least {found['settings']['rounds']} rounds.{speeds}"
    )


def instructions(environment: Row) -> str:
    """Name the vector instructions that torch uses; empty in records that do not have them."""
    cpu = environment.get("cpu", {})
    bfloat16 = ", bfloat16" if "avx512_bf16" in cpu.get("instruction_sets", ()) else ""
    return f" ({cpu['torch_uses']}{bfloat16})" if "torch_uses" in cpu else ""


def findings(found: Row) -> tuple[str, ...]:
    """Summarize ours beside torch's parametrization and batch norm, and the goals met."""
    sentences = []
    for column in ("torch parametrization", "batch norm"):
        values = [
            f"{line['work']} {ours} ({theirs})"
            for case, line in _summary_lines(found)
            if (other := line[COLUMNS[column]])
            and NOISE not in (ours := _ratio(case, line["ours"]), theirs := _ratio(case, other))
        ]
        if values:
            title = f"Cost relative to plain weights, in parentheses that of {column}"
            sentences.append(f"{title}: {'; '.join(values)}.")
    counts = Counter(goal["verdict"] for _, _, goal in _goals(found))
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return (*sentences, f"{sum(counts.values())} goals for cost: {tally}.") if counts else ()


def _ratio(case: Row, peer: str) -> str:
    """The ratio alone, without its interval."""
    return relative(case, peer).replace(NO_BREAK, " ").split(" ")[0]


# — tables —


def summary(found: Row) -> Table:
    """Tabulate cost relative to the plain network: ours, torch's two, batch norm, and the goal."""
    rows = []
    for case, line in _summary_lines(found):
        cells = [relative(case, line[field]) if line[field] else "—" for field in COLUMNS.values()]
        goal = case["goals"][line["goal"]]
        rows.append((line["work"].replace(" ", NO_BREAK), *cells, short_goal(goal)))
    head = ("work", *COLUMNS, "goal")
    notes = (
        "Time of a training step, unless something else is named, relative to plain weights; for "
        "mean-only batch norm (BN) after a convolution relative to the convolution alone. With "
        "95 % intervals; lower is better. Goal for ours: ✓ met, ~ within noise, ✗ missed.",
    )
    return Table("Summary", head, tuple(rows), notes, numeric=False)


def _summary_lines(found: Row) -> Iterator[tuple[Row, Row]]:
    """Yield each line of the summary with its case."""
    for benchmark in found["benchmarks"]:
        for case in benchmark["cases"]:
            for line in case["summary"]:
                yield case, line


def short_goal(goal: Row) -> str:
    """Shorten a goal and its verdict for the summary.

    >>> short_goal({"goal": "weight norm ≤ 1.01 × plain", "verdict": "met"})
    '≤\xa01.01\xa0✓'
    >>> short_goal({"goal": "extra cost of a ≤ 0.5 × that of batch norm", "verdict": "missed"})
    "extra\xa0≤\xa00.5\xa0×\xa0BN's\xa0✗"
    """
    extra = "extra " if goal["goal"].startswith("extra cost") else ""
    text = f"{extra}≤{goal['goal'].partition('≤')[2]}"
    text = re.sub(r" × (plain|standard|forward pass)$", "", text)
    text = text.replace("that of batch norm", "BN's")
    return f"{text} {MARKS[goal['verdict']]}".replace(" ", NO_BREAK)


def goals(found: Row) -> Table:
    """Tabulate every goal, its measured value and the verdict."""
    rows = tuple(
        (work(benchmark, case), goal["goal"], interval(goal, 3), goal["verdict"])
        for benchmark, case, goal in _goals(found)
    )
    return Table("Goals", ("work", "goal", "measured", ""), rows, numeric=False)


def details(found: Row) -> Iterator[Table]:
    """Tabulate every implementation of every case, one table for each benchmark."""
    for benchmark in found["benchmarks"]:
        rows = []
        for case in benchmark["cases"]:
            for index, name in enumerate(case["results"]):
                label = "" if index else case["case"]
                rows.append((label, name, amount(case, name), relative(case, name, 3)))
        head = ("case", "implementation", "median", "relative")
        notes = [f"{case['case']}: {text}." for case in benchmark["cases"] if (text := share(case))]
        yield Table(benchmark["title"], head, tuple(rows), tuple(notes), numeric=False)


def _goals(found: Row) -> Iterator[tuple[Row, Row, Row]]:
    for benchmark in found["benchmarks"]:
        for case in benchmark["cases"]:
            for goal in case["goals"]:
                yield benchmark, case, goal


# — cells —


def work(benchmark: Row, case: Row) -> str:
    return f"{benchmark['title']}: {case['case']}"


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


def share(case: Row) -> str:
    """Return how much of the machine's limit was reached; empty if that was not measured."""
    found = case["share"]
    if not found:
        return ""
    limit = LIMITS.get(found["limit"], found["limit"])
    return f"{found['peer']} reaches {100 * found['value']:.0f} % of the {limit}"


# — charts —


def overview_chart(found: Row) -> BarChart:
    """Chart the summary as dots: ours, torch's and batch norm, relative to plain weights."""
    groups = []
    for case, line in _summary_lines(found):
        if case["results"][line["ours"]]["value"] < SMALL:  # a share, not a ratio
            continue
        names = {column: line[field] for column, field in COLUMNS.items() if line[field]}
        bars = (_bar(case, name, column) for column, name in names.items())
        groups.append(BarGroup(line["work"], tuple(x for x in bars if x is not None)))
    caption = "Dashed: plain weights (for mean-only batch norm, BN: the convolution alone). "
    caption += "Line through a dot: 95 % interval."
    x, title = "relative to plain weights", "Cost relative to plain weights"
    return BarChart("bench-summary", title, caption, x, tuple(groups), dots=True)


def _bar(case: Row, name: str, column: str) -> Bar | None:
    """Return the bar of an implementation; None if its ratio is noise or not finite."""
    result = case["results"][name]
    values = (result["value"], result["low"], result["high"])
    if result["noise"] or None in values:
        return None
    return Bar(column, COLUMN_STYLES[column], *values)
