"""Measures the claims one after the other and records each; the same command resumes.

A claim is measured again if the code has changed since it was recorded, and those that read other
records are measured every time. Other rows of a record are kept as they are.
"""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console

from weightnorm.lab.claims.claim import CLAIMS, Claim, Context, code_digest
from weightnorm.lab.claims.rows import latest_rows
from weightnorm.lab.environment import environment, prepare_process
from weightnorm.lab.errors import ConfigError, Interrupted, RunError, require
from weightnorm.lab.files import lock_folder
from weightnorm.lab.progress import ProgressBars
from weightnorm.lab.records import Row, append_row, load_record, read_rows, write_json

for name in (
    "cost",
    "covariance",
    "experiments",
    "first_epoch",
    "identities",
    "initialization",
    "learning_rates",
    "noise",
    "norm_growth",
    "q_learning",
):
    import_module(f"weightnorm.lab.claims.{name}")  # registers its claims

QUICK_SEEDS, SEEDS = (1, 2, 3), (11, 12, 13, 14, 15)
"""Seeds of a full measurement: none of those on which the rules were chosen."""


def measure(
    *,
    quick: bool = False,
    only: Sequence[int] = (),
    seeds: Sequence[int] = (),
    jobs: int | None = None,
    runs: Path = Path("runs"),
    records: Path | None = None,
    data_dir: Path | None = None,
    console: Console | None = None,
    on_claim: Callable[[Sequence[Row]], None] = lambda rows: None,
) -> Path:
    """Measure claims and return the folder of the record.

    Args:
        quick: embedded digits and small networks, to see that everything works.
        only: numbers of the claims to measure; by default all.
        seeds: of the empirical claims; by default those of the record, or else `SEEDS`.
        jobs: worker processes, of one thread each; by default one per core, or one if quick.
        runs: folder to which the record is written, as ``claims/quick`` or ``claims/full``.
        records: folder of the experiments' and benchmarks' records; by default `runs`.
        console: where progress is shown.
        on_claim: called with the rows of each claim, in order, as soon as it is measured, or at
            once if it is recorded.
    """
    folder = runs / "claims" / ("quick" if quick else "full")
    require(jobs is None or jobs >= 1, "jobs", jobs, "1 or more")
    if unknown := [number for number in only if number not in CLAIMS]:
        numbers = ", ".join(map(str, sorted(CLAIMS)))
        raise ConfigError(f"there is no claim {unknown[0]}; expected one of {numbers}")
    known = load_record(folder).config if (folder / "config.json").exists() else {}
    context = Context(
        quick=quick,
        seeds=tuple(seeds or known.get("seeds", QUICK_SEEDS if quick else SEEDS)),
        data_dir=data_dir,
        records=records or runs,
        workers=jobs or (1 if quick else os.cpu_count() or 1),
        parts_file=folder / "parts.jsonl",
    )
    expected = "two or more, for an interval, each once"
    require(len({*context.seeds}) == len(context.seeds) > 1, "seeds", context.seeds, expected)
    prepare_process(threads=1)  # as in the workers: results do not depend on their number
    progress = ProgressBars(console or Console(stderr=True))
    with lock_folder(folder):
        _open_record(folder, {"seeds": list(context.seeds)})
        try:
            chosen = [CLAIMS[number] for number in sorted({*(only or CLAIMS)})]
            failed = _measure_all(chosen, context, folder, progress, on_claim)
        except KeyboardInterrupt:
            raise Interrupted(folder) from None
        finally:
            progress.close()
        if failed:
            raise RunError(f"{'; '.join(failed)}. The others are in {folder}")
        rows = latest_rows(read_rows(folder / "metrics.jsonl"))
        if {row["number"] for row in rows} >= CLAIMS.keys():
            write_json(folder / "result.json", Counter(row["verdict"] for row in rows))
    return folder


def _measure_all(
    claims: Sequence[Claim],
    context: Context,
    folder: Path,
    progress: ProgressBars,
    on_claim: Callable[[Sequence[Row]], None],
) -> list[str]:
    """Measure and record the claims that are not recorded; return messages of those that failed."""
    recorded, failed = latest_rows(read_rows(folder / "metrics.jsonl")), []
    bar = progress.add("claims", len(claims))
    for index, claim in enumerate(claims):
        progress.update(bar, index)
        rows = [row for row in recorded if row["number"] == claim.number]
        same = [row.get("code") for row in rows] == [code_digest()] * len(claim.statements)
        if claim.from_records or not same:
            try:
                rows = _measure_one(claim, context, progress)
            except RunError as error:  # the others can still be measured
                failed.append(f"claim {claim.number}: {error}")
                continue
            for row in rows:
                append_row(folder / "metrics.jsonl", row)
        on_claim(rows)
    return failed


def _measure_one(claim: Claim, context: Context, progress: ProgressBars) -> list[Row]:
    """Measure a claim with a progress bar for its parts; return a row for each statement."""
    bar = progress.add("parts", None)
    progress.status(lambda: f"claim {claim.number}")

    def on_progress(done: int, total: int) -> None:
        progress.update(bar, done, total=total)
        progress.status(lambda: f"claim {claim.number}: {done} of {total} parts")

    try:
        outcomes = claim.measure(replace(context, on_progress=on_progress))
    finally:
        progress.remove(bar)
    measured_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    head = {"number": claim.number, "kind": claim.kind, "section": claim.section}
    return [
        {"id": id, **head, **asdict(statement), **asdict(outcome), "code": code_digest(),
         "measured_at": measured_at}
        for id, statement, outcome in zip(claim.ids(), claim.statements, outcomes, strict=True)
    ]  # fmt: skip


def _open_record(folder: Path, config: Row) -> None:
    """Create the record, or check that an existing one has the same seeds."""
    if not (folder / "config.json").exists():
        head = {"experiment": "claims", "preset": folder.name, "config": config}
        write_json(folder / "config.json", head)
    elif (before := load_record(folder).config) != config:
        raise ConfigError(
            f"{folder} was measured with other settings: got {config}, recorded {before}; "
            "delete it or choose another --out"
        )
    append_row(folder / "sessions.jsonl", environment(torch.device("cpu"), 1))


def listing() -> str:
    """Return all claims, one statement to a line or two of at most 80 columns."""
    lines = []
    for kind, title in (("identity", "Identities"), ("finding", "Findings")):
        lines.append(title)
        for _, claim in sorted(CLAIMS.items()):
            if claim.kind == kind:
                pairs = zip(claim.ids(), claim.statements, strict=True)
                lines += [_wrapped(f"{id:>5}  ", each.statement) for id, each in pairs]
        lines.append("")
    return "\n".join(lines[:-1])


def describe(rows: Iterable[Row]) -> str:
    """Return rows of a record as text of at most 80 columns."""
    return "\n".join(map(_described, rows))


def _described(row: Row) -> str:
    head = f"{row['id']:>5}  "
    verdict = f"{row['verdict']} (n = {row['n']})"
    if row["kind"] == "identity":
        return _wrapped(head, f"{verdict}: {row['statement']}. {row['value']}")
    lines = [_wrapped(head, row["statement"])]
    fields = (("paper", row["paper"]), ("rule", row["rule"]), ("here", row["value"]))
    lines += [_wrapped(f"       {name}: ", text) for name, text in fields]
    return "\n".join([*lines, f"       → {verdict}"])


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(text, 79, initial_indent=head, subsequent_indent=" " * 9)
