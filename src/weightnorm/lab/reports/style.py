"""One colour, marker and place in line for each parameterization, in all figures and tables.

The colours are Okabe and Ito's, told apart by the colour-blind; those chosen have a contrast of 3
or more on white and on near-black. Markers say it once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

INK = "#1b1f24"
"""Colour of text and axes, and of the baseline. The page replaces it by its own."""


@dataclass(frozen=True)
class Look:
    """How something is called and drawn."""

    name: str
    colour: str
    marker: str


LOOKS = {
    "standard": Look("standard", INK, "o"),
    "batch-norm": Look("batch norm", "#d55e00", "s"),
    "weight-norm": Look("weight norm", "#0072b2", "^"),
    "mean-only-batch-norm": Look("mean-only batch norm", "#cc79a7", "D"),
    "weight-norm-mean-only": Look("weight norm + mean-only batch norm", "#009e73", "v"),
}


def look(kind: str, index: int = 0) -> Look:
    """The look of a parameterization; anything else takes the `index`-th one in turn."""
    if kind in LOOKS:
        return LOOKS[kind]
    turn = list(LOOKS.values())[index % len(LOOKS)]
    return Look(kind, turn.colour, turn.marker)


def ordered(kinds: Iterable[str]) -> list[str]:
    """Known ones in the house's order, then the others by name."""
    known = list(LOOKS)
    return sorted(set(kinds), key=lambda k: (known.index(k) if k in known else len(known), k))
