"""Tables and figures as Markdown, for the documents."""

from __future__ import annotations

from weightnorm.lab.reports.document import Table


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
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
