"""g and ‖v‖ of all weights on a device, and the passes between w and v (eqs. 2 and 3).

An optimizer step is `DeviceUnits.to_directions`, the inner optimizer's step, and
`DeviceUnits.to_weights`. What is read and written: the weights (`InPlaceWeight.x`), their
gradients, and the vectors `g` and `norm`.

Note [one flat vector]
    The numbers per unit of all weights on a device lie in one vector, so arithmetic on them costs a
    few kernel launches per step, not per weight. `InPlaceWeight.g` and `.norm` are views of it.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weightnorm import _kernels
from weightnorm._dtensor import local
from weightnorm._in_place import (
    InPlaceWeight,
    overflow_is_nan,
    read_lengths,
    set_data,
)
from weightnorm._torch_private import (
    foreach_add_,
    foreach_mul_,
    foreach_sub_,
    fused_weight_norm_backward,
)
from weightnorm._units import EPS, SHORTEST, Units, agree


class UnitBatch:
    """Weights that are processed together, and their numbers per unit."""

    def __init__(self, units: DeviceUnits, numbers: list[int], start: int) -> None:
        self.numbers, self.weights = numbers, [units.weights[i] for i in numbers]
        self.xs = [weight.x for weight in self.weights]
        """The weights as tensors that numbers per unit broadcast to."""
        self.counts = [weight.count for weight in self.weights]
        part = slice(start, start + sum(self.counts))
        self.g, self.norm, self.was_zero = units.g[part], units.norm[part], units.was_zero[part]
        self.cut = [i for i, weight in enumerate(self.weights) if weight.cut]
        self.rows = self.weights[0].rows and not self.cut
        x = self.xs[0]
        self.on_cpu = x.device.type == "cpu"
        self.is_fused = (
            self.rows
            and x.device.type in ("cpu", "cuda")
            and x.dtype in (torch.float32, torch.float64)
            and all(x.numel() for x in self.xs)
        )

    def split(self, column: Tensor) -> Sequence[Tensor]:
        """Return a column's part for each weight."""
        return [column] if len(self.counts) == 1 else column.split_with_sizes(self.counts)

    def spread(self, column: Tensor) -> list[Tensor]:
        """Return a column's part for each weight, so that it broadcasts to it."""
        parts = self.split(column)
        if self.rows:
            return list(parts)
        return [weight.spread(part) for weight, part in zip(self.weights, parts, strict=True)]

    def norms(self) -> Tensor:
        """Return the length of every unit; NaN where the sum of its squares overflows."""
        norm = torch.empty_like(self.norm)
        columns = self.split(norm)
        if self.rows:
            for x, column in zip(self.xs, columns, strict=True):
                torch.linalg.vector_norm(x, 2, 1, True, out=column)
            return overflow_is_nan(norm)
        for weight, column in zip(self.weights, columns, strict=True):
            column.copy_(weight.sum(weight.x.square()))
        self.sum_over_ranks(columns)
        return overflow_is_nan(norm.sqrt_())

    def sum_over_ranks(self, columns: Sequence[Tensor]) -> None:
        """Sum over the ranks that a unit lies on, see Note [units split across ranks]."""
        by_groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for i in self.cut:
            by_groups[self.weights[i].cut].append(columns[i])
        for groups, parts in by_groups.items():
            sum_columns(parts, groups)

    def scale(self, factor: Tensor) -> None:
        """Multiply every unit by its factor."""
        foreach_mul_(self.xs, self.spread(factor))

    def may_hold_other(self, mask: Tensor) -> bool:
        """Return whether `mask` may contain False: always on accelerators, to avoid a sync."""
        return not self.on_cpu or torch.compiler.is_compiling() or not bool(mask.all())


class Listed(NamedTuple):
    """Weights as the operators of _kernels/step.py take them."""

    weights: list[InPlaceWeight]
    w: list[Tensor]
    narrow: list[Tensor]
    """The model's weights if they are bfloat16 or float16, else empty."""
    blocks: list[int]
    first: list[int]
    """Where the numbers of each weight begin in the flat vectors."""
    fan_in: list[int]

    def gradients(self) -> list[Tensor]:
        """Return the gradients, laid out as the weights, in the type of the model's."""
        found = []
        for i, weight in enumerate(self.weights):
            grad = weight.narrow_grad() if self.narrow else weight.local_grad()
            found.append(weight.unit_view(grad) if weight.rows else grad)
            assert found[i].shape == self.w[i].shape
        return found


class DeviceUnits:
    """Numbers per unit of all weights on one device, see Note [one flat vector]."""

    def __init__(self, weights: Sequence[InPlaceWeight], log: bool) -> None:
        # Weights of a batch have to be neighbors.
        self.weights = sorted(weights, key=lambda w: (bool(w.cut), not w.rows))
        self.log = log
        first = self.weights[0].stored
        self.counts = [w.count for w in self.weights]
        self.g, self.norm = (
            torch.cat([local(t.detach()).reshape(-1, 1).to(first) for t in tensors])
            for tensors in ([w.g for w in self.weights], [w.norm for w in self.weights])
        )
        self.was_zero = torch.zeros_like(self.g, dtype=torch.bool)
        """Rows that were zero when `to_directions` read them."""
        for weight, g, norm in zip(
            self.weights, self.g.split(self.counts), self.norm.split(self.counts), strict=True
        ):
            set_data(weight.g, g.view(local(weight.g).shape))
            weight.norm = weight.as_units(norm)
        self._batches: dict[tuple[int, ...], list[UnitBatch]] = {}
        self._listed: dict[tuple[int, ...], Listed | None] = {}

    def listed(self, active: Sequence[int]) -> Listed | None:
        """Return the active weights as our kernels take them; None if they do not serve."""
        key, x = tuple(active), self.weights[0].stored
        if not (_kernels.on_accelerator(x) and _kernels.is_differentiated_by_autograd(x)):
            return None
        import weightnorm._kernels.step  # noqa: F401 (defines the operators)

        if key not in self._listed:
            if len(self._listed) >= 8:
                self._listed.clear()
            self._listed[key] = self._list([self.weights[i] for i in active], active)
        return self._listed[key]

    def _list(self, weights: list[InPlaceWeight], active: Sequence[int]) -> Listed | None:
        from weightnorm._kernels.triton import blocks_of

        w: list[Tensor] = []
        blocks: list[int] = []
        for weight in weights:
            x = weight.x if weight.rows else weight.stored
            mine = blocks_of(x.shape, Units() if weight.rows else weight.units)
            if mine is None or weight.index is not None or not x.is_contiguous() or not x.numel():
                return None
            w.append(x)
            blocks += mine
        narrow = []
        if weights[0].copy is not None:
            plain = [local(weight.weight.detach()) for weight in weights]
            narrow = [
                weight.unit_view(x) if weight.rows else x
                for weight, x in zip(weights, plain, strict=True)
            ]
        starts = [0, *itertools.accumulate(self.counts)]
        fan_in = [weight.fan_in() for weight in weights]
        return Listed(weights, w, narrow, blocks, [starts[i] for i in active], fan_in)

    def _sums(self, listed: Listed, grad: list[Tensor]) -> Tensor | None:
        """Return Σw², Σ∇w·w and Σ∇w of every unit if some lie on several ranks, else None."""
        if not any(weight.cut for weight in listed.weights):
            return None
        sums = self.g.new_zeros(len(self.g), 3)
        torch.ops.weightnorm.unit_sums_(listed.w, grad, listed.blocks, listed.first, sums)
        parts: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        for weight, first in zip(listed.weights, listed.first, strict=True):
            if weight.cut:
                parts[weight.cut].append(sums[first : first + weight.count])
        for groups, columns in parts.items():
            sum_columns(columns, groups)
        return sums

    def batches(self, active: Sequence[int]) -> list[UnitBatch]:
        """Return the active weights in batches."""
        key = tuple(active)
        if key not in self._batches:
            if len(self._batches) >= 8:  # other weights have gradients in every step
                self._batches.clear()
            self._batches[key] = list(self._find_batches(active))
        return self._batches[key]

    def _find_batches(self, active: Sequence[int]) -> Iterator[UnitBatch]:
        starts = [0, *itertools.accumulate(self.counts)]
        numbers: list[int] = []
        for i in active:
            weight, last = self.weights[i], self.weights[numbers[-1]] if numbers else None
            if last is not None and (
                numbers[-1] != i - 1
                or (weight.rows, bool(weight.cut)) != (last.rows, bool(last.cut))
            ):
                yield UnitBatch(self, numbers, starts[numbers[0]])
                numbers = []
            numbers.append(i)
        if numbers:
            yield UnitBatch(self, numbers, starts[numbers[0]])

    def lengths(self, batch: UnitBatch) -> Tensor:
        """Return g, signed; eˢ for a log-scale."""
        return batch.g.exp() if self.log else batch.g

    def _read_lengths(self, batch: UnitBatch) -> tuple[Tensor, Tensor]:
        """Return (g, ±‖w‖), after taking care of weights that were written to and zero rows."""
        length = batch.norms()
        g = self.lengths(batch)
        same = agree(g, length)
        if not batch.may_hold_other(same):
            batch.was_zero.zero_()
            return g, torch.copysign(length, g)
        g, signed, zero = read_lengths(g, length)
        if self.log:
            tiny = torch.finfo(g.dtype).tiny
            batch.g.copy_(torch.where(same, batch.g, length.clamp_min(tiny).log()))
        else:
            batch.g.copy_(g)
        # A zero row takes the diagonal direction: as if ‖w‖ were 1, with g = 0.
        for weight, mask in zip(batch.weights, batch.spread(zero), strict=True):
            weight.x.masked_fill_(mask, weight.fan_in() ** -0.5)
        batch.was_zero.copy_(zero)
        return g, signed

    def to_directions(
        self,
        active: Sequence[int],
        graded: Sequence[int],
        is_v: list[int],
        *,
        train_g: bool,
        project: bool,
    ) -> None:
        """Overwrite w by v, and replace ∇w by ∇v in those weights that are `graded`; set their ∇g.

        With g signed and L = ±‖w‖: v = w·‖v‖/L, ∇g = ∇w·w/L, ∇v = (g/‖v‖)(∇w − (∇g/L)w).

        Args:
            active, graded: numbers of weights.
            is_v: gets the numbers of those that hold v, batch by batch, so that `to_weights` can
                undo what an exception interrupts.
            train_g: whether ∇g is set.
            project: False for ∇v = (g/‖v‖)∇w.
        """
        listed = self.listed(active) if [*active] == [*graded] else None
        if listed is not None:
            self._launch_to_directions(listed, train_g=train_g, project=project)
            is_v += active
            return
        for i in active:
            self.weights[i].read_copy()
        has_gradient = {*graded}
        for batch in self.batches(active):
            g, length = self._read_lengths(batch)
            factor = batch.norm / length
            which = [k for k, i in enumerate(batch.numbers) if i in has_gradient]
            if which:
                slope = g if self.log else None  # for a log-scale ∇s = g·∇g
                if project and batch.is_fused and not torch.compiler.is_compiling():
                    _project_fused(batch, which, g / factor, length, slope, train_g)
                else:
                    _project(batch, which, g, length, slope, train_g, project)
            batch.scale(factor)
            is_v += batch.numbers

    def _launch_to_directions(self, listed: Listed, *, train_g: bool, project: bool) -> None:
        grad, grad_g = listed.gradients(), torch.empty_like(self.g)
        grad_v = [torch.empty_like(x) for x in listed.w] if listed.narrow else grad
        torch.ops.weightnorm.to_directions_(
            listed.w, listed.narrow, grad, grad_v, self.g, self.norm, grad_g, self.was_zero,
            self._sums(listed, grad), listed.blocks, listed.first, listed.fan_in, self.log, project,
        )  # fmt: skip
        for weight, slope, first in zip(listed.weights, grad_v, listed.first, strict=True):
            whole = slope.as_strided(weight.stored.shape, weight.stored.stride())
            part = grad_g[first : first + weight.count]
            weight.set_gradients(whole, part if train_g else None)

    def rescale(self, active: Sequence[int]) -> None:
        """Give weights, whatever their length is, the length g; ‖v‖ stays."""
        g = self.g.clone()
        self.to_directions(active, (), [], train_g=False, project=False)
        self.g.copy_(g)
        norm = self.norm.clone()
        self.to_weights(active)
        self.norm.copy_(norm)

    def shrink(self, active: Sequence[int], factors: Sequence[float]) -> None:
        """Multiply g of the active weights: in one call where neighbors have the same factor."""
        starts = [0, *itertools.accumulate(self.counts)]
        runs: list[tuple[int, int, float]] = []
        for i, factor in zip(active, factors, strict=True):
            if runs and runs[-1][1:] == (starts[i], factor):
                runs[-1] = runs[-1][0], starts[i + 1], factor
            else:
                runs.append((starts[i], starts[i + 1], factor))
        for start, stop, factor in runs:
            g = self.g[start:stop]
            if not self.log:
                g.mul_(factor)
            elif factor > 0:
                g.add_(math.log(factor))
            else:
                raise ValueError(
                    f"1 − lr·weight_decay is {factor:g}, but a log-scale cannot represent g ≤ 0; "
                    "lower the learning rate or the weight decay"
                )

    def copies(self, active: Sequence[int]) -> list[Tensor]:
        """Return copies of the active weights."""
        return [self.weights[i].x.clone() for i in active]

    def normalize_update(
        self, active: Sequence[int], before: list[Tensor], rates: Sequence[Any]
    ) -> None:
        """Rescale v − `before` to the length lr·‖v‖, unit by unit."""
        if not active:
            return
        now = [self.weights[i].x for i in active]
        foreach_sub_(now, before)
        for batch in self.batches(active):
            step = batch.norms()
            factor = (batch.norm / step).masked_fill_(step == 0, 0.0)
            for i, column in zip(batch.numbers, factor.split(batch.counts), strict=True):
                column.mul_(rates[i])
            batch.scale(factor)
        foreach_add_(now, before)

    def to_weights(self, active: Sequence[int]) -> None:
        """Overwrite v by w = g·v/‖v‖ (eq. 2), and keep the new ‖v‖."""
        if (listed := self.listed(active)) is not None:
            sums = self._sums(listed, listed.w)
            torch.ops.weightnorm.to_weights_(
                listed.w, listed.narrow, self.g, self.norm, self.was_zero,
                None if sums is None else sums[:, 0].contiguous(),
                listed.blocks, listed.first, self.log,
            )  # fmt: skip
            return
        for batch in self.batches(active):
            norm, g = batch.norms(), self.lengths(batch)
            size = g.abs()
            factor = g / norm
            if batch.may_hold_other(torch.minimum(norm, size) > SHORTEST):
                zero = norm <= EPS  # not NaN
                # See Note [short rows keep their direction].
                factor = torch.copysign(size.clamp_min_(SHORTEST), g) / norm
                factor.masked_fill_(zero | (batch.was_zero & (g == 0)), 0.0)
                norm = torch.where(zero, batch.norm, norm)
            batch.scale(factor)
            batch.norm.copy_(norm)
        for i in active:
            self.weights[i].write_copy()


def _project_fused(
    batch: UnitBatch,
    which: Sequence[int],
    gain: Tensor,
    length: Tensor,
    slope: Tensor | None,
    train_g: bool,
) -> None:
    """Replace ∇w by ∇v and set ∇g, by torch's backward pass with w for v and g·L/‖v‖ for g."""
    gains, lengths = batch.split(gain), batch.split(length)
    slopes = None if slope is None else batch.split(slope)
    for k in which:
        weight = batch.weights[k]
        grad = weight.local_grad()
        grad_v, grad_g = fused_weight_norm_backward(
            weight.unit_view(grad), batch.xs[k], gains[k], lengths[k], 0
        )
        if slopes is not None:
            grad_g.mul_(slopes[k])
        grad = weight.replacement(grad, grad_v)
        weight.set_gradients(grad, grad_g if train_g else None)
        del grad, grad_v  # or they would keep memory during the next weight


def _project(
    batch: UnitBatch,
    which: Sequence[int],
    g: Tensor,
    length: Tensor,
    slope: Tensor | None,
    train_g: bool,
    project: bool,
) -> None:
    """Overwrite ∇w by ∇v, or by (g/‖v‖)∇w without `project`; set ∇g."""
    gradients = {k: batch.weights[k].local_grad() for k in which}
    views = {k: batch.weights[k].unit_view(grad) for k, grad in gradients.items()}
    dot = torch.zeros_like(g)
    if project or train_g:
        parts = batch.split(dot)
        for k, grad in views.items():
            parts[k].copy_(batch.weights[k].sum(grad * batch.xs[k]))
        batch.sum_over_ranks(parts)
        dot.div_(length)
    slopes = batch.spread(g / batch.norm)
    along = batch.spread(dot / length) if project else slopes
    for k, grad in views.items():
        if project:
            grad.sub_(batch.xs[k] * along[k])
        grad.mul_(slopes[k])
    grad_g = batch.split(dot if slope is None else dot * slope)
    for k, grad in gradients.items():
        batch.weights[k].set_gradients(grad, grad_g[k] if train_g else None)


def sum_columns(parts: list[Tensor], groups: Sequence[Any]) -> None:
    """Sum columns over the ranks of process groups, in place, with one all-reduce each."""
    joined = torch.cat(parts)
    for group in groups:
        torch.distributed.all_reduce(joined, group=group)
    for part, total in zip(parts, joined.split([len(p) for p in parts]), strict=True):
        part.copy_(total)


def units_by_device(weights: Iterable[InPlaceWeight], log: bool) -> list[DeviceUnits]:
    """Return one `DeviceUnits` for each device and dtype."""
    found: dict[tuple[Any, ...], list[InPlaceWeight]] = defaultdict(list)
    for weight in weights:
        found[weight.stored.device, weight.stored.dtype, weight.weight.dtype].append(weight)
    return [DeviceUnits(each, log) for each in found.values()]
