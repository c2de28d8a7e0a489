"""What data-dependent initialization did, layer by layer, as a value that prints as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerInit:
    """One layer of the report: initialized, or skipped with a reason."""

    name: str
    kind: str
    units: int = 0
    mean_before: float = 0.0
    """Mean pre-activation before the pass, averaged over the units."""
    std_before: float = 0.0
    """Standard deviation before the pass, averaged over the units."""
    target_std: float = 1.0
    dead: tuple[int, ...] = ()
    """Units that were constant on the batch: left as they were."""
    skipped: str = ""
    """Why the layer was left alone; empty if it was initialized."""

    @property
    def cells(self) -> tuple[str, ...]:
        if self.skipped:
            return (self.name, self.kind, "", "", "", "", f"skipped: {self.skipped}")
        dead = f"{len(self.dead)} dead: {_shortened(self.dead)}" if self.dead else ""
        mean, std = f"{self.mean_before:.3g}", f"{self.std_before:.3g}"
        return (self.name, self.kind, str(self.units), mean, std, f"{self.target_std:g}", dead)


@dataclass(frozen=True)
class InitReport:
    """What happened to each layer, in the order they ran, then the skipped ones."""

    layers: tuple[LayerInit, ...]

    @property
    def done(self) -> tuple[LayerInit, ...]:
        return tuple(layer for layer in self.layers if not layer.skipped)

    @property
    def skipped(self) -> tuple[LayerInit, ...]:
        return tuple(layer for layer in self.layers if layer.skipped)

    @property
    def dead(self) -> dict[str, tuple[int, ...]]:
        """The dead units of each layer that has any."""
        return {layer.name: layer.dead for layer in self.layers if layer.dead}

    def __iter__(self) -> Iterator[LayerInit]:
        return iter(self.layers)

    def __str__(self) -> str:
        head = ("layer", "kind", "units", "mean before", "std before", "target std", "note")
        rows = [head, *(layer.cells for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        left = (0, 1, 6)
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
