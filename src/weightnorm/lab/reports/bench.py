"""Report section of the benchmarks: a summary, one chart, then every case and goal."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median

from weightnorm.lab.reports.document import Bar, BarChart, BarGroup, Section, Table, slug
from weightnorm.lab.reports.markdown import markdown_table
from weightnorm.lab.reports.style import STYLES, Style
from weightnorm.lab.runs.records import Row, RunRecord

OTHERS = Style("", "#7a7f87", "x")
COLORS = (
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
"""Part of an implementation's name → the parameterization whose color it has; first match."""
SUMMARY = {
    "step": "ConvPool-CNN-C",
    "vocoder": "60 conv1d layers, {short}",
    "recurrent": "{short}",
    "acting": "agent acting, {short}",
    "optimizer": "optimizer form, {short}",
    "memory": "ConvPool-CNN-C, peak memory",
    "mean-only": "mean-only BN, {case}",
    "draw": "DRAW, {short}",
    "dqn": "DQN",
    "vae": "VAE, {short}",
}
"""Benchmarks in the summary: their short titles. {short} is the case up to its first comma."""
NO_BREAK = "\N{NO-BREAK SPACE}"
MARKS = {"met": "✓", "within noise": "~", "missed": "✗"}
COLUMNS = {
    "ours": (
        "weight norm, batched",
        "weight norm, together",
        "weight norm, folded",
        "optimizer form",
        "weight norm",
        "mean-only",
    ),
    "torch parametrization": (
        "torch, parametrization",
        "weight norm, torch's",
        "layer by layer, torch, parametrization",
    ),
    "torch hook": ("torch, hook",),
    "batch norm": ("batch norm",),
}
"""Column of the summary → names of the implementation; the first that a case has."""
LIMITS = {
    "matrix": "measured throughput of matrix products",
    "convolution": "measured throughput of convolutions",
    "memory": "measured memory bandwidth",
    "a copy of the weight": "speed of copying the weight",
}
COLUMN_STYLES = {
    "ours": STYLES["weight-norm"],
    "torch parametrization": STYLES["mean-only-batch-norm"],
    "torch hook": Style("", "#7a7f87", "s"),
    "batch norm": STYLES["batch-norm"],
}
RENAMED = {"weight norm, together": "weight norm, batched_weights", "look": "monitor"}
"""Names in older records → today's."""


def section(records: list[RunRecord]) -> Section:
    """Describe the benchmarks, one part for each record."""
    parts = tuple(part(record) for record in records if record.result)
    intro = (
        "Implementations of the same work, timed in alternation within one process: ratios of "
        "medians, with 95 % bootstrap intervals. A goal is met if the whole interval is within it, "
        "missed if none of it is."
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
    """Describe the machine and its measured limits in two sentences."""
    where, limits = found["environment"], found["limits"]
    return (
        f"{where['machine']}, {where['device']}, {where['threads']} threads, torch "
        f"{where['torch']}, {found['setting']['rounds']} rounds. Copies: "
        f"{limits['memory'] / 1e9:.3g} GB/s (read and written); matrix products: "
        f"{limits['matrix'] / 1e9:.3g} GFLOP/s; convolutions: "
        f"{limits['convolution'] / 1e9:.3g} GFLOP/s."
    )


def findings(found: Row) -> tuple[str, ...]:
    """Summarize the cost of a training step, and how many goals are met."""
    sentences = []
    for row in found["rows"]:
        if row["name"] == "step" and (ratios := row["cases"][0]["ratios"]).get("weight norm"):
            values = [f"{name} {interval(value)}" for name, value in ratios.items()]
            sentences.append(f"{row['title']}, relative to plain weights: {', '.join(values)}.")
    counts = Counter(goal["verdict"] for _, _, goal in _goals(found))
    tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return (*sentences, f"{sum(counts.values())} goals for cost: {tally}.") if counts else ()


# — tables —


def summary(found: Row) -> Table:
    """Tabulate cost relative to the plain network: ours, torch's two, batch norm, and the goal."""
    rows = []
    for row in found["rows"]:
        for case in row["cases"] if row["name"] in SUMMARY else ():
            cells = []
            for names in COLUMNS.values():
                name = next((name for name in names if name in case["ratios"]), "")
                cells.append(interval(_to_plain(case, name)) if name else "—")
            goal = next(iter(_own_goals(case)), None)
            title = short_work(row, case).replace(" ", NO_BREAK)
            rows.append((title, *cells, short_goal(goal) if goal else "—"))
    head = ("work", *COLUMNS, "goal")
    notes = (
        "Time of a training step, unless something else is named, relative to plain weights; for "
        "mean-only batch norm (BN) relative to the convolution alone. With 95 % intervals; lower "
        "is better. Goal for ours: ✓ met, ~ within noise, ✗ missed.",
    )
    return Table("Summary", head, tuple(rows), notes, numeric=False)


def _own_goals(case: Row) -> list[Row]:
    """The goals of the implementation that is shown as ours, first those relative to plain."""
    ours = [name for name in COLUMNS["ours"] if name in case["ratios"]][:1]
    found = [goal for goal in case["goals"] if any(name in goal["says"] for name in ours)]
    return sorted(found, key=lambda goal: "that of" in goal["says"])


def _to_plain(case: Row, name: str) -> list[float | None]:
    """The ratio of an implementation to plain weights.

    Where that is not the base of the case, a goal has it: ``weight norm ≤ 1.03 × standard``.
    """
    for goal in case["goals"]:
        if goal["says"].startswith(f"{name} ≤") and goal["says"].endswith("× standard"):
            value: list[float | None] = goal["value"]
            return value
    ratio: list[float | None] = case["ratios"][name]
    return ratio


def short_goal(goal: Row) -> str:
    """Shorten a goal and its verdict for the summary.

    >>> short_goal({"says": "weight norm ≤ 1.01 × plain", "verdict": "met"})
    '≤\xa01.01\xa0✓'
    >>> short_goal({"says": "extra cost of a ≤ 0.5 × that of batch norm", "verdict": "missed"})
    "extra\xa0≤\xa00.5\xa0×\xa0BN's\xa0✗"
    """
    extra = "extra " if goal["says"].startswith("extra cost") else ""
    text = f"{extra}≤{goal['says'].partition('≤')[2]}"
    text = re.sub(r" × (plain|standard)$", "", text).replace("that of batch norm", "BN's")
    return f"{text} {MARKS[goal['verdict']]}".replace(" ", NO_BREAK)


def goals(found: Row) -> Table:
    """Tabulate every goal, its measured value and the verdict."""
    rows = tuple(
        (work(row, case), renamed(goal["says"]), interval(goal["value"], 3), goal["verdict"])
        for row, case, goal in _goals(found)
    )
    return Table("Goals", ("work", "goal", "measured", ""), rows, numeric=False)


def details(found: Row) -> Iterator[Table]:
    """Tabulate every implementation of every case, one table for each benchmark."""
    for row in found["rows"]:
        rows = []
        for case in row["cases"]:
            for index, name in enumerate(case["samples"]):
                relative = interval(case["ratios"][name], 3) if name in case["ratios"] else "1"
                rows.append(
                    ("" if index else case["case"], renamed(name), amount(case, name), relative)
                )
        head = ("case", "implementation", "median", "relative")
        notes = [f"{case['case']}: {text}." for case in row["cases"] if (text := share(case))]
        yield Table(renamed(row["title"]), head, tuple(rows), tuple(notes), numeric=False)


def _goals(found: Row) -> Iterator[tuple[Row, Row, Row]]:
    for row in found["rows"]:
        for case in row["cases"]:
            for goal in case["goals"]:
                yield row, case, goal


# — cells —


def work(row: Row, case: Row) -> str:
    return renamed(f"{row['title']}: {case['case']}")


def short_work(row: Row, case: Row) -> str:
    short = case["case"].partition(",")[0].replace("small ", "")
    return renamed(SUMMARY[row["name"]].format(case=case["case"], short=short))


def renamed(text: str) -> str:
    """Replace names in older records by today's."""
    for old, new in RENAMED.items():
        text = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, text)
    return text


def amount(case: Row, name: str) -> str:
    """Return the median of an implementation, with examples per second where recorded."""
    value = median(case["samples"][name])
    if case["unit"] == "B":
        return f"{value / 2**20:,.1f} MB"
    rate = f" ({case['examples'] / value:,.0f}/s)" if case["examples"] else ""
    time = f"{1000 * value:,.0f}" if value >= 1 else f"{1000 * value:.3g}"
    return f"{time} ms{rate}"


def interval(value: list[float | None], digits: int = 2) -> str:
    """Return a ratio with its interval.

    >>> interval([1.004, 0.97, None])
    '1.00\xa0[0.97,\xa0∞]'
    """
    middle, low, high = ("∞" if x in (None, math.inf) else f"{x:.{digits}f}" for x in value)
    return f"{middle} [{low}, {high}]".replace(" ", NO_BREAK)


def ratio(value: list[float | None]) -> str:
    return interval(value, digits=3)


def judged(goal: Row) -> tuple[str, str, str]:
    return goal["says"], ratio(goal["value"]), goal["verdict"]


def share(case: Row) -> str:
    """Return how much of the machine's limit was reached; empty if that was not measured."""
    found = case["share"]
    if not found:
        return ""
    limit = LIMITS.get(found["limit"], found["limit"])
    return f"{renamed(found['peer'])} reaches {100 * found['value']:.0f} % of the {limit}"


def markdown(found: Row) -> str:
    """Render the summary for a document."""
    return f"{about(found)}\n\n{markdown_table(summary(found))}"


# — charts —


def overview_chart(found: Row) -> BarChart:
    """Chart the summary as dots: ours, torch's and batch norm, relative to plain weights."""
    groups = []
    for row in found["rows"]:
        for case in row["cases"] if row["name"] in SUMMARY else ():
            bars = []
            for column, names in COLUMNS.items():
                name = next((name for name in names if name in case["ratios"]), "")
                value = _to_plain(case, name) if name else [None]
                if None not in value:
                    bars.append(Bar(column, COLUMN_STYLES[column], *value))
            groups.append(BarGroup(short_work(row, case), tuple(bars)))
    caption = "Dashed: plain weights (for mean-only batch norm, BN: the convolution alone). "
    caption += "Line through a dot: 95 % interval."
    x, title = "relative to plain weights", "Cost relative to plain weights"
    return BarChart("bench-summary", title, caption, x, tuple(groups), dots=True)


def charts(found: Row) -> Iterator[BarChart]:
    """Chart every benchmark: each implementation relative to the base of its case."""
    for row in found["rows"]:
        goals = [goal for case in row["cases"] for goal in case["goals"]]
        text = "; ".join(f"{renamed(goal['says'])}: {goal['verdict']}" for goal in goals)
        yield BarChart(
            slug(f"bench {row['name']}"),
            renamed(row["title"]),
            f"Dashed: the base. {text}." if text else "Dashed: the base.",
            "relative to the base",
            tuple(groups(row["cases"])),
        )


def groups(cases: Iterable[Row]) -> Iterator[BarGroup]:
    for case in cases:
        bars = [
            Bar(renamed(name), color(name), *value)
            for name, value in case["ratios"].items()
            if None not in value
        ]
        base = f"{case['base']}, {amount(case, case['base'])}"
        yield BarGroup(renamed(f"{case['case']} (base: {base})"), tuple(bars))


def color(name: str) -> Style:
    return next((STYLES[kind] for word, kind in COLORS if word in name), OTHERS)
