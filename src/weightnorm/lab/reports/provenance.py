"""Settings, machine and versions of a set of runs, and where the runs differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.document import Table

VARIED = ("parameterization", "learning_rate", "seed")
"""Fields in which runs differ by design."""
MACHINE = ("machine", "device", "threads", "ranks")
VERSIONS = ("torch", "python", "weightnorm", "commit")


def settings(records: list[RunRecord]) -> Table:
    """Tabulate all fields of the config, the machine and the versions, over all runs."""
    fields = dict.fromkeys(field for record in records for field in record.config)
    rows = [(_words(field), _shown(config_values(records, field))) for field in fields]
    rows += [(field, _shown(session_values(records, field))) for field in MACHINE + VERSIONS]
    changed = [field for field in fields if field not in VARIED and _differ(records, field)]
    changed += differing_fields(records, MACHINE + VERSIONS)
    notes = [f"The runs differ in: {', '.join(map(_words, changed))}."] if changed else []
    if any("+" in commit for commit in session_values(records, "commit")):
        notes.append("+ after a commit: the code had uncommitted changes.")
    head = ("setting", f"value (n = {len(records)} run{'s' * (len(records) != 1)})")
    return Table("Settings and machine", head, tuple(rows), tuple(notes), numeric=False)


def differing_fields(records: list[RunRecord], fields: Iterable[str]) -> list[str]:
    """Return the fields of the environment that are not the same in all sessions of all runs."""
    return [field for field in fields if len(session_values(records, field)) > 1]


def config_values(records: list[RunRecord], field: str) -> Counter[str]:
    """Count the runs that have each value of a config field."""
    return Counter(_text(record.config.get(field, "not recorded")) for record in records)


def deviations(records: list[RunRecord], usual: Mapping[str, str]) -> str:
    """List the fields whose values are not the usual ones; empty if there are none."""
    values = {field: config_values(records, field) for field in usual}
    return ", ".join(
        f"{_words(field)} {' or '.join(sorted(values[field]))}"
        for field, value in usual.items()
        if set(values[field]) != {value}
    )


def session_values(records: list[RunRecord], field: str) -> Counter[str]:
    """Count the runs that have each value of an environment field, in any of their sessions."""
    return Counter(
        value
        for record in records
        for value in {_text(row.get(field, "not recorded")) for row in record.sessions or [{}]}
    )


def _differ(records: list[RunRecord], field: str) -> bool:
    return len(config_values(records, field)) > 1


def _shown(values: Counter[str]) -> str:
    if len(values) == 1:
        return next(iter(values))
    return ", ".join(f"{value} (n = {values[value]})" for value in sorted(values, key=_order))


def _order(value: str) -> tuple[float, str]:
    """Sort key: numbers by value, then text."""
    try:
        return float(value), value
    except ValueError:
        return math.inf, value


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def _words(field: str) -> str:
    return field.replace("_", " ")
