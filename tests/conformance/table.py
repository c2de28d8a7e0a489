"""The suite's outcome as a table: a row a feature, a column an implementation."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from conformance.feature import Feature
from conformance.implementation import Implementation

BEGIN, END = "<!-- table: make conformance -->", "<!-- end of table -->"
REPOSITORIES = {
    "flax": "google/flax",
    "hifi-gan": "jik876/hifi-gan",
    "pytorch": "pytorch/pytorch",
    "transformers": "huggingface/transformers",
    "waveglow": "NVIDIA/waveglow",
}
FEW = 6

Misses = Mapping[str, Mapping[str, Exception]]
"""Feature → layer → what went wrong with it."""


def run(implementation: Implementation, features: Sequence[Feature]) -> dict[str, dict]:
    """Every feature on every layer: what went wrong."""
    tried = {f.name: {layer: f.miss(implementation, layer) for layer in f.layers} for f in features}
    return {name: {k: v for k, v in of.items() if v is not None} for name, of in tried.items()}


def table(features: Sequence[Feature], columns: Mapping[str, Misses]) -> str:
    """Markdown; `columns` by the implementations' names."""
    lines = [f"torch {release()}:", "", _row("", *columns), "|---" * (1 + len(columns)) + "|"]
    section = None
    for feature in features:
        if feature.section != section:
            section = feature.section
            lines.append(_row(f"**{section}**", *[""] * len(columns)))
        cells = [cell(feature, misses[feature.name]) for misses in columns.values()]
        lines.append(_row(_linked(feature.says), *cells))
    return "\n".join(lines)


def cell(feature: Feature, missed: Mapping[str, Exception]) -> str:
    """How many layers pass; which, where it depends on the layer."""
    passed = [layer for layer in feature.layers if layer not in missed]
    count = f"{len(passed)}/{len(feature.layers)}"
    if not missed:
        return count
    if not passed:
        return f"**{count}**"
    which = "not " + ", ".join(missed) if len(missed) <= FEW else "only " + ", ".join(passed)
    return f"**{count}**: {which}"


def release() -> str:
    """The torch this runs on, without the build."""
    return torch.__version__.partition("+")[0]


def write(page: Path, text: str) -> None:
    """Put the table between the page's marks."""
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _linked(text: str) -> str:
    def link(match):
        return f"[{match[0]}](https://github.com/{REPOSITORIES[match[1]]}/issues/{match[2]})"

    return re.sub(r"([\w-]+)#(\d+)", link, text)
