"""The results as a Markdown table: one row per feature, one column per implementation."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from conformance.feature import Feature
from conformance.implementation import Implementation

BEGIN, END = "<!-- table: make conformance -->", "<!-- end of conformance -->"
REPOSITORIES = {
    "flax": "google/flax",
    "hifi-gan": "jik876/hifi-gan",
    "pytorch": "pytorch/pytorch",
    "transformers": "huggingface/transformers",
    "waveglow": "NVIDIA/waveglow",
}

Failures = Mapping[str, Mapping[str, Exception]]
"""Feature → layer type → the exception."""


def run(implementation: Implementation, features: Sequence[Feature]) -> dict[str, dict]:
    """Test every feature on every layer type; return the failures."""
    results = {
        f.name: {layer: f.failure(implementation, layer) for layer in f.layers} for f in features
    }
    return {name: {k: v for k, v in of.items() if v is not None} for name, of in results.items()}


def table(features: Sequence[Feature], columns: Mapping[str, Failures]) -> str:
    """Format a Markdown table; `columns` maps the name of an implementation to its failures."""
    lines = [f"torch {release()}:", "", _row("", *columns), "|---" * (1 + len(columns)) + "|"]
    section = None
    for feature in features:
        if feature.section != section:
            section = feature.section
            lines.append(_row(f"**{section}**", *[""] * len(columns)))
        cells = [cell(feature, failures[feature.name]) for failures in columns.values()]
        lines.append(_row(_linked(feature.description), *cells))
    return "\n".join(lines)


def cell(feature: Feature, failed: Mapping[str, Exception]) -> str:
    """Format how many layer types pass, in bold if some do not."""
    count = f"{len(feature.layers) - len(failed)}/{len(feature.layers)}"
    return f"**{count}**" if failed else count


def release() -> str:
    """Return the version of torch without its build tag."""
    return torch.__version__.partition("+")[0]


def write(page: Path, text: str) -> None:
    """Write the table between the marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _linked(text: str) -> str:
    def link(match):
        return f"[{match[0]}](https://github.com/{REPOSITORIES[match[1]]}/issues/{match[2]})"

    return re.sub(r"([\w-]+)#(\d+)", link, text)
