"""Write the tables and figures of README.md and docs/ from the records in docs/results.

A document has blocks, ``<!-- results:NAME -->`` … ``<!-- /results -->``, whose text is replaced.
NAME is that of a table or finding of the report, such as ``vae-mnist-cpu-bounds``; see `blocks`. A
figure is written to ``docs/results/<experiment>/figures`` if a document links to it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from weightnorm.files.atomic import write_atomically
from weightnorm.lab.errors import ReportError
from weightnorm.lab.records import Row
from weightnorm.lab.reports import bench
from weightnorm.lab.reports.document import FigureSpec, Picture, Section, Table, slug
from weightnorm.lab.reports.figures import render_figures
from weightnorm.lab.reports.markdown import markdown_table
from weightnorm.lab.reports.report import read, sections_of

BLOCK = re.compile(r"(<!-- results:(\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)
IMAGE = re.compile(r"results/([\w-]+/figures/[\w.-]+\.(?:png|gif|svg))\b")
INDEX = "figures.json"
"""In docs/results: path of each figure → digest of the numbers that it shows."""


@dataclass(frozen=True)
class Gallery:
    """An entry of the README's table of experiments."""

    title: str
    figure: str
    findings: str
    card: str
    shown: int = 0
    """Index of the finding that is shown."""
    wide: bool = False
    """Whether the figure has panels: shown below the table, in full width."""


GALLERY = (
    Gallery(
        "CIFAR-10, five parameterizations (section 5.1)",
        "classify/figures/classify-cpu-test-error.png",
        "classify-cpu-findings",
        "docs/experiments/classify.md",
        shown=1,
    ),
    Gallery(
        "Convolutional VAE on MNIST (section 5.2)",
        "vae/figures/vae-mnist-cpu-test-negative-elbo.png",
        "vae-mnist-cpu-findings",
        "docs/experiments/vae.md",
    ),
    Gallery(
        "DRAW on binarized MNIST (section 5.3)",
        "draw/figures/draw-cpu-test-negative-elbo.png",
        "draw-cpu-findings",
        "docs/experiments/draw.md",
    ),
    Gallery(
        "Deep Q-network on Space Invaders (section 5.4)",
        "dqn/figures/dqn-cpu-space-invaders-score.png",
        "dqn-cpu-space-invaders-findings",
        "docs/experiments/dqn.md",
    ),
    Gallery(
        "A transformer under AdamW and Muon (not in the paper)",
        "language/figures/language-cpu-precision-bfloat16-held-out.png",
        "language-cpu-precision-bfloat16-findings",
        "docs/experiments/language.md",
        wide=True,
    ),
)


def update_documents(root: Path) -> list[Path]:
    """Rewrite the blocks and figures of all documents; returns the files that changed."""
    sections = _sections(root)
    changed = []
    for path, text in documents(root, sections).items():
        changed += _replace(path, text.encode())
    figures, index = _wanted(root, sections), {}
    results = root / "docs" / "results"
    old = json.loads((results / INDEX).read_text()) if (results / INDEX).exists() else {}
    for name, figure in figures.items():
        index[name] = digest(figure)
        if old.get(name) == index[name] and (results / name).exists():
            continue  # drawing is slow, and other versions of matplotlib give other bytes
        (rendered,) = render_figures([figure]).values()
        (results / name).parent.mkdir(exist_ok=True)
        changed += _replace(results / name, rendered.files[Path(name).suffix[1:]])
    for path in sorted(results.glob("*/figures/*")):
        if str(path.relative_to(results)) not in index:
            path.unlink()
            changed.append(path)
    content = json.dumps(dict(sorted(index.items())), indent=2) + "\n"
    return changed + _replace(results / INDEX, content.encode())


def outdated(root: Path) -> list[str]:
    """List what `update_documents` would change: documents, and figures of other numbers."""
    sections, results = _sections(root), root / "docs" / "results"
    found = [
        str(path.relative_to(root))
        for path, text in documents(root, sections).items()
        if path.read_text() != text
    ]
    index = json.loads((results / INDEX).read_text())
    figures = _wanted(root, sections)
    found += sorted(set(index) ^ set(figures))
    found += [name for name in figures if index.get(name, "") != digest(figures[name])]
    return found + [name for name in figures if not (results / name).exists()]


def documents(root: Path, sections: dict[str, Section]) -> dict[Path, str]:
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


def blocks(sections: dict[str, Section]) -> dict[str, str]:
    """Return name → Markdown of every table and finding in the report, and of the gallery.

    A table is called ``<title of its section>-<title>``, as a slug: ``classify-cpu-errors``.
    """
    found = {}
    for section in sections.values():
        for name, part in _parts(section):
            if part.findings:
                found[f"{name}-findings"] = "\n".join(f"- {text}" for text in part.findings)
            for item in part.content:
                if isinstance(item, Table):
                    found[f"{name}-{slug(item.title)}"] = markdown_table(item)
    if all(entry.findings in found for entry in GALLERY):
        found["experiments"] = "\n".join(_gallery(found))
    return found


def _gallery(found: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a Markdown table with two experiments in each row, then the wide ones."""

    def shown(entry: Gallery) -> str:
        sentence = found[entry.findings].removeprefix("- ").split("\n- ")[entry.shown]
        image = (
            f'<img src="docs/results/{entry.figure}" width="{700 if entry.wide else 340}" '
            f'alt="{escape(entry.title)}">'
        )
        return f"**[{entry.title}]({entry.card})**<br>{image}<br>{sentence}"

    yield "| | |"
    yield "|---|---|"
    cells = [shown(entry).replace("|", r"\|") for entry in GALLERY if not entry.wide]
    for left, right in zip_longest(cells[::2], cells[1::2], fillvalue=""):
        yield f"| {left} | {right} |"
    for entry in GALLERY:
        if entry.wide:
            yield f"\n{shown(entry)}"


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
    tables = [*bench.details(record)]
    if len(tables) == 1:
        return markdown_table(tables[0])
    return "\n\n".join(f"### {table.title}\n\n{markdown_table(table)}" for table in tables)


def digest(figure: FigureSpec) -> str:
    """Return a digest of what a figure shows, with numbers to six digits."""
    value: Any
    if isinstance(figure, Picture):
        shape = [figure.name, figure.title, figure.caption, list(figure.frames.shape)]
        value = [*shape, sha256(figure.frames.tobytes()).hexdigest()]
    else:
        value = _rounded(dataclasses.asdict(figure))
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return f"{value:.6g}" if isinstance(value, float) else value


def _sections(root: Path) -> dict[str, Section]:
    records, problems = read(root / "docs" / "results")
    if problems:
        raise ReportError("docs/results has records that cannot be used:\n" + "\n".join(problems))
    return sections_of(records)


def _wanted(root: Path, sections: dict[str, Section]) -> dict[str, FigureSpec]:
    """Return path below docs/results → figure, for every figure that a document links to."""
    known = {
        f"{experiment}/figures/{figure.name}": figure
        for experiment, section in sections.items()
        for figure in section.figures
    }
    wanted = {}
    for path in _documents(root):
        for name in IMAGE.findall(path.read_text()):
            if (stem := name.rpartition(".")[0]) not in known:
                raise ReportError(f"{path} links to {name}, which is not a figure of the report")
            wanted[name] = known[stem]
    return wanted


def _documents(root: Path) -> list[Path]:
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])


def _parts(section: Section, above: str = "") -> Iterator[tuple[str, Section]]:
    """Yield the sections below a section, with names that include those above them."""
    for item in section.content:
        if isinstance(item, Section):
            name = f"{above}{slug(item.title)}"
            yield name, item
            yield from _parts(item, f"{name}-")


def _replace(path: Path, content: bytes) -> list[Path]:
    """Write a file if its content differs; returns it if so."""
    if path.exists() and path.read_bytes() == content:
        return []
    write_atomically(path, content)
    return [path]
