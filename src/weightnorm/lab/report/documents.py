"""Write the tables and figures of README.md and docs/ from the records in docs/results.

A document has blocks, ``<!-- results:NAME -->`` … ``<!-- /results -->``, whose text is replaced.
NAME is that of a table of the report, such as ``vae-mnist-cpu-bounds``; see `blocks`. A figure is
written to ``docs/results/<experiment>/figures`` if a document links to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from weightnorm.files.atomic import write_atomically
from weightnorm.lab.claims.rows import latest_rows
from weightnorm.lab.errors import ReportError
from weightnorm.lab.records import Row, RunRecord
from weightnorm.lab.report import bench, claims
from weightnorm.lab.report.page import VERDICTS, Section, describe, read, render
from weightnorm.lab.report.provenance import commits, provenance
from weightnorm.lab.report.style import slug
from weightnorm.lab.report.tables import Item, frame, markdown

BLOCK = re.compile(r"(<!-- results:(\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)
PROVENANCE = "-provenance"
IMAGE = re.compile(r"results/([\w-]+)/figures/([\w.-]+)\.(png|gif|svg)\b")


def update_documents(root: Path) -> list[Path]:
    """Rewrite the blocks and figures of all documents; returns the files that changed."""
    texts, figures = contents(root)
    written = {path: text.encode() for path, text in texts.items()}
    written |= {path: render(item, path.suffix[1:])[1] for path, item in figures.items()}
    changed = [
        path for path, content in written.items()
        if not path.exists() or path.read_bytes() != content
    ]  # fmt: skip
    for path in changed:
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, written[path])
    unused = sorted({*(root / "docs" / "results").glob("*/figures/*")} - {*figures})
    for path in unused:
        path.unlink()
    return changed + unused


def outdated(root: Path) -> list[str]:
    """List the documents whose tables are not those of the records, and the missing figures."""
    texts, figures = contents(root)
    found = [path for path, text in texts.items() if path.read_text() != text]
    found += [path for path in figures if not path.exists()]
    return [str(path.relative_to(root)) for path in found]


def contents(root: Path) -> tuple[dict[Path, str], dict[Path, Item]]:
    """Return the text of every document with its blocks filled in, and path → figure of every
    link to one; ReportError for an unknown name."""
    results = root / "docs" / "results"
    records, problems = read(results)
    if problems:
        raise ReportError("docs/results has records that cannot be used:\n" + "\n".join(problems))
    sections = describe(records)
    known = blocks(sections, records) | bench_files(results) | provenances(root, records)
    drawn = {
        (section.experiment, item.name): item
        for section in sections
        for part in section.parts
        for item in part.items
        if item.name
    }
    texts, figures = {}, {}
    for path in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")]):

        def block(match: re.Match[str], path: Path = path) -> str:
            if match[2] not in known and match[2].endswith(PROVENANCE):
                return match[0]  # the history is not here
            if match[2] not in known:
                names = ", ".join(sorted(known))
                raise ReportError(f"{path}: no results are called {match[2]}; there are {names}")
            return f"{match[1]}\n{known[match[2]]}\n\n{match[3]}"

        texts[path] = BLOCK.sub(block, path.read_text())
        for experiment, name, kind in IMAGE.findall(texts[path]):
            link = f"{experiment}/figures/{name}.{kind}"
            if (experiment, name) not in drawn:
                raise ReportError(f"{path} links to {link}, which is not a figure of the report")
            figures[results / link] = drawn[experiment, name]
    return texts, figures


def blocks(sections: Sequence[Section], records: Sequence[RunRecord]) -> dict[str, str]:
    """Return name → Markdown.

    - ``<part>-<title>``, such as ``classify-cpu-errors``: a table of the report;
    - ``<part>-tally``, such as ``claims-full-tally``: how many claims have which verdict;
    - ``<experiment>-verdicts``: what the paper states about an experiment, and the verdict;
    - ``experiments``: the verdicts of all experiments against the standard parameterization.
    """
    found = {}
    rows = [row for record in records if record.preset == "full" for row in statements(record)]
    for section in sections:
        for part in section.parts:
            if part.tally:
                found[f"{part.name}-tally"] = "\n".join(f"- {text}" for text in part.tally)
            found |= dict(rendered(part.name, part.items))
        found |= dict(rendered(f"{section.experiment}-other-settings", section.unfolded))
        if own := claims.about_experiment(section.experiment, rows):
            found[f"{section.experiment}-verdicts"] = markdown(*claims.verdicts(own))
        elif any(part.verdicts for part in section.parts):
            found[f"{section.experiment}-verdicts"] = verdicts([section], links=False)
    return found | {"experiments": verdicts(sections, links=True)}


def provenances(root: Path, records: Sequence[RunRecord]) -> dict[str, str]:
    """Return ``<experiment>-provenance``: how many records are of code in the repository's
    history. Empty where the history is not known, as in an installed package."""
    history = commits(root)
    return {
        f"{name}{PROVENANCE}": provenance([x for x in records if x.experiment == name], history)
        for name in dict.fromkeys(record.experiment for record in records if history)
    }


def rendered(name: str, items: Sequence[Item]) -> Iterator[tuple[str, str]]:
    for item in items:
        if isinstance(item.body, pd.DataFrame):
            yield f"{name}-{slug(item.title)}", markdown(item.body, item.notes)


def statements(record: RunRecord) -> list[Row]:
    return latest_rows(record.metrics) if record.experiment == "claims" else []


def verdicts(sections: Sequence[Section], links: bool) -> str:
    """Tabulate how each method differs from standard: a row for each method of a setting."""
    rows = []
    for section in sections:
        for part in section.parts:
            path = f"docs/experiments/{section.experiment}.md"
            title = f"[{part.title}]({path})" if links else part.title
            for index, one in enumerate(part.verdicts):
                row = {"experiment": "" if index else f"{title}\n{one['measured']}"}
                for head in ("method", "ours", "standard", "difference", "mark", "n"):
                    row[head.replace("mark", "")] = one[head]
                rows.append(row)
    return markdown(frame(rows), [VERDICTS]) if rows else ""


def bench_files(results: Path) -> dict[str, str]:
    """Return the tables of benchmark records, ``path#benchmark`` for a path below docs/results, and
    ``path:machine``."""
    found = {}
    for path in sorted(results.rglob("*.json")):
        content: Any = json.loads(path.read_text())
        if isinstance(content, dict) and {"benchmarks", "environment"} <= set(content):
            name = str(path.relative_to(results))
            found[f"{name}:machine"] = bench.about(content)
            for benchmark in content["benchmarks"]:
                found[f"{name}#{benchmark['name']}"] = markdown(bench.results(benchmark))
    return found
