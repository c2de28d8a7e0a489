"""Result of data-dependent initialization, layer by layer; prints as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerInit:
    """One layer of the report: initialized, or skipped with a reason."""

    name: str
    kind: str
    """Class of the layer."""
    units: int = 0
    mean_before: float = 0.0
    """Mean pre-activation before, averaged over the units that are not dead."""
    std_before: float = 0.0
    """Standard deviation before, averaged likewise."""
    mean_after: float = 0.0
    """Mean pre-activation after, as measured, averaged likewise."""
    std_after: float = 0.0
    """Standard deviation after, as measured, averaged likewise."""
    target_std: float = 1.0
    dead: tuple[int, ...] = ()
    """Units that were constant on the batch and left as they were."""
    skipped: str = ""
    """Why the layer was left as it was; empty if it was initialized."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table, as strings."""
        if self.skipped:
            return (self.name, self.kind, *[""] * 6, f"skipped: {self.skipped}")
        dead = f"{len(self.dead)} dead: {_shortened(self.dead)}" if self.dead else ""
        before = f"{self.mean_before:.3g}", f"{self.std_before:.3g}"
        mean_after = round(self.mean_after, 3) + 0.0  # no -0
        after = f"{mean_after:.3g}", f"{self.std_after:.3g}"
        return (
            self.name, self.kind, str(self.units), *before, *after, f"{self.target_std:g}", dead
        )  # fmt: skip


@dataclass(frozen=True)
class InitReport:
    """What was done to each layer, in the order in which they ran, then those that did not run."""

    layers: tuple[LayerInit, ...]

    @property
    def done(self) -> tuple[LayerInit, ...]:
        """The layers that were initialized."""
        return tuple(layer for layer in self.layers if not layer.skipped)

    @property
    def skipped(self) -> tuple[LayerInit, ...]:
        """The layers that were left as they were."""
        return tuple(layer for layer in self.layers if layer.skipped)

    @property
    def dead(self) -> dict[str, tuple[int, ...]]:
        """The dead units of each layer that has any."""
        return {layer.name: layer.dead for layer in self.layers if layer.dead}

    def __iter__(self) -> Iterator[LayerInit]:
        return iter(self.layers)

    def __str__(self) -> str:
        head = ("layer", "kind", "units", "mean", "std", "mean after", "std after", "target", "")
        rows = [head, *(layer.cells for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        left = (0, 1, 8)
        lines = [
            "  ".join(
                cell.ljust(w) if i in left else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])


def _shortened(units: tuple[int, ...], most: int = 8) -> str:
    shown = ", ".join(map(str, units[:most]))
    return f"{shown}, …" if len(units) > most else shown
