"""g and ‖v‖ of all weights on a device, and the passes between w and v of a step.

A step is `DeviceUnits.to_directions`, the inner optimizer's step, and `DeviceUnits.to_weights`.

Note [one flat vector]
    The numbers per unit of all weights on a device lie in one vector, so arithmetic on them costs a
    few kernel launches per step, not per weight. `InPlaceWeight.g` and `.norm` are views of it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weightnorm import _kernels
from weightnorm._dtensor import local
from weightnorm._in_place import InPlaceWeight, set_data
from weightnorm._kernels import step
from weightnorm._torch_private import foreach_add_, foreach_mul_, foreach_sub_


class DeviceUnits:
    """Weights on one device, of one dtype and split over the same ranks.

    See Note [one flat vector].

    Args:
        weights: the weights.
        log: whether g is kept as s = log g.
    """

    def __init__(self, weights: Sequence[InPlaceWeight], log: bool) -> None:
        self.weights, self.log, self.cut = weights, log, weights[0].cut
        self.graded: list[int] = []
        """Numbers of the weights with a gradient, as `find_gradients` found them."""
        self._are_v: list[int] = []
        self._idle: list[tuple[int, Tensor, Tensor]] = []
        """Weights without gradient that hold v: number, w, v."""
        self._join()
        self._was_zero = torch.zeros_like(self.g, dtype=torch.bool)
        """Rows that were zero when `to_directions` read them."""

    def _join(self) -> None:
        """Put the numbers per unit of all weights into vectors."""
        first = self.weights[0].x
        g, norm = (
            [local(t.detach()).reshape(-1, 1).to(first) for t in tensors]
            for tensors in ([w.g for w in self.weights], [w.norm for w in self.weights])
        )
        self.counts = [len(column) for column in g]
        self.g, self.norm = torch.cat(g), torch.cat(norm)
        columns = zip(self.g.split(self.counts), self.norm.split(self.counts), strict=True)
        for weight, (g_here, norm_here) in zip(self.weights, columns, strict=True):
            set_data(weight.g, g_here.view(local(weight.g).shape))
            weight.norm = weight.as_units(norm_here)
        self._listed: dict[tuple[int, ...], step.Weights] = {}

    def bind_moved(self) -> None:
        """Follow weights to other memory on the same device, in the middle of a step too."""
        if any(weight.moved() for weight in self.weights):
            for weight in self.weights:
                weight.bind()
            self._join()

    def find_gradients(self) -> None:
        """Find the weights that have a gradient; raise if one is sparse."""
        self.graded = [i for i, weight in enumerate(self.weights) if weight.has_grad()]

    def _list(self, numbers: Sequence[int]) -> step.Weights:
        """Return some of the weights for a pass over them."""
        key = tuple(numbers)
        if key not in self._listed:
            if len(self._listed) >= 8:  # other weights have gradients in every step
                self._listed.clear()
            weights = [self.weights[i] for i in numbers]
            starts = [0, *itertools.accumulate(self.counts)]
            self._listed[key] = step.Weights(
                [weight.x for weight in weights],
                [weight.x_units for weight in weights],
                [weight.narrow for weight in weights if weight.narrow is not None],
                [starts[i] for i in numbers],
                [weight.fan_in() for weight in weights],
            )
        return self._listed[key]

    def _launches(self, w: step.Weights) -> bool:
        """Return whether a pass is a launch of one kernel, see _kernels/triton_step.py."""
        x = w.x[0]
        if not (_kernels.on_accelerator(x) and _kernels.is_differentiated_by_autograd(x)):
            return False
        from weightnorm._kernels import triton_step

        return triton_step.serves(w)

    def to_directions(
        self, *, train_g: bool, project: bool, every: bool = False, gradients: bool = True
    ) -> None:
        """Overwrite w by v, and hand ∇v and ∇g to the inner optimizer's parameters.

        Args:
            train_g: whether ∇g is set.
            project: False for ∇v = (g/‖v‖)∇w.
            every: True for weights without gradient too. `to_weights` restores to the bit those
                that nothing has moved.
            gradients: False to leave the gradients.
        """
        numbers = [*range(len(self.weights))] if every else self.graded
        if not numbers:
            return
        w, weights = self._list(numbers), [self.weights[i] for i in numbers]
        tracks = numbers if every and gradients else []
        idle = [i for i in tracks if not self.weights[i].has_grad()]
        before = [self.weights[i].x.clone() for i in idle]
        grad = [weight.take_gradient() if gradients else None for weight in weights]
        grad_g = torch.empty_like(self.g)
        launches = self._launches(w) and all(slope is not None for slope in grad)
        sums = self._sums(w, w.narrow, grad, launches)
        if launches:
            grad_w = grad
            grad = [torch.empty_like(x) for x in w.x] if w.narrow else grad
            torch.ops.weightnorm.to_directions_(
                w.x, w.narrow, grad_w, grad, self.g, self.norm, grad_g, self._was_zero, sums,
                w.first, w.fan_in, self.log, project,
            )  # fmt: skip
        else:
            step.to_directions(
                w, grad, self.g, self.norm, grad_g, self._was_zero, sums,
                log=self.log, project=project,
            )  # fmt: skip
        self._are_v = numbers
        copies = [self.weights[i].x.clone() for i in idle]
        self._idle = list(zip(idle, before, copies, strict=True))
        columns = grad_g.split(self.counts)
        for i, slope in zip(numbers, grad, strict=True):
            if slope is not None:
                self.weights[i].set_gradients(slope, columns[i] if train_g else None)

    def to_weights(self) -> None:
        """Overwrite v by w = g·v/‖v‖ (eq. 2), and keep the new ‖v‖."""
        kept = set()
        for i, before, direction in self._idle:
            if torch.equal(self.weights[i].x, direction):
                self.weights[i].x.copy_(before)
                kept.add(i)
        numbers = [i for i in self._are_v if i not in kept]
        self._are_v, self._idle = [], []
        if not numbers:
            return
        w = self._list(numbers)
        launches = self._launches(w)
        sums = self._sums(w, [], w.x, launches)
        squares = None if sums is None else sums[:, :1].contiguous()
        if launches:
            torch.ops.weightnorm.to_weights_(
                w.x, w.narrow, self.g, self.norm, self._was_zero, squares, w.first, self.log
            )
        else:
            step.to_weights(w, self.g, self.norm, self._was_zero, squares, log=self.log)

    def _sums(
        self,
        w: step.Weights,
        narrow: list[Tensor],
        grad: Sequence[Tensor | None],
        launches: bool,
    ) -> Tensor | None:
        """Return Σw², Σ∇w·w and Σ∇w over all ranks, see Note [units split across ranks]."""
        if not self.cut:
            return None
        sums = self.g.new_zeros(len(self.g), 3)
        if launches:
            torch.ops.weightnorm.unit_sums_(w.x, narrow, grad, w.first, sums)
        else:
            step.unit_sums(w, narrow, grad, sums)
        for group in self.cut:
            torch.distributed.all_reduce(sums, group=group)
        return sums

    def shrink(self, factors: Sequence[float]) -> None:
        """Multiply g of the weights with a gradient by a factor each."""
        if all(factor == 1 for factor in factors):
            return
        columns = self.g.split(self.counts)
        active = [columns[i] for i in self.graded]
        if not self.log:
            foreach_mul_(active, factors)
            return
        if min(factors) <= 0:
            raise ValueError(
                f"1 − lr·weight_decay is {min(factors):g}, but a log-scale cannot represent g ≤ 0; "
                "lower the learning rate or the weight decay"
            )
        foreach_add_(active, [math.log(factor) for factor in factors])

    def copies(self) -> list[Tensor]:
        """Return copies of the weights with a gradient."""
        return [self.weights[i].x.clone() for i in self.graded]

    def normalize_update(self, before: list[Tensor], rates: Sequence[Any]) -> None:
        """Rescale v − `before` to the length lr·‖v‖, unit by unit."""
        if not before:
            return
        w = self._list(self.graded)
        foreach_sub_(w.x, before)
        sums = self._sums(w, [], w.x, launches=False)
        length = w.lengths() if sums is None else sums[w.columns, :1].sqrt()
        factor = (self.norm[w.columns] / length).masked_fill_(length == 0, 0.0)
        for part, rate in zip(w.split(factor), rates, strict=True):
            part.mul_(rate)
        w.scale(factor)
        foreach_add_(w.x, before)


class NormSchedule:
    """What ‖v‖ starts with, and what it is moved to after each step.

    Args:
        v_norm: a norm; a function of the weight's name and the number of steps; or None for ‖w‖ at
            the start and ‖v‖ before the step.
        retract: how far it is moved there, from 0 to 1.
    """

    def __init__(self, v_norm: float | Callable[[str, int], float] | None, retract: float) -> None:
        self.v_norm, self.retract = v_norm, float(retract)

    def at(self, name: str, steps: int) -> float | None:
        """Return `v_norm` for a weight; raise if it cannot be a norm."""
        norm = self.v_norm(name, steps) if callable(self.v_norm) else self.v_norm
        if norm is not None and not 0 < norm < math.inf:
            raise ValueError(
                f"v_norm is {norm!r} for {name} after {steps} steps; expected a positive number"
            )
        return norm

    @torch.no_grad()
    def start(self, weights: Iterable[InPlaceWeight]) -> None:
        """Set ‖v‖ as it is before the first step."""
        for weight in weights:
            weight.start(self.at(weight.name, 0))

    def targets(self, devices: Sequence[DeviceUnits], steps: int) -> list[Tensor]:
        """Return the ‖v‖ that this step moves to, by device; empty without retraction."""
        targets = [units.norm.clone() for units in devices] if self.retract else []
        for units, target in zip(devices, targets, strict=False):
            for weight, column in zip(units.weights, target.split(units.counts), strict=True):
                if (norm := self.at(weight.name, steps)) is not None:
                    column.fill_(norm)
        return targets

    def move(self, devices: Sequence[DeviceUnits], targets: Sequence[Tensor]) -> None:
        """Move ‖v‖ towards its targets."""
        for units, target in zip(devices, targets, strict=False):
            units.norm.lerp_(target, self.retract) if self.retract < 1 else units.norm.copy_(target)


def units_by_device(weights: Iterable[InPlaceWeight], log: bool) -> list[DeviceUnits]:
    """Return one `DeviceUnits` for each device, dtype and set of ranks."""
    found: dict[tuple[Any, ...], list[InPlaceWeight]] = defaultdict(list)
    for weight in weights:
        found[weight.x.device, weight.x.dtype, weight.weight.dtype, weight.cut].append(weight)
    return [DeviceUnits(each, log) for each in found.values()]
