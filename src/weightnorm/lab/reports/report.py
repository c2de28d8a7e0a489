"""`report`: every run below a folder → one page, and each figure as a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weightnorm.lab.errors import ReportError
from weightnorm.lab.reports import bench, claims, classify, dqn, generic, vae
from weightnorm.lab.reports import draw as draw_
from weightnorm.lab.reports.document import Section
from weightnorm.lab.reports.figures import render_figures
from weightnorm.lab.reports.page import render
from weightnorm.lab.reports.run_grid import grouped
from weightnorm.lab.runs.records import RunRecord, find_records, write_atomically

SECTIONS: dict[str, Callable[[list[RunRecord]], Section]] = {
    "bench": bench.section,
    "claims": claims.section,
    "classify": classify.section,
    "vae": vae.section,
    "draw": draw_.section,
    "dqn": dqn.section,
}
"""Experiment → its section. An experiment that is not here gets `generic.section`."""


@dataclass(frozen=True)
class ReportFiles:
    """What was written, and what was wrong with records that are not in it."""

    page: Path
    figures: tuple[Path, ...]
    problems: tuple[str, ...]


def report(root: Path, out: Path) -> ReportFiles:
    """Write out/index.html and out/figures/* about every run below `root`.

    The same records give the same bytes.
    """
    records, problems = read(root)
    sections = [
        SECTIONS.get(experiment, generic.section)(runs)
        for experiment, runs in sorted(grouped(records, lambda r: r.experiment).items())
    ]
    drawings = render_figures(item for section in sections for item in section.figures)
    files = {
        f"figures/{drawing.name}.{kind}": content
        for drawing in drawings.values()
        for kind, content in drawing.files.items()
    }
    page = render(sections, drawings, records, problems)
    _write(out, {**files, "index.html": page.encode()})
    return ReportFiles(out / "index.html", tuple(out / name for name in files), tuple(problems))


def read(root: Path) -> tuple[list[RunRecord], list[str]]:
    """The runs to report on, each once, and what was wrong with the others."""
    if not root.is_dir():
        raise ReportError(f"{root} is not a folder; expected the one that runs are kept in")
    root = root.absolute()
    found, problems = find_records(root)
    records: dict[str, RunRecord] = {}
    for record in sorted(found, key=lambda r: (not r.finished, -len(r.metrics))):
        here = record.folder.relative_to(root)
        if fault := _fault(record):
            problems.append(f"{here}: {fault}")
        elif (twin := records.setdefault(_identity(record), record)) is not record:
            problems.append(f"{here} is the same run as {twin.folder.relative_to(root)}")
    problems = sorted(problem.replace(f"{root}/", "") for problem in problems)
    if not records:
        raise ReportError(
            f"no runs to report on below {root}; make some with "
            "`weightnorm run classify --preset demo`, or name the folder that holds them"
            + "".join(f"\n  {problem}" for problem in problems)
        )
    return sorted(records.values(), key=lambda r: r.folder), problems


def _fault(record: RunRecord) -> str:
    """What keeps a record that is JSON from being a run's; empty if nothing does."""
    expected = {
        "experiment": (record.experiment, str),
        "preset": (record.preset, str),
        "config": (record.config, dict),
        "result": (record.result or {}, dict),
    }
    wrong = (name for name, (value, kind) in expected.items() if not isinstance(value, kind))
    return next((f"its {name} is not what a run records" for name in wrong), "")


def _identity(record: RunRecord) -> str:
    """Runs of one config on one machine are one run, however often it was copied: n counts it
    once."""
    where = [record.environment.get(field) for field in ("machine", "device")]
    return json.dumps([record.experiment, record.config, where], sort_keys=True)


def _write(out: Path, files: dict[str, bytes]) -> None:
    try:
        for name, content in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(out / name, content)
    except OSError as error:
        raise ReportError(
            f"cannot write the report to {out}: {error.strerror}; choose another folder"
        ) from error
