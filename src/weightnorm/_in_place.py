"""A weight of the optimizer form: its memory, its units, and g and ‖v‖ of each.

v = w·(‖v‖/g) differs from w by one number per unit. So a weight can hold v for the time of an
optimizer step; what has to be kept between steps is g and ‖v‖, two numbers per unit.

Note [units split across ranks]
    Each rank works on its shard of a DTensor. Where a unit lies on several ranks (columns under
    tensor parallelism, transposed convolutions under FSDP2), its squares and products are summed
    over them: one all-reduce for all such weights.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from weightnorm._dtensor import is_sharded, local, placed_like
from weightnorm._kernels.blocks import unit_view
from weightnorm._kernels.step import latest, overflow_is_nan, read_lengths
from weightnorm._units import EPS, SHORTEST, Parts, Units, wide_dtype

State = dict[str, Any]


class InPlaceWeight:
    """A weight of the model, with g and ‖v‖ of its units.

    Args:
        name: its name in the model.
        weight: a plain parameter, perhaps sharded.
        units: its units, with axes counted from the front.
        matrices: 0 to hand the weight itself to the inner optimizer; n to hand it n matrices that
            are stacked along the first axis or axes, in the weight's memory.
    """

    def __init__(self, name: str, weight: nn.Parameter, units: Units, matrices: int = 0) -> None:
        self.name, self.weight, self.units, self.matrices = name, weight, units, matrices
        self.owner: tuple[weakref.ref[nn.Module], str] | None = None
        """The module that has the weight, and its name there."""
        self._locate_units()
        # Two roundings of bfloat16 or float16 per step would lose small updates.
        is_narrow = wide_dtype(weight.dtype) != weight.dtype
        self.copy = (
            nn.Parameter(weight.detach().to(wide_dtype(weight.dtype))) if is_narrow else None
        )
        self.directions = self._directions()
        self.bind()
        norm = self.as_units(self.lengths(self.x))
        self.g, self.norm = nn.Parameter(norm.clone()), norm

    def __getstate__(self) -> State:
        """Return what `bind` does not find again, without process groups."""
        derived = ("x", "x_units", "narrow", "stored", "bound", "cut", "placements")
        kept = {k: v for k, v in self.__dict__.items() if k not in derived}
        return {
            **kept,
            "owner": None,
            "norm": self.norm.clone(),
        }  # torch cannot copy a DTensor's view

    def __setstate__(self, state: State) -> None:
        self.__dict__.update(state)
        self._locate_units()
        self.bind()

    # ---- Where the weight and its units lie.

    def _locate_units(self) -> None:
        """Find the ranks that units are split over, and how the numbers per unit are placed."""
        self.placements: Any = None
        self.cut: tuple[Any, ...] = ()
        if not is_sharded(self.weight):
            return
        from torch.distributed.tensor import Replicate

        mesh, placements = self.weight.device_mesh, self.weight.placements
        if any(p.is_partial() for p in placements):
            raise ValueError(f"{self.name} has pending reductions over ranks: {placements}")
        # By `dim`, not `is_shard`: FSDP2 of a tensor-parallel weight has strided shards.
        shards = [None if p.is_replicate() else p.dim for p in placements]
        if self.units.groups > 1 and 0 in shards:
            raise ValueError(
                f"{self.name} has groups along axis 0, which is sharded: a shard may begin and end "
                "within a group. Leave it out with `where`"
            )
        kept = self.units.kept(self.weight.ndim)
        whole = [dim is None or dim in kept for dim in shards]
        self.cut = tuple(mesh.get_group(i) for i, is_whole in enumerate(whole) if not is_whole)
        self.placements = [p if w else Replicate() for p, w in zip(placements, whole, strict=True)]

    def _directions(self) -> list[nn.Parameter]:
        """Return the parameters that the inner optimizer moves in place of the weight."""
        stored = self.master
        if not self.matrices or (self.matrices == 1 and stored.ndim == 2):
            return [stored]
        if self.matrices > 1 and is_sharded(stored):
            raise ValueError(
                f"{self.name} stacks {self.matrices} matrices and is sharded: a matrix may lie on "
                "several ranks. Leave it out with `where`, or use a layer with separate matrices"
            )
        return [nn.Parameter(m) for m in self._matrices(stored.detach())]

    def _matrices(self, x: Tensor) -> list[Tensor]:
        """Return the stacked matrices of x in its memory."""
        stacked = len(self.units.kept(x.ndim)) - 1
        if stacked > 0:
            return [_rows(matrix) for matrix in x.flatten(0, stacked - 1)]
        if not is_sharded(x):
            return [_rows(block) for block in x.chunk(self.matrices)]
        rows = _rows(local(x))
        shape = torch.Size((x.shape[0], math.prod(x.shape[1:])))
        return [_as_dtensor(rows, x, x.placements, shape)]

    def bind(self) -> None:
        """Find the memory again, after the weight has moved to another device, dtype or storage."""
        wide = wide_dtype(self.weight.dtype)
        if self.copy is None and wide != self.weight.dtype:
            raise RuntimeError(
                f"{self.name} became {self.weight.dtype} after the optimizer was built, so there "
                "is no float32 copy of it; cast the model first, then build the optimizer"
            )
        if self.copy is not None and (self.copy.device, self.copy.dtype) != (
            self.weight.device,
            wide,
        ):
            self.copy.data = self.weight.detach().to(wide)
        if self.directions[0] is not self.master:
            matrices = self._matrices(self.master.detach())
            for matrix, memory in zip(self.directions, matrices, strict=True):
                set_data(matrix, local(memory))
        self.bound, self.stored = self._memory(), local(self.master.detach())
        self.g_shape = self.units.shape(self.stored.shape)
        self.x, self.x_units = unit_view(self.stored, self.units)
        """The weight as the passes of a step take it, and the units of that."""
        if self.copy is not None:
            now = local(self.weight.detach())
            if now.stride() != self.stored.stride():
                self.x, self.x_units = self.stored, self.units
        form, stored = self.x, self.stored
        self.x_is_stored = form.shape == stored.shape and form.stride() == stored.stride()
        self.narrow = None if self.copy is None else self._like_x(local(self.weight.detach()))

    def check_owner(self) -> None:
        """Raise if the module has another parameter in place of the weight. Not for sharded ones,
        which FSDP2 replaces by whole ones in a forward and backward pass."""
        if self.owner is None or is_sharded(self.weight):
            return
        module, name = self.owner[0](), self.owner[1]
        if module is not None and module._parameters.get(name) is not self.weight:
            raise RuntimeError(
                f"{self.name} is no longer a parameter of the model, which was sharded, normalized "
                "or given other weights after the optimizer was built; build the optimizer last"
            )

    def moved(self) -> bool:
        """Return whether the weight lies elsewhere than at the last `bind`."""
        return self._memory() != self.bound

    def _memory(self) -> tuple[Any, ...]:
        weight = local(self.weight)
        return weight.data_ptr(), weight.dtype, weight.stride()

    @property
    def master(self) -> nn.Parameter:
        """The weight in float32 or wider: itself, or its copy if it is bfloat16 or float16."""
        return self.weight if self.copy is None else self.copy

    def fan_in(self) -> int:
        """Return the number of elements per unit."""
        return self.units.fan_in(self.weight.shape)

    # ---- Numbers per unit: a column, of shape (n, 1).

    def _like_x(self, x: Tensor) -> Tensor:
        """Return something that is laid out as the weight in the form of `x`."""
        return x if self.x_is_stored else x.as_strided(self.x.shape, self.x.stride())

    def _like_stored(self, x: Tensor) -> Tensor:
        """Return something in the form of `x` in that of the weight."""
        return x if self.x_is_stored else x.as_strided(self.stored.shape, self.stored.stride())

    def lengths(self, x: Tensor) -> Tensor:
        """Return the length of every unit, summed over ranks."""
        squares = self.x_units.sum(x.square()).reshape(-1, 1)
        for group in self.cut:
            torch.distributed.all_reduce(squares, group=group)
        return overflow_is_nan(squares.sqrt())

    def spread(self, column: Tensor) -> Tensor:
        """Return a column so that it broadcasts to `x`."""
        return self.x_units.spread(column.view(self.x_units.shape(self.x.shape)), self.x)

    def as_units(self, column: Tensor) -> Tensor:
        """Return a column in the shape of g; sharded if the weight is."""
        here = column.view(self.g_shape)
        if not is_sharded(self.weight):
            return here
        shape = torch.Size(self.units.shape(self.weight.shape))
        return _as_dtensor(here, self.weight, self.placements, shape)

    # ---- Gradients.

    def has_grad(self) -> bool:
        """Return whether there is a gradient; raise if it is sparse."""
        grad = self.weight.grad
        if grad is not None and grad.layout is not torch.strided:
            raise ValueError(
                f"{self.name} has a sparse gradient, but ∇v is dense; build the layer with "
                "sparse=False or leave it out with `where`"
            )
        return grad is not None

    def take_gradient(self) -> Tensor | None:
        """Return ∇w in the form of `x`, and drop it from the weight; None if there is none."""
        grad, self.weight.grad = self.weight.grad, None
        if grad is None:
            return None
        here = local(placed_like(grad, self.weight)) if is_sharded(self.weight) else grad
        if here.stride() != self.stored.stride():
            here = torch.empty_like(self.stored, dtype=here.dtype).copy_(here)
        return self._like_x(here)

    def set_gradients(self, grad: Tensor, grad_g: Tensor | None) -> None:
        """Hand ∇v, in the form of `x`, and ∇g to the parameters that the inner optimizer moves."""
        self.g.grad = None if grad_g is None else self.as_units(grad_g)
        whole = self._like_weight(self._like_stored(grad))
        if self.directions[0] is self.master:
            self.master.grad = whole
            return
        for direction, part in zip(self.directions, self._matrices(whole), strict=True):
            direction.grad = part

    def _like_weight(self, here: Tensor) -> Tensor:
        if not is_sharded(self.weight):
            return here
        return _as_dtensor(here, self.weight, self.weight.placements, self.weight.shape)

    def clear_gradients(self) -> None:
        """Drop ∇v and ∇g: they are not ∇w, to which a later backward pass would add."""
        for parameter in (self.g, self.weight, *self.directions):
            parameter.grad = None

    # ---- Values.

    def current(self) -> Tensor:
        """Return `x`, in which elements of a bfloat16 or float16 weight that were written to have
        the written value."""
        return self.x if self.narrow is None else latest(self.x, self.narrow)

    def start(self, v_norm: float | None) -> None:
        """Set ‖v‖ before the first step: to `v_norm`, by default to ‖w‖."""
        norm = local(self.norm)
        if v_norm is None:
            norm.copy_(self.lengths(self.current()).view(norm.shape))
            norm.masked_fill_(norm <= EPS, 1.0)  # a zero row has the diagonal direction of norm 1
        else:
            norm.fill_(v_norm)

    def set_length(self, length: Tensor | None, log: bool) -> None:
        """Rescale the weight to this g, zero units in random directions; by default g is ‖w‖.

        With `log` s = log g is kept.
        """
        g = self.g.detach()
        if length is not None:
            g.copy_(_distributed(length, g))
            x = self.current()
            zero = self.lengths(x) <= EPS
            if bool(zero.any()):
                random = self.units.random_directions(self.weight.shape, self.name)
                random = local(_distributed(random.to(x), self.weight))
                random = self._like_x(torch.empty_like(self.stored).copy_(random))
                x = torch.where(self.spread(zero), random, x)
            g = local(g).reshape(-1, 1)
            # See Note [short rows keep their direction].
            factor = torch.copysign(g.abs().clamp_min(SHORTEST), g) / self.lengths(x)
            self.x.copy_(x * self.spread(factor))
            if self.narrow is not None:
                self.narrow.copy_(self.x)
        if log:
            local(self.g.detach()).clamp_min_(torch.finfo(self.g.dtype).tiny).log_()

    def parts(self, log: bool) -> Parts:
        """Return v and g as new tensors."""
        g = self.g.detach().exp() if log else self.g.detach().clone()
        column, norm = (local(t).reshape(-1, 1) for t in (g, self.norm))
        x = self.current()
        length, signed, zero = read_lengths(column, self.lengths(x))
        column.copy_(length)
        x = torch.where(self.spread(zero), self.fan_in() ** -0.5, x) * self.spread(norm / signed)
        v = torch.empty_like(self.stored)
        self._like_x(v).copy_(x)
        return Parts(self._like_weight(v), g)

    # ---- State: one flat dict in torch's layout, with "g", "v_norm" and for bfloat16 or float16
    # "float32" besides the inner optimizer's keys; those for g are "g.exp_avg" and the like.

    def own_state(self) -> dict[str, Tensor]:
        """Return the tensors that are kept besides the inner optimizer's state."""
        own = {"g": self.g, "v_norm": self.norm}
        if self.copy is not None:
            own["float32"] = self.copy
        return {key: value.detach() for key, value in own.items()}

    def check_own_state(self, state: State, *, complete: bool = True) -> None:
        """Raise unless a state's g and ‖v‖ are those of such a weight."""
        if complete and not {"g", "v_norm"} <= state.keys():
            raise ValueError(
                f"the state has no g for {self.name}; expected one of a WeightNormOptimizer with "
                "the same weights. To start from a trained model, build the optimizer on it"
            )
        for key, ours in self.own_state().items():
            if key in state and state[key].shape != ours.shape:
                got, expected = tuple(state[key].shape), tuple(ours.shape)
                raise ValueError(f"{self.name}: the state's {key} is {got}, expected {expected}")

    def write_own_state(self, state: State) -> None:
        """Take over g, ‖v‖ and the float32 copy from a state, where it has them."""
        for key, ours in self.own_state().items():
            if key in state and local(state[key]).data_ptr() != local(ours).data_ptr():
                ours.copy_(state[key])

    def joined_state(self, kept: dict[Tensor, State]) -> State:
        """Return the weight's state under flat keys, given what is kept for v and for g."""
        state: State = {}
        for i, direction in enumerate(self.directions):
            prefix = f"block{i}." if len(self.directions) > 1 else ""
            state |= {f"{prefix}{k}": x for k, x in kept.get(direction, {}).items()}
        state |= {f"g.{k}": x for k, x in kept.get(self.g, {}).items()}
        # torch cannot copy or pickle a view of a DTensor.
        own = self.own_state().items()
        return state | {k: x.clone() if is_sharded(x) else x for k, x in own}

    def split_state(self, state: State) -> dict[Tensor, State]:
        """Return the inner optimizer's state of v and of g, by the parameter that it moves."""
        split: dict[Tensor, State] = {p: {} for p in (self.g, *self.directions)}
        for key, value in state.items():
            prefix, dot, rest = key.partition(".")
            if dot and prefix == "g":
                split[self.g][rest] = value
            elif dot and len(self.directions) > 1 and prefix.startswith("block"):
                split[self.directions[int(prefix[5:])]][rest] = value
            elif key not in ("g", "v_norm", "float32"):
                split[self.directions[0]][key] = value
        return {p: kept for p, kept in split.items() if kept}


def separate_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Copy gradients that share memory with another one, since ∇w is overwritten by ∇v."""
    spans: list[tuple[int, int, int, nn.Parameter]] = []
    for p in parameters:
        if p.grad is not None and p.grad.layout is torch.strided:
            grad = local(p.grad)
            reach = sum(s * (n - 1) for n, s in zip(grad.shape, grad.stride(), strict=True)) + 1
            if grad.numel():
                start = grad.data_ptr()
                spans.append((start, start + reach * grad.element_size(), len(spans), p))
    end = 0
    for start, stop, _, p in sorted(spans):
        if start < end:
            assert p.grad is not None
            p.grad = p.grad.clone()
        else:
            end = stop


def _as_dtensor(here: Tensor, like: Any, placements: Any, shape: torch.Size) -> Tensor:
    """Return this rank's part as a DTensor of this shape on the mesh of another one."""
    strides = like.stride()
    if shape != like.shape:
        strides = torch.empty(shape, device="meta").stride()
    whole: Tensor = type(like).from_local(
        here, like.device_mesh, placements, run_check=False, shape=shape, stride=strides
    )
    return whole


def _distributed(x: Tensor, like: Any) -> Tensor:
    """Return a tensor that every rank has as a DTensor, if `like` is one."""
    if not is_sharded(like):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


def _rows(x: Tensor) -> Tensor:
    """Return x as a matrix in its memory; the order of its columns is that of the memory."""
    rows, _ = unit_view(x, Units())
    if rows.ndim != 2:
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} is no matrix in memory; "
            "make the weight contiguous or channels-last"
        )
    return rows


def set_data(x: Tensor, memory: Tensor) -> None:
    """Let x, or its shard on this rank, use this memory."""
    target: Any = x._local_tensor if is_sharded(x) else x
    target.data = memory
