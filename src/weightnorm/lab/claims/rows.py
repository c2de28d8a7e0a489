"""The rows of a record of claims: one for each statement. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable

from weightnorm.lab.records import Row

NEEDED = {
    "id", "number", "kind", "section", "statement", "paper", "rule", "value", "verdict", "n",
    "measured_at",
}  # fmt: skip


def latest_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the latest measurement of each claim, by number.

    Each has ``id``, ``number``, ``kind`` (identity or finding), ``section``, ``statement``,
    ``paper``, ``rule``, ``value``, ``verdict``, ``n``, ``numbers`` and ``figures``. Damaged rows,
    and those of older records, are left out.
    """
    found: dict[int, list[Row]] = {}
    for row in rows:
        if not row.keys() >= NEEDED or not isinstance(row["number"], int):
            continue
        known = found.get(row["number"], [])
        together = known and row["measured_at"] == known[-1]["measured_at"]
        found[row["number"]] = [*known, row] if together else [row]
    return [row for _, rows in sorted(found.items()) for row in rows]
