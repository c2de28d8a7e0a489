"""Weight normalization in the optimizer: the model keeps plain weights.

Between steps the model holds w and the optimizer g and ‖v‖, two numbers per unit. In `step` every
normalized weight is turned into v = w·‖v‖/g in its own memory, and ∇w into ∇v (eq. 3); any torch
optimizer moves v and g; then w = g·v/‖v‖ is written back. The trajectory is that of
`weight_norm_model`. Forward and backward passes cost nothing extra, and compilers, sharding,
quantization and checkpoints see an ordinary network.

What differs from the module form: gradient clipping acts on ∇w, an average of the model's
parameters averages w, and a row that becomes exactly zero loses its direction.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from weightnorm._dtensor import refuse_flattened
from weightnorm._in_place import InPlaceWeight, Retract, initial_norm
from weightnorm._unit_passes import DeviceUnits, units_by_device
from weightnorm._units import Parts
from weightnorm.layers import Dim, Where, memory_key, select
from weightnorm.optimizer_state import (
    OptimizerState,
    check_state,
    packed_state,
    state_by_parameter,
    unpack_state,
)

Factory = Callable[..., torch.optim.Optimizer]
_Owner = tuple[Callable[[], nn.Module | None], str]
ROLES = ("directions", "lengths", "others")
DECAYS = ("parts", "w", "g", None)
_NOT_OPTIONS = ("params", "param_names", *ROLES)
_MARKS = ("weight_decay_on", "g_scale")
"""Keys of our groups by which a state of another kind is refused; not for the inner optimizers."""


@dataclass
class _Bucket:
    """Parameters that form one parameter group of an inner optimizer.

    g has no group of its own where another one of the same optimizer has the same options:
    torch.distributed.checkpoint flattens no group without parameters of the model.
    """

    settings: dict[str, Any]
    decays: bool
    """Whether the inner optimizer's weight decay acts on it."""
    roles: list[str] = field(default_factory=list)
    shown: list[nn.Parameter] = field(default_factory=list)
    """The model's parameters, for those who read our groups."""
    moved: list[nn.Parameter] = field(default_factory=list)
    """What the inner optimizer gets."""


class WeightNormOptimizer(torch.optim.Optimizer):
    """Train v and g with any torch optimizer while the model keeps plain weights.

    Args:
        model: its linear, bilinear, convolutional, recurrent and attention weights are normalized.
        inner: the optimizer of everything, such as ``torch.optim.Adam``, or of the directions v
            where `lengths` or `others` are given. An optimizer is given as a class, or as a
            function of parameter groups such as ``functools.partial(torch.optim.Adam, lr=0.001)``.
        params: parameter groups, as for any optimizer; by default all of the model's parameters. g
            is in the group of its weight. Where roles have their own optimizers, a group may have
            options for one of them: ``{"params": …, "lr": 0.02, "lengths": {"lr": 0.001}}``. A
            group's own `lr` is not for an optimizer given as `lengths`.
        lengths: the optimizer of g; by default `inner`.
        others: the optimizer of all other parameters; by default that of g.
        where: narrows the choice of weights, or widens it to embeddings, as in
            ``weight_norm_model``.
        dim: the axis that is kept, or None for one g per tensor; or a function of a layer's name
            and the layer. By default the axis of the output units.
        scale: "log" to train s with g = eˢ.
        train_g: False to leave g as it is.
        retract: True to restore ‖v‖ after each step, so that the angle of a step depends on the
            learning rate only; a number to hold ‖v‖ at it; "rms" to hold it at √fan_in.
        project: False to hand the inner optimizer (g/‖v‖)∇w instead of ∇v, with its component along
            v. Only with ``train_g=False``.
        normalize_update: True to move v by exactly lr·‖v‖ in the direction in which the inner
            optimizer would. Takes one more copy of the weights during a step.
        weight_decay_on: what the inner optimizers' `weight_decay` acts on, of normalized weights.
            "parts": v and g, as in the module form. "g": g alone. "w": the weight itself, decoupled
            as in AdamW: w ← (1 − lr·weight_decay)·w, before each step. None: nothing.
        matrices: True to hand directions over as matrices: a convolution with one row for each
            index of axis 0, stacked ones (q, k, v; gates) one by one. By default for
            ``torch.optim.Muon``.
        options: for `inner`, such as ``lr=0.001``.

    Schedulers, gradient scaling, clipping and accumulation work on it as on any optimizer; if other
    code writes to a weight between steps, the new value is used. At the first step v is w, unless a
    state was loaded. The gradients of normalized weights are used up by a step: their memory is
    overwritten, and they are None after it. State is in torch's layout; a weight's has g and ‖v‖
    besides, and for g what the inner optimizer keeps of it, with keys like "g.exp_avg". Weights may
    be sharded (FSDP2, tensor parallelism). For bfloat16 and float16 weights a float32 copy is kept,
    in which v is formed. Build the optimizer after casting the model, and before freezing layers
    that are to be trained later.

    >>> model = nn.Linear(3, 2)
    >>> optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    >>> model(torch.randn(4, 3)).sum().backward()
    >>> optimizer.step()
    >>> list(optimizer.parts())
    ['weight']
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Factory,
        params: Iterable[Any] | None = None,
        *,
        lengths: Factory | None = None,
        others: Factory | None = None,
        where: Where | None = None,
        dim: Dim | Callable[[str, nn.Module], Dim] = "auto",
        scale: Literal["linear", "log"] = "linear",
        train_g: bool = True,
        retract: Retract = False,
        project: bool = True,
        normalize_update: bool = False,
        weight_decay_on: Literal["parts", "w", "g"] | None = "parts",
        matrices: bool | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"expected the model, got {type(model).__name__}; its layers determine which "
                "parameters are weights. Write WeightNormOptimizer(model, torch.optim.Adam, lr=…)"
            )
        for argument, factory in {"inner": inner, "lengths": lengths, "others": others}.items():
            _check_factory(argument, factory, optional=argument != "inner")
        if not isinstance(params, Iterable | None):
            raise TypeError(
                f"params must be parameters or parameter groups; got {params!r}: pass options of "
                "the optimizer by name, such as lr=0.001"
            )
        _check_options(scale, train_g, project, retract, weight_decay_on)
        matrices = _moves_matrices(inner) if matrices is None else matrices
        weights, frozen, self._owners = _weights(model, where, dim, matrices)
        found = {w.weight: w for w in weights}
        self._inner: list[torch.optim.Optimizer] = []
        self._stepped = False
        self._is_new = [True]  # a list: torch 2.9 cannot compile an assignment to an attribute
        if not isinstance(retract, bool | str):
            retract = float(retract)
        self._log, self._train_g, self._retract = scale == "log", train_g, retract
        self._decays_w = weight_decay_on == "w"
        self._project, self._normalize_update = project, normalize_update
        super().__init__(list(model.parameters()) if params is None else params, {})
        self._weights = [found[p] for p in self._parameters() if p in found]
        if not self._weights:
            raise ValueError("`params` has none of the weights to normalize; pass the model's own")
        mine = set(self._parameters())
        self._frozen = {name: weight for name, weight in frozen.items() if weight in mine}
        for weight in self._weights:
            initial_norm(weight, retract)
            if self._log:
                tiny = torch.finfo(weight.g.dtype).tiny
                weight.g.detach().copy_(weight.g.detach().clamp_min(tiny).log())
        self._units = units_by_device(self._weights, self._log)
        factories: dict[str, Factory] = {"directions": functools.partial(inner, **options)}
        if lengths is not None:
            factories["lengths"] = lengths
        if others is not None:
            factories["others"] = others
        self._build(found, factories, matrices, weight_decay_on)

    def _build(
        self,
        found: dict[nn.Parameter, InPlaceWeight],
        factories: dict[str, Factory],
        matrices: bool,
        weight_decay_on: str | None,
    ) -> None:
        """Make the inner optimizers, and one of our groups for each of theirs."""
        owner = {role: role if role in factories else "directions" for role in ROLES}
        if "lengths" in factories and "others" not in factories:
            owner["others"] = "lengths"
        plans: dict[str, list[_Bucket]] = {name: [] for name in factories}
        for group in self.param_groups:
            buckets: dict[tuple[str, bool, str], _Bucket] = {}
            bare = {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
            for role in ROLES:
                # A group's learning rate is not that of an optimizer which is for g alone.
                own = role == owner[role] == "lengths"
                settings = {k: v for k, v in bare.items() if not (own and k == "lr")}
                differs = role in group or settings != bare
                decays = weight_decay_on == "parts" or role in (
                    "others",
                    "lengths" if weight_decay_on == "g" else "",
                )
                key = owner[role], decays, role if differs else ""
                if key not in buckets:
                    buckets[key] = _Bucket({**settings, **group.get(role, {})}, decays)
                buckets[key].roles.append(role)
            by_role = {role: bucket for bucket in buckets.values() for role in bucket.roles}
            for p in group["params"]:
                if (weight := found.get(p)) is None:
                    by_role["others"].shown.append(p)
                    by_role["others"].moved.append(p)
                    continue
                by_role["lengths"].moved += [weight.g] if self._train_g else []
                by_role["directions"].moved += weight.directions
                by_role["directions"].shown.append(p)
            for (name, _, _), bucket in buckets.items():
                plans[name] += [bucket] if bucket.moved else []
        if matrices and any(p.ndim != 2 for bucket in plans["directions"] for p in bucket.moved):
            raise ValueError(
                "the optimizer of the directions moves matrices only; give g and all other "
                "parameters another one: lengths=functools.partial(torch.optim.AdamW, lr=…)"
            )
        self._slots: list[tuple[int, int]] = []
        self._undecayed: list[bool] = []
        marks = {"weight_decay_on": weight_decay_on, "g_scale": "log" if self._log else "linear"}
        self._group_of: dict[nn.Parameter, int] = {}
        self.param_groups = []
        for name, plan in plans.items():
            if not plan:
                continue
            inner = factories[name](
                [{**bucket.settings, "params": bucket.moved} for bucket in plan]
            )
            if not isinstance(inner, torch.optim.Optimizer):
                raise TypeError(f"expected an optimizer's class, got {type(inner).__name__}")
            self._inner.append(inner)
            for i, (bucket, group) in enumerate(zip(plan, inner.param_groups, strict=True)):
                if not bucket.decays and "directions" in bucket.roles:
                    _check_decay(group, weight_decay_on)
                if "directions" in bucket.roles:
                    number = len(self.param_groups)
                    self._group_of.update({p: number for p in bucket.shown if p in found})
                self._slots.append((len(self._inner) - 1, i))
                self.param_groups.append({"params": bucket.shown, **_settings(group), **marks})
                self._undecayed.append(not bucket.decays and "weight_decay" in group)
        self.defaults = _common_defaults(self._inner)
        self._to_inner()
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self._inner) and (
            len(self._inner) > 1 or self._normalize_update
        ):
            raise ValueError(
                "LBFGS evaluates the loss many times per step, so it cannot be one of several "
                "optimizers, or have normalize_update; use it for all parameters: "
                "WeightNormOptimizer(model, torch.optim.LBFGS)"
            )
        self._ids = [id(p) for p in self._parameters()]

    def parts(self) -> dict[str, Parts]:
        """v and g of every normalized weight, by its name in the model."""
        self._follow()
        with torch.no_grad():
            return {weight.name: weight.parts(self._log) for weight in self._weights}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizers on v, g and all other parameters."""
        if not torch.compiler.is_compiling():
            self._check_memory()
            self._stepped = True  # torch 2.9 cannot compile it
        self._is_new[0] = False
        self._to_inner()
        loss = None
        if closure is not None and len(self._inner) == 1 and not self._normalize_update:
            loss = self._step_with(closure)
        else:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step()
        self._from_inner()
        return loss

    def _step(self) -> None:
        active = [self._active(units) for units in self._units]
        is_v = self._no_weights()
        try:
            self._to_directions(active, active, is_v)
            self._decay_weights(active)
            before = []
            if self._normalize_update:
                before = [u.copies(a) for u, a in zip(self._units, active, strict=True)]
            for inner in self._inner:
                inner.step()
            for units, which, copies in zip(self._units, active, before, strict=False):
                units.normalize_update(which, copies, self._learning_rates(units))
        finally:
            self._to_weights(is_v, keep_norm=self._retract is not False, clear=True)

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        """A step of an optimizer that may evaluate the loss again after moving v and g."""
        every = self._every_weight()
        norms = [units.norm.clone() for units in self._units]
        is_v = self._no_weights()
        is_used = is_decayed = False  # whether gradients are ∇v, and weights have decayed

        def evaluate() -> Any:
            nonlocal is_v, is_used, is_decayed
            self._to_weights(is_v, keep_norm=False, clear=is_used)
            is_v, is_used = self._no_weights(), False
            with torch.enable_grad():
                loss = closure()
            graded = [self._active(units) for units in self._units]
            is_used = True
            self._to_directions(every, graded, is_v)
            if not is_decayed:  # as without a closure: after the gradient, before the step
                is_decayed = True
                self._decay_weights(graded)
            return loss

        try:
            self._to_directions(every, self._no_weights(), is_v)
            return self._inner[0].step(evaluate)
        finally:
            self._to_weights(is_v, keep_norm=False, clear=is_used)
            if self._retract is not False:
                for units, norm in zip(self._units, norms, strict=True):
                    units.norm.copy_(norm)

    @torch.no_grad()
    def train(self) -> None:
        """Set inner optimizers with modes (schedule-free ones) to training."""
        self._set_mode("train")

    @torch.no_grad()
    def eval(self) -> None:
        """Set inner optimizers with modes (schedule-free ones) to evaluation."""
        self._set_mode("eval")

    def _set_mode(self, mode: str) -> None:
        inner = [o for o in self._inner if hasattr(o, mode)]
        if not inner:
            return
        self._check_memory()
        self._is_new[0] = False
        is_v = self._no_weights()
        try:
            self._to_directions(self._every_weight(), self._no_weights(), is_v)
            for optimizer in inner:
                getattr(optimizer, mode)()
        finally:
            self._to_weights(is_v, keep_norm=self._retract is not False, clear=False)
        self._from_inner()

    def _active(self, units: DeviceUnits) -> list[int]:
        return [i for i, weight in enumerate(units.weights) if weight.has_grad()]

    def _no_weights(self) -> list[list[int]]:
        return [[] for _ in self._units]

    def _every_weight(self) -> list[list[int]]:
        return [list(range(len(units.weights))) for units in self._units]

    def _to_directions(
        self, active: list[list[int]], graded: list[list[int]], is_v: list[list[int]]
    ) -> None:
        """Turn the active weights into v. `is_v` lists those that are turned already, so that an
        exception on the way leaves no v behind."""
        for units, *numbers in zip(self._units, active, graded, is_v, strict=True):
            if numbers[0]:
                units.to_directions(*numbers, train_g=self._train_g, project=self._project)

    def _to_weights(self, active: list[list[int]], *, keep_norm: bool, clear: bool) -> None:
        for units, which in zip(self._units, active, strict=True):
            if which:
                units.to_weights(which, keep_norm=keep_norm)
            for weight in units.weights if clear else ():
                weight.clear_gradients()

    def _decay_weights(self, active: list[list[int]]) -> None:
        """w ← (1 − lr·weight_decay)·w for ``weight_decay_on="w"``: of w, g alone changes."""
        if not self._decays_w:
            return
        for units, which in zip(self._units, active, strict=True):
            for i in which:
                group = self.param_groups[self._group_of[units.weights[i].weight]]
                if decay := group["weight_decay"]:
                    units.shrink(i, 1 - float(group["lr"]) * decay)

    def _learning_rates(self, units: DeviceUnits) -> list[Any]:
        return [self.param_groups[self._group_of[w.weight]]["lr"] for w in units.weights]

    def _check_memory(self) -> None:
        if [id(p) for p in self._parameters()] != self._ids:
            raise RuntimeError(
                "the groups hold other parameters than at construction (DeepSpeed's ZeRO replaces "
                "them by flat ones); use weight_norm_model with it instead"
            )
        for name, weight in self._frozen.items():
            if weight.requires_grad and weight.grad is not None:
                raise RuntimeError(
                    f"{name} was frozen when the optimizer was built, so it is not normalized, but "
                    "it has a gradient now; build the optimizer again, or before freezing"
                )
        if not self._stepped:
            self._check_owners()
        self._follow()

    def _check_owners(self) -> None:
        """Raise if a module has another parameter in place of a weight. Not for sharded weights,
        which FSDP2 replaces by whole ones in a forward and backward pass."""
        for weight in self._weights:
            if weight.weight not in self._owners:
                continue
            owner, name = self._owners[weight.weight]
            module = owner()
            if module is not None and module._parameters.get(name) is not weight.weight:
                raise RuntimeError(
                    f"{weight.name} is no longer a parameter of the model, which was sharded, "
                    "normalized or given other weights after the optimizer was built; build the "
                    "optimizer last"
                )

    def _follow(self) -> None:
        """Follow the model to other memory, and before the first step to other weights, such as
        those of rank 0 in DistributedDataParallel: ‖v‖ is their norm."""
        if any(weight.moved() for weight in self._weights):
            self._bind()
        if self._is_new[0]:
            for weight in self._weights:
                initial_norm(weight, self._retract)

    def _bind(self) -> None:
        """Follow the model to another device, dtype or memory."""
        for weight in self._weights:
            weight.bind()
        self._units = units_by_device(self._weights, self._log)

    def _pairs(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Our parameter groups, each with the inner optimizer's."""
        for group, (i, j) in zip(self.param_groups, self._slots, strict=True):
            yield group, self._inner[i].param_groups[j]

    def _to_inner(self) -> None:
        """Hand the options of our groups to the inner optimizers. Where weight decay does not act
        on v or g, theirs is 0 and ours is the user's."""
        for undecayed, (group, inner) in zip(self._undecayed, self._pairs(), strict=True):
            inner.update(_settings(group, _MARKS))
            if undecayed:
                inner["weight_decay"] = 0.0

    def _from_inner(self) -> None:
        """Take over what the inner optimizers changed in their groups."""
        for undecayed, (group, inner) in zip(self._undecayed, self._pairs(), strict=True):
            group.update(_settings(inner, ("weight_decay",) if undecayed else ()))

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"])

    @property  # type: ignore[override]
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """What is kept for each of the model's parameters, by parameter. Empty before a step.

        ``optimizer.state.clear()`` and assigning an empty dict reset the inner optimizers: moments
        and counts are forgotten, v and g stay. To set it, use ``load_state_dict``.
        """
        state = OptimizerState(self._reset)
        if self._stepped or any(o.state for o in self._inner):
            state.update(self._state())
        return state

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        if value:
            raise AttributeError("the state cannot be assigned; use load_state_dict")
        self._reset()

    def _reset(self) -> None:
        for inner in self._inner:
            inner.state.clear()
        self._stepped = False

    def _state(self) -> dict[nn.Parameter, dict[str, Any]]:
        kept: dict[Tensor, dict[str, Any]] = {}
        for inner in self._inner:
            kept.update(inner.state)
        found = {weight.weight: weight for weight in self._weights}
        states: dict[nn.Parameter, dict[str, Any]] = {}
        for p in self._parameters():
            states[p] = packed_state(found[p], kept) if p in found else kept.get(p, {})
        return states

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's layout, g and ‖v‖ included."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        if self._is_new[0]:
            self._follow()
        number = {p: i for i, p in enumerate(self._parameters())}
        state_dict: dict[str, Any] = {
            "state": {number[p]: dict(state) for p, state in self._state().items()},
            "param_groups": [
                {**_settings(group), "params": [number[p] for p in group["params"]]}
                for group in self.param_groups
            ],
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state; the model's weights are loaded with the model."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved = state_by_parameter(self.param_groups, state_dict)
        check_state(self._weights, saved)
        self._check_memory()
        inner_state: dict[Tensor, dict[str, Any]] = {}
        found = {weight.weight: weight for weight in self._weights}
        for p, state in saved.items():
            if p in found:
                unpack_state(found[p], state, inner_state)
            else:
                inner_state[p] = state
        for group, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(_settings(theirs))
        self._to_inner()
        for inner in self._inner:
            numbers = {p: n for n, p in enumerate(_params(inner))}
            inner.load_state_dict(
                {
                    "state": {n: inner_state[p] for p, n in numbers.items() if inner_state.get(p)},
                    "param_groups": [
                        {**_settings(group), "params": [numbers[p] for p in group["params"]]}
                        for group in inner.param_groups
                    ],
                }
            )
        self._from_inner()
        self._stepped = any(inner.state for inner in self._inner)
        self._is_new[0] = self._is_new[0] and not saved
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle; take the model along in the same one, or its weights are lost."""
        return {k: v for k, v in self.__dict__.items() if k not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._owners = {}
        self._ids = [id(p) for p in self._parameters()]
        self._bind()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are fixed once the optimizer is built: build another one instead."""
        if self._inner:
            raise ValueError("add parameter groups by building a new WeightNormOptimizer")
        super().add_param_group(param_group)


_NOT_COPIED = (
    "step",
    "_units",
    "_owners",
    "_ids",
    "_zero_grad_profile_name",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def _settings(group: dict[str, Any], without: tuple[str, ...] = ()) -> dict[str, Any]:
    left_out = ("params", "param_names", *without)
    return {key: value for key, value in group.items() if key not in left_out}


def _common_defaults(optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """The defaults that all optimizers have, as the first has them: schedulers read them to know
    which options every group has."""
    first, *others = (optimizer.defaults for optimizer in optimizers)
    return {key: value for key, value in first.items() if all(key in one for one in others)}


def _params(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _check_factory(argument: str, factory: object, *, optional: bool) -> None:
    """Check that an inner optimizer is given as a class or function."""
    if callable(factory) or (optional and factory is None):
        return
    if isinstance(factory, torch.optim.Optimizer):
        got = f"an optimizer that is built already; pass its class, {type(factory).__name__}"
    else:
        got = repr(factory)
    raise TypeError(
        f"{argument} must be the class of an optimizer, such as torch.optim.Adam, or a function of "
        f"parameter groups, such as functools.partial(torch.optim.Adam, lr=0.001); got {got}"
    )


def _check_options(
    scale: str, train_g: bool, project: bool, retract: object, weight_decay_on: str | None
) -> None:
    if scale not in ("linear", "log"):
        raise ValueError(f'scale={scale!r} is unknown; expected "linear" or "log"')
    if weight_decay_on not in DECAYS:
        raise ValueError(
            f"weight_decay_on={weight_decay_on!r} is unknown; expected one of {DECAYS}"
        )
    if isinstance(retract, str) and retract != "rms":
        raise ValueError(f'retract={retract!r} is unknown; expected True, a number or "rms"')
    if not isinstance(retract, bool | Real | str):
        raise TypeError(f'retract must be a bool, a number or "rms"; got {retract!r}')
    if not isinstance(retract, bool | str) and not retract > 0:  # type: ignore[operator]
        raise ValueError(f"retract={retract} cannot be the norm of v; expected a positive number")
    if not project and train_g:
        raise ValueError(
            "project=False leaves the component of the gradient along v in ∇v, but g is trained by "
            "it too; pass train_g=False with it"
        )
    if not train_g and weight_decay_on in ("w", "g"):
        raise ValueError(
            f"weight_decay_on={weight_decay_on!r} would change g, but train_g=False; "
            "pass weight_decay_on=None"
        )


def _check_decay(group: dict[str, Any], weight_decay_on: str | None) -> None:
    if weight_decay_on is not None and "weight_decay" not in group:
        raise ValueError(
            f"weight_decay_on={weight_decay_on!r} needs an optimizer with `weight_decay`; it has "
            f"{sorted(_settings(group))}"
        )


def _moves_matrices(inner: Factory) -> bool:
    """Whether an optimizer takes matrices only."""
    made = inner.func if isinstance(inner, functools.partial) else inner
    muon = getattr(torch.optim, "Muon", None)
    return muon is not None and isinstance(made, type) and issubclass(made, muon)


def _stacked(layer: nn.Module, name: str) -> int:
    """How many matrices a layer stacks along axis 0 of a weight."""
    if isinstance(layer, nn.MultiheadAttention) and name == "in_proj_weight":
        return 3
    if name.startswith("weight_hr"):  # the projection of an LSTM
        return 1
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        return 4
    return 3 if isinstance(layer, nn.GRU | nn.GRUCell) else 1


def _weights(
    model: nn.Module,
    where: Where | None,
    dim: Dim | Callable[[str, nn.Module], Dim],
    matrices: bool,
) -> tuple[list[InPlaceWeight], dict[str, nn.Parameter], dict[nn.Parameter, _Owner]]:
    """The plain weights to normalize, tied ones once; by name those left out, being frozen; and
    the modules of the first."""
    found: dict[nn.Parameter, InPlaceWeight] = {}
    owners: dict[nn.Parameter, _Owner] = {}
    frozen: dict[str, nn.Parameter] = {}
    refuse_flattened(model)
    for chosen in select(model, where, dim):
        parameter = chosen.parameter
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"{chosen.path} has no shape yet; run a batch through the model first")
        if parameter.is_meta:
            raise ValueError(
                f"{chosen.path} is on the meta device: there is nothing to decompose; give the "
                "model memory and values first"
            )
        if not parameter.requires_grad:
            frozen[chosen.path] = parameter
        elif parameter not in found:
            blocks = _stacked(chosen.module, chosen.name) if matrices else 0
            found[parameter] = InPlaceWeight(chosen.path, parameter, chosen.units, blocks=blocks)
            if type(parameter) is nn.Parameter:  # not sharded
                owners[parameter] = weakref.ref(chosen.module), chosen.name
    if not found:
        raise ValueError(
            f"nothing to normalize in {type(model).__name__}: all chosen weights are frozen"
        )
    _refuse_shared_memory(model, {id(weight) for weight in found})
    return [*found.values()], frozen, owners


def _refuse_shared_memory(model: nn.Module, normalized: set[int]) -> None:
    """Raise if a normalized weight lies in the memory of another parameter: a step would turn it
    into v while the other one is updated."""
    first: dict[tuple[int, int], tuple[str, nn.Parameter]] = {}
    for path, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter or not parameter.numel():
            continue
        other_path, other = first.setdefault(memory_key(parameter), (path, parameter))
        if other is not parameter and not normalized.isdisjoint((id(other), id(parameter))):
            raise ValueError(
                f"{path} shares its memory with {other_path} but is another parameter; tie them "
                "as one parameter, as in `b.weight = a.weight`"
            )
