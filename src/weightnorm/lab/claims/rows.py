"""The rows of a record of claims: one for each statement. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable

from weightnorm.lab.records import Row

NEEDED = {"number", "section", "statement", "paper", "value", "verdict", "n"}


def latest_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the latest measurement of each claim, by number.

    Each has ``id``, ``number``, ``kind`` (identity or finding), ``section``, ``statement``,
    ``paper``, ``rule``, ``value``, ``verdict``, ``n``, ``numbers`` and ``figures``. Older records
    have one row for each claim, and other verdicts. Damaged rows are left out.
    """
    found: dict[int, list[Row]] = {}
    for row in rows:
        if not row.keys() >= NEEDED or not isinstance(row["number"], int):
            continue
        known = found.get(row["number"], [])
        together = known and row.get("measured_at") == known[-1].get("measured_at") is not None
        kept = known if together else []
        full = {"id": str(row["number"]), "rule": row.get("measured", ""), **row}
        found[row["number"]] = [*kept, full]
    return [row for _, rows in sorted(found.items()) for row in rows]
