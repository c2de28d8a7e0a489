"""Tables and figures as Markdown, for the documents."""

from __future__ import annotations

import re

from weightnorm.lab.reports.document import Table

INTERVAL = re.compile(r"(?: |&nbsp;)\[([-−+\d.∞]+),(?: |&nbsp;)([-−+\d.∞]+)\]")


def markdown_table(table: Table) -> str:
    """Render a table with its notes below it.

    >>> print(markdown_table(Table("T", ("name", "n"), (("|x|", "3"),), ("Mean over n.",))))
    | name | n |
    |---|--:|
    | \\|x\\| | 3 |
    <BLANKLINE>
    Mean over n.
    """
    align = "--:" if table.numeric else "---"
    lines = [_row(table.head), f"|---|{'|'.join([align] * (len(table.head) - 1))}|"]
    lines += map(_row, table.rows)
    for note in table.notes:
        lines += ["", note]
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Escape a cell; intervals are set in small type, so that tables of ratios fit a screen.

    >>> _cell("1.02 [0.99, 1.05]\\n2")
    '1.02&nbsp;<sub>0.99‑1.05</sub><br>2'
    >>> _cell("−0.1 [−0.3, +0.1]")
    '−0.1&nbsp;<sub>[−0.3,&nbsp;+0.1]</sub>'
    """

    def small(match: re.Match[str]) -> str:
        if match[1][0] in "-−+":  # where a dash would be ambiguous
            return f"&nbsp;<sub>[{match[1]},&nbsp;{match[2]}]</sub>"
        return f"&nbsp;<sub>{match[1]}\N{NON-BREAKING HYPHEN}{match[2]}</sub>"

    text = text.replace("|", r"\|").replace("\N{NO-BREAK SPACE}", "&nbsp;")
    text = INTERVAL.sub(small, text).replace(" ± ", "&nbsp;±&nbsp;")
    return text.replace("\n", "<br>")
