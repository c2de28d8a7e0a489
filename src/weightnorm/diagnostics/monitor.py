"""A monitor: attach it to a model and its optimizer, and the probes are logged as it trains."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from weightnorm.diagnostics.probes import angles, rows_of, unit_length
from weightnorm.dtensor import whole
from weightnorm.inspection import find_normalized

Log = Callable[[str, float, int], object]


class Writer(Protocol):
    """TensorBoard's SummaryWriter, or anything that takes a scalar as it does."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...


class TrainingMonitor:
    """Log what weight norm does, every so many steps of an optimizer.

    For every normalized weight: the mean of ‖v‖ and of the effective step |g|/‖v‖ over its units,
    how many units are dead, and by how many radians its units have turned since the last time.

    `log` is a TensorBoard SummaryWriter, or called as ``log(tag, value, step)``. A look reads the
    weights a few times: at the default interval 0.02 % of the training of a convolutional network,
    and below 1 % even where a step takes a millisecond or two. On an accelerator it waits once.

    >>> import weightnorm
    >>> layer = weightnorm.weight_norm(nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> seen = {}
    >>> with TrainingMonitor(layer, optimizer, lambda *row: seen.update([row[:2]]), every=1):
    ...     layer(torch.ones(1, 4)).sum().backward()
    ...     optimizer.step()
    >>> sorted(seen)
    ['weight/dead_units', 'weight/effective_step', 'weight/turned', 'weight/v_norm']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        log: Writer | Log,
        *,
        every: int = 100,
        prefix: str = "",
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected 1 step or more")
        self._before = {site.path: unit_length(rows_of(site)) for site in find_normalized(model)}
        if not self._before:
            raise ValueError("the model has no normalized weight to watch; apply weight_norm first")
        self.model, self.every, self.prefix = model, every, prefix
        self.log: Log = log if callable(log) else log.add_scalar
        self.step = 0
        self._handle: Any = optimizer.register_step_post_hook(self._on_step)

    def _on_step(self, *_: Any) -> None:
        self.step += 1
        if self.step % self.every == 0:
            self.measure()

    @torch.no_grad()
    def measure(self) -> None:
        """Log now."""
        names, found = [], []
        for site in find_normalized(self.model):
            now = unit_length(rows_of(site))
            apart = (now - self._before.get(site.path, now)).norm(dim=1)
            row = (site.v_norm().flatten(), site.parts().g.flatten().abs(), apart)
            names.append(site.path)
            found.append(torch.stack([whole(x) for x in row]))  # (3, units)
            self._before[site.path] = now
        together = torch.cat([row.to(found[0].device) for row in found], 1).double().cpu()
        norm, length, apart = together
        step = torch.where(norm == 0, 0.0, length / norm)
        numbers = torch.stack([norm, step, (step == 0).double(), angles(apart)])
        for name, units in zip(
            names, numbers.split([row.shape[1] for row in found], 1), strict=True
        ):
            v_norm, effective, dead, turned = units.mean(1).tolist()
            self._log(f"{name}/v_norm", v_norm)
            self._log(f"{name}/effective_step", effective)
            self._log(f"{name}/dead_units", round(dead * units.shape[1]))
            self._log(f"{name}/turned", turned)

    def _log(self, tag: str, value: float) -> None:
        self.log(f"{self.prefix}{tag}", value, self.step)

    def state_dict(self) -> dict[str, Any]:
        """Where it is, for a checkpoint."""
        return {"step": self.step, "before": dict(self._before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.step, self._before = state["step"], dict(state["before"])

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()

    def __enter__(self) -> TrainingMonitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()
