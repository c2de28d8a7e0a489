"""Write the tables and figures of README.md and docs/ from the records in docs/results.

A document has blocks, ``<!-- results:NAME -->`` … ``<!-- /results -->``, whose text is replaced.
NAME is that of a table or finding of the report, such as ``vae-mnist-cpu-bounds``; see `blocks`. A
figure is written to ``docs/results/<experiment>/figures`` if a document links to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from weightnorm.files.atomic import write_atomically
from weightnorm.lab.errors import ReportError
from weightnorm.lab.records import Row
from weightnorm.lab.report import bench
from weightnorm.lab.report.page import VERDICTS, Section, describe, read, render
from weightnorm.lab.report.style import slug
from weightnorm.lab.report.tables import Item, frame, markdown

BLOCK = re.compile(r"(<!-- results:(\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)
IMAGE = re.compile(r"results/([\w-]+)/figures/([\w.-]+)\.(png|gif|svg)\b")


def update_documents(root: Path) -> list[Path]:
    """Rewrite the blocks and figures of all documents; returns the files that changed."""
    sections = _sections(root)
    changed = []
    for path, text in documents(root, sections).items():
        changed += _replace(path, text.encode())
    figures = linked_figures(root, sections)
    for path, item in figures.items():
        _, content, _ = render(item, path.suffix[1:])
        path.parent.mkdir(exist_ok=True)
        changed += _replace(path, content)
    for path in sorted(set((root / "docs" / "results").glob("*/figures/*")) - set(figures)):
        path.unlink()
        changed.append(path)
    return changed


def outdated(root: Path) -> list[str]:
    """List the documents whose tables are not those of the records, and the missing figures."""
    sections = _sections(root)
    texts = documents(root, sections)
    found = [path for path, text in texts.items() if path.read_text() != text]
    found += [path for path in linked_figures(root, sections) if not path.exists()]
    return [str(path.relative_to(root)) for path in found]


def documents(root: Path, sections: Sequence[Section]) -> dict[Path, str]:
    """Return every document with its blocks filled in; ReportError for an unknown block."""
    found = blocks(sections) | _bench_files(root)

    def fill(path: Path) -> str:
        def block(match: re.Match[str]) -> str:
            if match[2] not in found:
                names = ", ".join(sorted(found))
                raise ReportError(f"{path}: no results are called {match[2]}; there are {names}")
            return f"{match[1]}\n{found[match[2]]}\n\n{match[3]}"

        return BLOCK.sub(block, path.read_text())

    return {path: fill(path) for path in _documents(root)}


def blocks(sections: Sequence[Section]) -> dict[str, str]:
    """Return name → Markdown of every table and finding in the report, and of its verdicts.

    A table is called ``<title of its part>-<title>``, as a slug: ``classify-cpu-errors``.
    """
    found = {}
    for section in sections:
        for part in section.parts:
            if part.findings:
                found[f"{part.name}-findings"] = "\n".join(f"- {text}" for text in part.findings)
            found |= _tables(part.name, part.items)
        found |= _tables(f"{section.experiment}-other-settings", section.unfolded)
    return found | {"experiments": _verdicts(sections)}


def _tables(name: str, items: Sequence[Item]) -> dict[str, str]:
    kept = (item for item in items if isinstance(item.body, pd.DataFrame))
    return {f"{name}-{slug(item.title)}": markdown(item) for item in kept}


def _verdicts(sections: Sequence[Section]) -> str:
    """Return the table of verdicts, a row for each setting, with links to the documents."""
    rows = []
    for section in sections:
        for part in section.parts:
            if found := part.verdicts:
                link = f"[{part.title}](docs/experiments/{section.experiment}.md)"
                row = {"experiment": link, "measured": found[0]["measured"]}
                for head in ("method", "ours", "standard", "difference", "mark", "n"):
                    row[head.replace("mark", "")] = "\n".join(one[head] for one in found)
                rows.append(row)
    return markdown(Item("", frame(rows), [VERDICTS], numeric=False)) if rows else ""


def _bench_files(root: Path) -> dict[str, str]:
    """Return the details of benchmark records: ``path`` below docs/results, ``path#benchmark``."""
    results = root / "docs" / "results"
    found = {}
    for path in sorted(results.rglob("*.json")):
        content: Any = json.loads(path.read_text())
        if isinstance(content, dict) and {"benchmarks", "environment"} <= set(content):
            name = str(path.relative_to(results))
            found[name] = bench_details(content)
            for one in content["benchmarks"]:
                found[f"{name}#{one['name']}"] = bench_details({**content, "benchmarks": [one]})
            found[f"{name}:machine"] = bench.about(content)
    return found


def bench_details(record: Row) -> str:
    """Render every case of a benchmark record, one table for each benchmark."""
    items = [*bench.details(record)]
    if len(items) == 1:
        return markdown(items[0])
    return "\n\n".join(f"### {item.title}\n\n{markdown(item)}" for item in items)


def _sections(root: Path) -> list[Section]:
    records, problems = read(root / "docs" / "results")
    if problems:
        raise ReportError("docs/results has records that cannot be used:\n" + "\n".join(problems))
    return describe(records)


def linked_figures(root: Path, sections: Sequence[Section]) -> dict[Path, Item]:
    """Return the path below docs/results and the figure of every link to one in a document."""
    known = {
        (section.experiment, item.name): item
        for section in sections
        for part in section.parts
        for item in part.items
        if item.name
    }
    found = {}
    for path in _documents(root):
        for experiment, name, kind in IMAGE.findall(path.read_text()):
            link = f"{experiment}/figures/{name}.{kind}"
            if (experiment, name) not in known:
                raise ReportError(f"{path} links to {link}, which is not a figure of the report")
            found[root / "docs" / "results" / link] = known[experiment, name]
    return found


def _documents(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def _replace(path: Path, content: bytes) -> list[Path]:
    """Write a file if its content differs; returns it if so."""
    if path.exists() and path.read_bytes() == content:
        return []
    write_atomically(path, content)
    return [path]
