"""Log diagnostics during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weightnorm._dtensor import whole
from weightnorm.diagnostics.linter import unwrapped
from weightnorm.inspection import find_normalized
from weightnorm.optimizer import WeightNormOptimizer

Log = Callable[[str, float, int], object]


class Writer(Protocol):
    """TensorBoard's SummaryWriter, or any object with its ``add_scalar``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...


class TrainingMonitor:
    """Log norms, effective steps, dead units and angles every `every` optimizer steps.

    For each normalized weight: ``v_norm`` and ``effective_step``, the means of ‖v‖ and ``|g|/‖v‖``
    over its units; ``dead_units``, their number; and ``angle_change``, the mean angle in radians
    between a unit's weight now and at the previous measurement. In the optimizer form, pass the
    ``WeightNormOptimizer``, which has v and g.

    `log` is a TensorBoard SummaryWriter, or is called as ``log(tag, value, step)``. A measurement
    reads the weights a few times: at the default interval 0.02 % of the training time of a
    convolutional network, and below 1 % if a step takes one or two milliseconds. It reads an
    accelerator once.

    >>> import weightnorm
    >>> layer = weightnorm.weight_norm(nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> logged = {}
    >>> with TrainingMonitor(layer, optimizer, lambda *row: logged.update([row[:2]]), every=1):
    ...     layer(torch.ones(1, 4)).sum().backward()
    ...     optimizer.step()
    >>> sorted(logged)
    ['weight/angle_change', 'weight/dead_units', 'weight/effective_step', 'weight/v_norm']
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
        optimizer = unwrapped(optimizer)
        if every < 1:
            raise ValueError(f"every is {every}; expected 1 step or more")
        self.model, self.every, self.prefix = model, every, prefix
        self._optimizer = optimizer
        self._before = {name: _unit_vectors(rows) for name, rows, _, _ in self._weights()}
        if not self._before:
            raise ValueError(
                "the model has no normalized weight; apply weight_norm_model to it, or train it "
                "with a WeightNormOptimizer"
            )
        self.log: Log = log if callable(log) else log.add_scalar
        self.step = 0
        self._handle: Any = optimizer.register_step_post_hook(self._on_step)

    def _on_step(self, *_: Any) -> None:
        self.step += 1
        if self.step % self.every == 0:
            self.measure()

    @torch.no_grad()
    def measure(self) -> None:
        """Measure and log now; nothing once weight norm was removed."""
        names, found = [], []
        for name, rows, v_norm, g in self._weights():
            now = _unit_vectors(rows)
            distance = (now - self._before.get(name, now)).norm(dim=1)
            row = (v_norm.flatten(), g.flatten().abs(), distance)
            names.append(name)
            found.append(torch.stack([whole(x) for x in row]))  # (3, units)
            self._before[name] = now
        if not found:
            return
        # All weights in one tensor, so that the device is read once.
        norm, length, distance = torch.cat([x.to(found[0].device) for x in found], 1).double().cpu()
        step = torch.where(norm == 0, 0.0, length / norm)
        numbers = torch.stack([norm, step, (step == 0).double(), _angles(distance)])
        for name, units in zip(
            names, numbers.split([row.shape[1] for row in found], 1), strict=True
        ):
            v_norm, effective, dead, angle = units.mean(1).tolist()
            self._log(f"{name}/v_norm", v_norm)
            self._log(f"{name}/effective_step", effective)
            self._log(f"{name}/dead_units", round(dead * units.shape[1]))
            self._log(f"{name}/angle_change", angle)

    @torch.no_grad()
    def _weights(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        """Yield the name, the weight with one row per unit, ‖v‖ and g of each normalized weight."""
        for weight in find_normalized(self.model):
            rows = weight.units.rows(weight.weight()).clone()
            yield weight.path, rows, weight.v_norm(), weight.parts().g
        if isinstance(self._optimizer, WeightNormOptimizer):
            for path, each in self._optimizer.normalized().items():
                v, g = each.parts
                rows = each.units.rows(whole(v)) * whole(g).reshape(-1, 1).sign()
                yield path, rows, each.v_norm, g

    def _log(self, tag: str, value: float) -> None:
        self.log(f"{self.prefix}{tag}", value, self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"step": self.step, "before": dict(self._before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.step, self._before = state["step"], dict(state["before"])

    def close(self) -> None:
        """Stop logging."""
        self._handle.remove()

    def __enter__(self) -> TrainingMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unit_vectors(rows: Tensor) -> Tensor:
    """Return each row divided by its norm; NaN for a zero row."""
    directions: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return directions


def _angles(distance: Tensor) -> Tensor:
    """Return 2·asin(‖a − b‖/2), the angle between unit vectors at this distance; 0 for NaN.

    Unlike acos(a·b) it is exact for small angles.
    """
    return torch.nan_to_num(2 * (distance / 2).clamp_max(1).asin(), 0.0)
