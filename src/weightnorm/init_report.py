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
    centers: bool = True
    """Whether the layer has a bias, or batch normalization, that sets the mean to 0."""
    skipped: str = ""
    """Why the layer was left as it was; empty if it was initialized."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table, as strings; of a skipped layer only name, class and reason."""
        if self.skipped:
            return self.name, self.kind, f"skipped: {self.skipped}"
        notes = [f"{len(self.dead)} dead: {_shortened(self.dead)}"] if self.dead else []
        notes += [] if self.centers else ["no bias: the mean stays"]
        after = round(self.mean_after, 3) + 0.0  # not -0
        numbers = (self.mean_before, self.std_before, after, self.std_after, self.target_std)
        cells = (self.name, self.kind, str(self.units), *(f"{x:.3g}" for x in numbers))
        return *cells, "; ".join(notes)


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
        full = [row for row in rows if len(row) == len(head)]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        widths += [max(len(row[i]) for row in full) for i in range(2, len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if i < 2 or i == len(row) - 1 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=False))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])


def _shortened(units: tuple[int, ...], most: int = 8) -> str:
    shown = ", ".join(map(str, units[:most]))
    return f"{shown}, …" if len(units) > most else shown
