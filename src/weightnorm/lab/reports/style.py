"""One color, marker and place in line for each parameterization, in all figures and tables.

The colors are Okabe and Ito's, told apart by the color-blind; those chosen have a contrast of 3
or more on white and on near-black. Markers say it once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

INK = "#1b1f24"
"""Colour of text and axes, and of the baseline. The page replaces it by its own."""


@dataclass(frozen=True)
class Style:
    """How something is called and drawn."""

    name: str
    color: str
    marker: str


STYLES = {
    "standard": Style("standard", INK, "o"),
    "batch-norm": Style("batch norm", "#d55e00", "s"),
    "weight-norm": Style("weight norm", "#0072b2", "^"),
    "mean-only-batch-norm": Style("mean-only batch norm", "#cc79a7", "D"),
    "weight-norm-mean-only": Style("weight norm + mean-only batch norm", "#009e73", "v"),
}


def style_of(kind: str, index: int = 0) -> Style:
    """The look of a parameterization; anything else takes the `index`-th one in turn."""
    if kind in STYLES:
        return STYLES[kind]
    turn = list(STYLES.values())[index % len(STYLES)]
    return Style(kind, turn.color, turn.marker)


def ordered(kinds: Iterable[str]) -> list[str]:
    """Known ones in the house's order, then the others by name."""
    known = list(STYLES)
    return sorted(set(kinds), key=lambda k: (known.index(k) if k in known else len(known), k))
