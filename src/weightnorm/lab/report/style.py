"""Names, colors and markers of methods, and how figures look.

The colors are from Okabe and Ito's palette, which color-blind readers can distinguish; those chosen
have a contrast of 3 or more on white.
"""

from __future__ import annotations

import re
from typing import NamedTuple

INK = "#1b1f24"
"""Text, axes, and the standard parameterization."""


class Style(NamedTuple):
    """Name, color and marker of a method."""

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
MATPLOTLIB: dict[str, object] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "weightnorm",  # the same figure gives the same bytes
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "font.size": 11,
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}
LONGEST = 150
"""Characters of a slug; file systems allow 255."""


def slug(text: str) -> str:
    """Convert text to a file name or anchor.

    >>> slug("classify cpu+epochs=3 ‖v‖")
    'classify-cpu-epochs-3-v'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())[:LONGEST].strip("-.") or "unnamed"
