"""Write the report: one page and the figures of all runs below a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weightnorm.files.atomic import write_atomically
from weightnorm.lab.errors import ReportError
from weightnorm.lab.records import RunRecord, distinct_runs, find_records
from weightnorm.lab.reports import bench, claims, classify, dqn, draw, generic, language, vae
from weightnorm.lab.reports.document import Section
from weightnorm.lab.reports.figures import render_figures
from weightnorm.lab.reports.page import render
from weightnorm.lab.reports.run_grid import grouped

SECTIONS: dict[str, Callable[[list[RunRecord]], Section]] = {
    "classify": classify.section,
    "vae": vae.section,
    "draw": draw.section,
    "dqn": dqn.section,
    "language": language.section,
    "claims": claims.section,
    "bench": bench.section,
}
"""Experiment → its section. Any other experiment has `generic.section`."""
LAST = ("claims", "bench")


@dataclass(frozen=True)
class ReportFiles:
    """Paths of the files written, and the problems of records that were left out."""

    page: Path
    figures: tuple[Path, ...]
    problems: tuple[str, ...]


def report(root: Path, out: Path) -> ReportFiles:
    """Write out/index.html and out/figures/* about every run below `root`.

    The same records give the same bytes.
    """
    records, problems = read(root)
    sections = [*sections_of(records).values()]
    rendered = render_figures(item for section in sections for item in section.figures)
    files = {
        f"figures/{figure.name}.{kind}": content
        for figure in rendered.values()
        for kind, content in figure.files.items()
    }
    page = render(sections, rendered, records, problems)
    _write(out, {**files, "index.html": page.encode()})
    return ReportFiles(out / "index.html", tuple(out / name for name in files), tuple(problems))


def sections_of(records: list[RunRecord]) -> dict[str, Section]:
    """Describe each experiment: in the paper's order, then unknown ones, the claims, the costs."""
    names = [*SECTIONS]
    groups = grouped(records, lambda record: record.experiment)

    def place(name: str) -> tuple[bool, int, str]:
        return name in LAST, names.index(name) if name in names else len(names), name

    return {
        name: SECTIONS.get(name, generic.section)(groups[name])
        for name in sorted(groups, key=place)
    }


def read(root: Path) -> tuple[list[RunRecord], list[str]]:
    """Read the runs below a folder, each once, and list the problems of the others."""
    if not root.is_dir():
        raise ReportError(f"{root} is not a folder; expected the folder that holds the runs")
    root = root.absolute()
    found, problems = find_records(root)
    faults = {record.folder: fault for record in found if (fault := _fault(record))}
    problems += [f"{folder.relative_to(root)}: {fault}" for folder, fault in faults.items()]
    records, copies = distinct_runs(record for record in found if record.folder not in faults)
    for copy, kept in copies:
        here, there = (record.folder.relative_to(root) for record in (copy, kept))
        problems.append(f"{here} is the same run as {there}")
    problems = sorted(problem.replace(f"{root}/", "") for problem in problems)
    if not records:
        raise ReportError(
            f"no runs to report on below {root}; create one with "
            "`weightnorm run classify --preset demo`, or name the folder that holds them"
            + "".join(f"\n  {problem}" for problem in problems)
        )
    return records, problems


def _fault(record: RunRecord) -> str:
    """Return what is wrong with a record; empty if nothing is."""
    expected = {
        "experiment": (record.experiment, str),
        "preset": (record.preset, str),
        "config": (record.config, dict),
        "result": (record.result or {}, dict),
    }
    wrong = (name for name, (value, kind) in expected.items() if not isinstance(value, kind))
    fault = next((f"its {name} has the wrong type" for name in wrong), "")
    if not fault and record.experiment in LAST:  # these sections read more than numbers by epoch
        try:
            SECTIONS[record.experiment]([record])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            fault = f"it is damaged ({type(error).__name__}: {error})"
    return fault


def _write(out: Path, files: dict[str, bytes]) -> None:
    try:
        for name, content in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(out / name, content)
    except OSError as error:
        raise ReportError(
            f"cannot write the report to {out}: {error.strerror}; choose another folder"
        ) from error
