"""Color, marker and order of each parameterization, the same in all figures and tables.

The colors are from Okabe and Ito's palette, which color-blind readers can distinguish; those chosen
have a contrast of 3 or more on white and on near-black.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

INK = "#1b1f24"
"""Color of text, axes and the baseline. The page replaces it by its text color."""


@dataclass(frozen=True)
class Style:
    """Name, color and marker of a line or bar."""

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


def style_of(kind: str, index: int = 0, styles: Mapping[str, Style] = STYLES) -> Style:
    """Return the style of a parameterization; for an unknown name, the color of number `index`."""
    if kind in styles:
        return styles[kind]
    similar = list(STYLES.values())[index % len(STYLES)]
    return Style(kind, similar.color, similar.marker)


def ordered(kinds: Iterable[str], styles: Mapping[str, Style] = STYLES) -> list[str]:
    """Sort names: known ones in the order of `styles`, then the others alphabetically."""
    known = list(styles)
    return sorted(set(kinds), key=lambda k: (known.index(k) if k in known else len(known), k))
