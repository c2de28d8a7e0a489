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
    def _columns(self) -> str:
        """The columns of the table after name and class."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        after = round(self.mean_after, 3) + 0.0  # not -0
        moments = (self.mean_before, self.std_before, after, self.std_after, self.target_std)
        columns = f"{self.units:>5}" + "".join(f"{x:>11.3g}" for x in moments)
        if self.dead:
            shown = ", ".join(map(str, self.dead[:8])) + ", …" * (len(self.dead) > 8)
            columns += f"  {len(self.dead)} dead: {shown}"
        return columns if self.centers else f"{columns}  no bias: the mean stays"


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
        columns = ("mean", "std", "mean after", "std after", "target")
        head = "units" + "".join(f"{column:>11}" for column in columns)
        rows = [("layer", "kind", head), *((row.name, row.kind, row._columns) for row in self)]
        name, kind = (max(len(row[i]) for row in rows) for i in (0, 1))
        lines = [f"{row[0]:<{name}}  {row[1]:<{kind}}  {row[2]}" for row in rows]
        return "\n".join([lines[0], "─" * len(lines[0]), *lines[1:]])
