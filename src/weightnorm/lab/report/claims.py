"""Tables and figures of the paper's claims, from a record of `weightnorm claims`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, groupby
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from weightnorm.lab.claims.rows import latest_rows
from weightnorm.lab.records import Row, RunRecord
from weightnorm.lab.report.figures import draw, legend, panels, scale
from weightnorm.lab.report.style import STYLES, Style, slug
from weightnorm.lab.report.tables import Item, frame

SIZES = {
    "quick": "Embedded digits and a small dense network: a fast check, not evidence.",
    "full": "CIFAR-10 at half its size and ConvPool-CNN-C at an eighth of its width; the noise of "
    "batch statistics at CIFAR-10's own size, claims 6 and 19 over ten epochs of MNIST.",
}
STATEMENTS = {
    "classify": ("18", "23", "25"),
    "vae": ("20.1", "20.2"),
    "draw": ("20.3",),
    "dqn": ("20.4", "20.5", "21", "24"),
}
"""Experiment → claims, or single statements, about it."""
RUNS = re.compile(r"\b((?:classify|vae|draw|dqn) [^:;]*): ")
"""The setting of the runs that a value was computed from."""


def tally(rows: Sequence[Row]) -> str:
    """Count the verdicts and list the claims with each.

    >>> tally([{"verdict": "holds", "id": "1"}, {"verdict": "holds", "id": "2"}])
    'holds: 2 (1, 2)'
    """
    ids: dict[str, list[str]] = {}
    for row in rows:
        ids.setdefault(row["verdict"], []).append(row["id"])
    return "; ".join(f"{verdict}: {len(x)} ({', '.join(x)})" for verdict, x in ids.items())


def summary(record: RunRecord) -> list[str]:
    """Count the verdicts of identities and findings, which are not counted together."""
    rows = latest_rows(record.metrics)
    titles = {"identity": "identities", "finding": "findings", None: "claims"}
    return [
        f"{sum(row.get('kind') == kind for row in rows)} {title}: {found}."
        for kind, title in titles.items()
        if (found := tally([row for row in rows if row["kind"] == kind]))
    ]


def items(record: RunRecord) -> Iterator[Item]:
    """Yield the verdicts; on request what was measured, the rules, and the figures."""
    rows = latest_rows(record.metrics)
    found = [row for row in rows if row["kind"] == "finding"]
    verdicts = [
        {"claim": statement(row), "n": str(row["n"]), "verdict": row["verdict"]} for row in found
    ]
    if verdicts:
        yield Item("Verdicts", frame(verdicts))
    if found:
        yield Item("Findings", findings(found), folded=True)
        rules = [{"claim": row["id"], "rule": row["rule"]} for row in found]
        yield Item("Rules", frame(rules), folded=True)
    identities = [
        {"identity": statement(row), "largest deviation": row["value"], "verdict": row["verdict"]}
        for row in rows
        if row["kind"] == "identity"
    ]
    if identities:
        yield Item("Identities", frame(identities), folded=True)
    for row in rows:
        # Figures with the same title of panels are one figure.
        for title, each in groupby(row.get("figures") or (), lambda x: x.get("panels", "")):
            for together in [[*each]] if title else [[figure] for figure in each]:
                name = title or together[0]["title"]
                yield Item(
                    f"Claim {row['id']}: {name}",
                    partial(claim_figure, row, together),
                    [f"{row['verdict'].capitalize()}, n = {row['n']}."],
                    folded=True,
                    name=slug(f"claim {record.preset} {row['id']} {name}"),
                )


def findings(rows: Sequence[Row]) -> pd.DataFrame:
    """Tabulate what the paper states, what was measured, and the verdict."""
    return frame(
        [
            {
                "claim": statement(row),
                "paper": row["paper"],
                "here": one_per_line(row),
                "n": str(row["n"]),
                "verdict": row["verdict"],
            }
            for row in rows
        ]
    )


def about_experiment(experiment: str, rows: Sequence[Row]) -> list[Row]:
    """Return the rows about an experiment."""
    chosen = STATEMENTS.get(experiment, ())
    return [row for row in rows if row["id"] in chosen or str(row["number"]) in chosen]


def verdicts(rows: Sequence[Row]) -> tuple[pd.DataFrame, list[str]]:
    """Tabulate the paper's statements about an experiment, and name the runs in a note."""
    labels = sorted({label for row in rows for label in RUNS.findall(row["value"])})
    table = frame(
        [
            {
                "the paper": f"{statement(row)}: {row['paper']}",
                "ours": RUNS.sub("", one_per_line(row)) if len(labels) == 1 else one_per_line(row),
                "n": str(row["n"]),
                "verdict": row["verdict"],
            }
            for row in rows
        ]
    )
    return table, [f"Runs: {label}." for label in labels if len(labels) == 1]


def statement(row: Row) -> str:
    return f"{row['id']}. {row['statement']}"


def one_per_line(row: Row) -> str:
    """Return the value of a row with one number to a line, methods named as in other tables.

    >>> one_per_line({"value": "weight-norm 1 [0, 2], batch-norm 3 (n = 2; best); rest -4"})
    'weight norm 1 [0, 2]\\nbatch norm 3 (n = 2; best)\\nrest −4'
    """
    text = re.sub(r"(?<![\w-])-(?=\d|∞)", "−", re.sub(r"\binf\b", "∞", row["value"]))
    for method in sorted(STYLES, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){method}(?![\w-])", STYLES[method].name, text)
    return re.sub(r"(; |(?<=\]), (?=[a-z]))(?![^()]*\))", "\n", text)


def claim_figure(row: Row, figures: Sequence[dict[str, Any]]) -> Figure:
    """Draw the curves of a claim; several figures become panels with one legend."""
    drawing, grid = panels([x["title"] for x in figures] if len(figures) > 1 else ("",))
    names: dict[str, Line2D] = {}
    for axes, figure in zip(grid, figures, strict=True):
        styles = line_styles([series["name"] for series in figure["series"]])
        for series, style in zip(figure["series"], styles, strict=True):
            band = (series["low"], series["high"]) if series.get("low") else None
            names.setdefault(style.name, draw(axes, series["x"], series["y"], style, band))
        axes.set_xlabel(figure["x"])
    grid[0].set_ylabel(figures[0]["y"])
    for axes, figure in zip(grid, figures, strict=True):
        scale(axes, figure.get("log_x", False), figure.get("log_y", False))
    bands = any(axes.collections for axes in grid)
    words = "; line: mean over seeds; band: range over seeds" if bands else ""
    legend(drawing, names, f"n = {row['n']}{words}")
    return drawing


OTHERS = (Style("", "#e69f00", "P"), Style("", "#56b4e9", "X"), Style("", "#7f7f7f", "p"))
"""Styles of further lines, without a name."""


def line_styles(names: list[str]) -> list[Style]:
    """Return the style of each line.

    The name up to a comma is a parameterization, which has its usual style; any other line takes
    the style of a parameterization that is not in the figure, then one of `OTHERS`.
    """
    kinds = [name.partition(",")[0] for name in names]
    unused = (style for kind, style in STYLES.items() if kind not in kinds)
    free = cycle([*unused, *OTHERS])
    styles = []
    for index, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        first = kind in STYLES and kind not in kinds[:index]
        words = name.replace(kind, STYLES[kind].name) if kind in STYLES else name
        styles.append((STYLES[kind] if first else next(free))._replace(name=words))
    return styles
