"""Tables and figures of the paper's claims, from a record of `weightnorm claims`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, groupby
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from weightnorm.lab.claims.rows import latest_rows
from weightnorm.lab.records import Row, RunRecord
from weightnorm.lab.report.figures import draw, legend, panels, scale
from weightnorm.lab.report.style import INK, STYLES, Style, slug
from weightnorm.lab.report.tables import Item, frame

SIZES = {
    "quick": "Embedded digits and a small dense network: a fast check, not evidence.",
    "full": "CIFAR-10 at half its size and ConvPool-CNN-C at an eighth of its width; the noise of "
    "batch statistics at CIFAR-10's own size, the step's time with the paper's own network.",
    "long": "Claim 6 over ten epochs of MNIST, with three hidden layers of 256 units.",
    "long-quick": "Claim 6 by the same protocol on embedded digits: a fast check, not evidence.",
}
LISTS = {"finding": "Findings", "identity": "Identities", None: "Verdicts"}
"""Kind of a claim → title of its table of verdicts; older records have one table."""
PLURALS = {
    "holds": "hold",
    "holds qualitatively": "hold qualitatively",
    "does not hold here": "do not hold here",
}
CAPS = {6: math.log(10)}
"""Claim → value at which its figures are capped, in records that do not name it: the loss of chance
among ten classes, also of runs that diverged."""


def findings(record: RunRecord) -> list[str]:
    rows = latest_rows(record.metrics)
    return [f"{len(rows)} claims ({record.preset}): {tally(rows)}."]


def numbers_by_verdict(record: RunRecord) -> str:
    """List the numbers of the claims with each verdict, such as ``holds: 1, 2; not shown: 3``."""
    found: dict[str, list[str]] = {}
    for row in latest_rows(record.metrics):
        found.setdefault(_text(row, "verdict"), []).append(row["id"])
    return "; ".join(f"{verdict}: {', '.join(numbers)}" for verdict, numbers in found.items())


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


def items(record: RunRecord) -> Iterator[Item]:
    """Yield the verdicts, the figures, and every value that was measured."""
    rows = latest_rows(record.metrics)
    for kind, title in LISTS.items():
        verdicts = [
            {
                "claim": f"{row['id']}. {_text(row, 'statement')}",
                "n": _text(row, "n"),
                "verdict": _text(row, "verdict"),
            }
            for row in rows
            if row.get("kind") == kind
        ]
        if verdicts:
            yield Item(title, frame(verdicts), numeric=False)
    for row in rows:
        # Figures with the same title of panels are one figure.
        for title, each in groupby(row.get("figures") or (), lambda x: x.get("panels", "")):
            for together in [[*each]] if title else [[figure] for figure in each]:
                name = title or together[0]["title"]
                note = f"{row['verdict'].capitalize()}, n = {row['n']}."
                yield Item(
                    f"Claim {row['id']}: {name}",
                    partial(claim_figure, row, together),
                    [note],
                    folded=True,
                    name=slug(f"claim {record.preset} {row['id']} {name}"),
                )
    measured = [
        {
            "claim": row["id"],
            "section": _text(row, "section"),
            "measured": _text(row, "rule"),
            "value": one_per_line(_text(row, "value")),
            "paper": _text(row, "paper"),
        }
        for row in rows
    ]
    yield Item("Measurements", frame(measured), folded=True, numeric=False)


def one_per_line(value: str) -> str:
    """Return a value with one statement to a line: some claims are measured by many numbers.

    >>> one_per_line("a 1 (n = 2; best); b 2")
    'a 1 (n = 2; best)\\nb 2'
    """
    return re.sub(r"; (?![^()]*\))", "\n", value)


def _text(row: Row, field: str) -> str:
    return str(row.get(field, "—"))


def claim_figure(row: Row, figures: Sequence[dict[str, Any]]) -> Figure:
    """Draw the curves of a claim; several figures become panels with one legend.

    Values at the cap, which stand for anything above it, lie on a dotted line that says so.
    """
    drawing, grid = panels([x["title"] for x in figures] if len(figures) > 1 else ("",))
    names: dict[str, Line2D] = {}
    bands = False
    for axes, figure in zip(grid, figures, strict=True):
        cap = figure.get("cap", CAPS.get(row["number"]))
        styles = line_styles([series["name"] for series in figure["series"]])
        for series, style in zip(figure["series"], styles, strict=True):
            band = (series["low"], series["high"]) if series.get("low") else None
            names.setdefault(style.name, draw(axes, series["x"], series["y"], style, band))
            bands = bands or band is not None
        axes.set_xlabel(figure["x"])
        if cap and any(y >= cap * (1 - 1e-9) for x in figure["series"] for y in x["y"]):
            axes.axhline(cap, color=INK, linestyle=":", linewidth=1)
            at, words = ("axes fraction", "data"), "capped here: chance, or diverged"
            axes.annotate(words, (0.01, cap), fontsize=9, va="bottom", xycoords=at)
    for axes, figure in zip(grid, figures, strict=True):
        scale(axes, figure.get("log_x", False), figure.get("log_y", False))
    grid[0].set_ylabel(figures[0]["y"])
    words = "; line: mean over seeds; band: range over seeds" if bands else ""
    legend(drawing, names, f"n = {row['n']}{words}")
    return drawing


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
        styles.append((STYLES[kind] if first else next(free))._replace(name=words))
    return styles
