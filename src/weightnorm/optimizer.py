"""Weight normalization in the optimizer: the model keeps plain weights.

Between steps the model holds w and the optimizer g and ‖v‖, two numbers per unit. In `step` every
normalized weight is turned into v = w·‖v‖/g in its own memory, and ∇w into ∇v (eq. 3); any torch
optimizer moves v and g; then w = g·v/‖v‖ is written back. The trajectory is that of
`weight_norm_model`. Forward and backward passes cost nothing extra, and compilers, sharding,
quantization and checkpoints see an ordinary network.

What differs from the module form: gradient clipping acts on ∇w, an average of the model's
parameters averages w, and a row with |g| < 2·10⁻¹² has that length in the model, so that it keeps
its direction.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from weightnorm._device_units import NormSchedule, units_by_device
from weightnorm._in_place import InPlaceWeight, separate_gradients
from weightnorm._optimizer_groups import (
    COMPARED,
    Factory,
    InnerOptimizers,
    check_options,
    check_same_kind,
    in_place,
    moves_matrices,
    options_of,
    plain_weights,
)
from weightnorm._torch_private import GLOBAL_OPTIMIZER_HOOKS, disable_dynamo
from weightnorm._units import Parts, Units
from weightnorm.layers import Dim, Where
from weightnorm.module_form import Length, Options


class NormalizedInOptimizer(NamedTuple):
    """A weight that a ``WeightNormOptimizer`` normalizes."""

    weight: nn.Parameter
    units: Units
    v_norm: Tensor
    """‖v‖ of every unit, in the shape of g."""
    parts: Parts
    decay_of_g: float
    """The weight decay that the inner optimizer applies to g (to s = log g of a log-scale)."""


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
        where, dim, g, scale, train_g: as in ``weight_norm_model``. With `g` the model's weights are
            rescaled, and ‖v‖ starts at their norm before that, or at 1 where it is 0.
        retract: how far ‖v‖ is moved back after each step, from 0 (not at all) over 0.5 (half way,
            a brake) to 1 or True (it is held, so the learning rate alone sets the angle of a step).
        v_norm: ‖v‖ at the start, and what `retract` moves it to: a number, or a function of the
            weight's name and the number of steps. By default ‖w‖, and ‖v‖ before the step.
        project: False to hand the inner optimizer (g/‖v‖)∇w instead of ∇v, with its component along
            v. Only with ``train_g=False``.
        normalize_update: True to move v by exactly lr·‖v‖ in the direction in which the inner
            optimizer would. Takes one more copy of the weights during a step.
        weight_decay_on: what the inner optimizers' `weight_decay` acts on, of normalized weights.
            "w": the weight itself, w ← (1 − lr·weight_decay)·w before each step, with both numbers
            from the group of v. "parts": v and g, as in the module form. "g": g alone. None:
            nothing. "auto": "w", as a user of AdamW expects; "g" for those optimizers of torch
            that add weight_decay·w to the gradient (SGD, Adam), since the gradient of ‖w‖²/2 is g
            along g and 0 along v; None with ``train_g=False``. That of `lengths` acts on g then.
        matrices: True to hand directions over as matrices: a convolution with one row for each
            index of axis 0, stacked ones (q, k, v; gates; experts) one by one. By default for
            ``torch.optim.Muon``.
        options: for `inner`, such as ``lr=0.001``.

    Schedulers, gradient scaling, clipping and accumulation work on it as on any optimizer; if other
    code writes to a weight between steps, the new value is used. At the first step v is w, unless a
    state was loaded. `step` overwrites the gradients of normalized weights and sets them to None.
    Weights may be sharded (FSDP2, tensor parallelism), those with groups not along axis 0. For
    bfloat16 and float16 weights a float32 copy is kept, in which v is formed. Build the optimizer
    after casting the model, and before freezing layers that are to be trained later.

    ``state`` is what the next step uses, in torch's layout. That of a weight has g and ‖v‖ besides
    (the keys "g" and "v_norm"), and for g what the inner optimizer keeps of it, with keys like
    "g.exp_avg". Removing a weight's state resets its moments; v and g stay. The length of a weight
    is that of the model: where "g" differs from it, as after a write to the weight, g is ±‖w‖.

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
        g: Length | None = None,
        scale: Literal["linear", "log"] = "linear",
        train_g: bool = True,
        retract: float = 0.0,
        v_norm: float | Callable[[str, int], float] | None = None,
        project: bool = True,
        normalize_update: bool = False,
        weight_decay_on: Literal["auto", "parts", "w", "g"] | None = "auto",
        matrices: bool | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"expected the model, got {type(model).__name__}; its layers determine which "
                "parameters are weights. Write WeightNormOptimizer(model, torch.optim.Adam, lr=…)"
            )
        check_options(scale, train_g, project, retract, weight_decay_on)
        factories: dict[str, Factory] = {"directions": functools.partial(inner, **options)}
        factories |= {"lengths": lengths} if lengths is not None else {}
        factories |= {"others": others} if others is not None else {}
        self._log, self._train_g, self._project = scale == "log", train_g, project
        self._norms = NormSchedule(v_norm, retract)
        self._normalize_update = normalize_update
        matrices = moves_matrices(inner) if matrices is None else matrices
        initial = Options(g, scale, None, train_g)
        plain, frozen = plain_weights(model, where, dim)
        lengths_at_start = {p: initial.initial_g(weight) for p, weight in plain.items()}
        self._is_new = g is None  # else ‖v‖ stays that of the weights as they were
        self._is_read = False
        self._shown: defaultdict[Any, Any] | None = None
        super().__init__(list(model.parameters()) if params is None else params, {})
        self._weights = [in_place(plain[p], matrices) for p in self._parameters() if p in plain]
        if not self._weights:
            raise ValueError("`params` has none of the weights to normalize; pass the model's own")
        self._found = {weight.weight: weight for weight in self._weights}
        mine = set(self._parameters())
        self._frozen = {name: weight for name, weight in frozen.items() if weight in mine}
        self._norms.start(self._weights)
        self._units = units_by_device(self._weights, self._log)
        self._inner = InnerOptimizers(
            self.param_groups,
            self._found,
            factories,
            decay_on=weight_decay_on,
            log=self._log,
            train_g=train_g,
            matrices=matrices,
            normalize_update=normalize_update,
        )
        self._make_groups()
        with torch.no_grad():
            for each in self._weights:
                each.set_length(lengths_at_start[each.weight], self._log)

    def _make_groups(self) -> None:
        """Make one of our groups for each of the inner optimizers'."""
        marks = {
            "weight_decay_on": self._inner.decay_on,
            "g_scale": "log" if self._log else "linear",
            "retract": self._norms.retract,
            "v_norm": "function" if callable(self._norms.v_norm) else self._norms.v_norm,
            "project": self._project,
            **({"steps": 0} if callable(self._norms.v_norm) else {}),
        }
        self.param_groups = [
            {"params": bucket.model_params, **options_of(group), **marks}
            for bucket, group in self._inner.groups()
        ]
        # Schedulers read the defaults to know which options every group has.
        first, *rest = (optimizer.defaults for optimizer in self._inner.optimizers)
        self.defaults = {k: v for k, v in first.items() if all(k in one for one in rest)}
        self._inner.write_options(self.param_groups)
        self._ids = [id(p) for p in self._parameters()]

    # ---- Reading.

    def parts(self) -> dict[str, Parts]:
        """Return v and g of every normalized weight, by its name in the model."""
        return {name: weight.parts for name, weight in self.normalized().items()}

    def v_norms(self) -> dict[str, Tensor]:
        """Return ‖v‖ of every unit of every normalized weight, in the shape of g, by name."""
        return {name: weight.v_norm for name, weight in self.normalized().items()}

    @torch.no_grad()
    def normalized(self) -> dict[str, NormalizedInOptimizer]:
        """Return every normalized weight with its units, ‖v‖, v and g, by its name in the model."""
        self._follow()
        decay = {
            p: float(group.get("weight_decay", 0.0))
            for _, group in self._inner.groups()
            for p in group["params"]
        }
        return {
            weight.name: NormalizedInOptimizer(
                weight.weight,
                weight.units,
                weight.norm.detach().clone(),
                weight.parts(self._log),
                decay.get(weight.g, 0.0),
            )
            for weight in self._weights
        }

    # ---- Steps.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of the inner optimizers on v, g and all other parameters.

        A `closure` is evaluated before anything is changed, and again when the inner optimizer
        asks for the loss after it has moved parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin()
        try:
            if closure is None or len(self._inner.optimizers) > 1 or self._normalize_update:
                self._move()
            else:
                loss = self._move_with(closure, loss)
        finally:
            self._end()
        return loss

    def _move(self) -> None:
        """Step every inner optimizer once. Alone this is compiled."""
        try:
            self._to_directions()
            self._decay_weights()
            before = [u.copies() for u in self._units] if self._normalize_update else []
            for inner in self._inner.optimizers:
                inner.step()
            for units, copies in zip(self._units[: len(before)], before, strict=True):
                rates = [self._group_of(units.weights[i])["lr"] for i in units.graded]
                units.normalize_update(copies, rates)
        finally:
            self._to_weights()

    def _move_with(self, closure: Callable[[], Any], loss: Any) -> Any:
        """Step an inner optimizer that may evaluate the loss again after moving v and g.

        It may also move weights without gradients, so all are v.
        """
        versions: list[int] | None = None

        def evaluate() -> Any:
            nonlocal loss, versions
            is_known, versions = versions == self._inner.versions(), None
            if is_known:  # nothing was moved since the closure was evaluated
                return loss
            self._to_weights()
            for weight in self._weights:
                weight.clear_gradients()
            with torch.enable_grad():
                loss = closure()
            separate_gradients(self._parameters())
            self._to_directions(every=True)
            return loss

        try:
            self._to_directions(every=True)
            self._decay_weights()
            versions = self._inner.versions()
            return self._inner.optimizers[0].step(evaluate)
        finally:
            self._to_weights()

    def train(self) -> None:
        """Set inner optimizers with modes (schedule-free ones) to training."""
        self._set_mode("train")

    def eval(self) -> None:
        """Set inner optimizers with modes (schedule-free ones) to evaluation."""
        self._set_mode("eval")

    @torch.no_grad()
    def _set_mode(self, mode: str) -> None:
        inner = [each for each in self._inner.optimizers if hasattr(each, mode)]
        if not inner:
            return
        self._begin()
        try:
            self._to_directions(every=True, gradients=False)
            for each in inner:
                getattr(each, mode)()
        finally:
            self._to_weights()
            self._end(clear=False)

    @disable_dynamo
    def _begin(self) -> None:
        """Check and prepare all that a step needs.

        Not compiled, so what depends on memory, hooks and states holds in a compiled step too.
        """
        self._check_memory()
        for units in self._units:
            units.find_gradients()
        self._held = self._norms.targets(self._units, self.param_groups[0].get("steps", 0) + 1)
        self._is_new = False
        separate_gradients(self._parameters())
        self._inner.write_options(self.param_groups)
        if self._shown is not None:
            self._inner.write_state(self._shown)
        # Hooks registered for all optimizers would see a model that holds v.
        self._hooks = [(hooks, dict(hooks)) for hooks in GLOBAL_OPTIMIZER_HOOKS]
        for hooks, _ in self._hooks:
            hooks.clear()

    @disable_dynamo
    def _end(self, *, clear: bool = True) -> None:
        """Take over what the inner optimizers left; retract ‖v‖."""
        for hooks, before in self._hooks:
            hooks.update(before)
        self._norms.move(self._units, self._held)
        del self._hooks, self._held
        for weight in self._weights if clear else ():
            weight.clear_gradients()
        self._inner.read_options(self.param_groups)
        for group in self.param_groups:
            if "steps" in group:
                group["steps"] += 1
        if self._is_read and self._shown is not None:
            self._show(self._shown)
        else:
            self._shown = None

    def _to_directions(self, *, every: bool = False, gradients: bool = True) -> None:
        for units in self._units:
            units.to_directions(
                train_g=self._train_g, project=self._project, every=every, gradients=gradients
            )

    def _to_weights(self) -> None:
        for units in self._units:
            if not torch.compiler.is_compiling():
                units.bind_moved()
            units.to_weights()

    def _decay_weights(self) -> None:
        """Apply w ← (1 − lr·weight_decay)·w for ``weight_decay_on="w"``: of w, g alone changes."""
        for units in self._units if self._inner.decay_on == "w" else ():
            groups = [self._group_of(units.weights[i]) for i in units.graded]
            units.shrink([1 - float(g["lr"]) * (g.get("weight_decay") or 0) for g in groups])

    def _group_of(self, weight: InPlaceWeight) -> dict[str, Any]:
        return self.param_groups[self._inner.group_of[weight.weight]]

    # ---- Memory.

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
        for each in self._weights if self._is_new else ():
            each.check_owner()
        self._follow()

    def _follow(self) -> None:
        """Follow the model to other memory, and before the first step to other weights, such as
        those of rank 0 in DistributedDataParallel: ‖v‖ is their norm."""
        if any(weight.moved() for weight in self._weights):
            self._bind()
        if self._is_new:
            self._norms.start(self._weights)
        for p, state in (self._shown or {}).items():
            if p in self._found:
                self._found[p].check_own_state(state, complete=False)
                self._found[p].write_own_state(state)

    def _bind(self) -> None:
        """Follow the model to another device, dtype or memory."""
        for weight in self._weights:
            weight.bind()
        self._units = units_by_device(self._weights, self._log)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"])

    # ---- State.

    @property
    def state(self) -> defaultdict[Any, Any]:
        """What the next step uses, by the model's parameters. Empty before a step.

        Until it is read here it lies in the inner optimizers; from then on it lies here between
        steps, and they get their parts for the time of a step.
        """
        self._is_read = True
        if self._shown is None:
            self._shown = defaultdict(dict)
            self._show(self._shown)
        return self._shown

    @state.setter
    def state(self, value: Any) -> None:
        self._shown = defaultdict(dict, value)

    def _show(self, shown: dict[Any, Any]) -> None:
        """Take the state back from the inner optimizers."""
        for p, state in self._inner.take_state(self._parameters()).items():
            ours = shown.setdefault(p, state)
            if ours is not state:
                ours.clear()
                ours.update(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in torch's layout, g and ‖v‖ included."""
        self._follow()
        was_read, shown = self._is_read, self.state
        chosen = [p for p in self._parameters() if shown or p in self._found]
        states = {p: {**shown.get(p, {})} for p in chosen}
        for p, weight in self._found.items():
            states[p] |= weight.joined_state({})
        try:
            self.state = states
            return super().state_dict()
        finally:
            self._shown, self._is_read = shown, was_read

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state; the model's weights are loaded with the model."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_same_kind(self.param_groups, state_dict["param_groups"])
        saved = self._inner.saved_states(state_dict, list(self._parameters()))
        self._check_memory()
        for group, theirs in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(options_of(theirs, COMPARED.values()))
        self._inner.write_options(self.param_groups)
        for p, state in saved.items():
            if (weight := self._found.get(p)) is not None:
                if weight.copy is not None:  # a run in float32 has none
                    state.setdefault("float32", weight.weight.detach())
                weight.write_own_state(state)
        self._inner.write_state(saved)
        for inner in self._inner.optimizers:
            inner.load_state_dict(inner.state_dict())  # which moves it to devices and types
        self._inner.read_options(self.param_groups)
        self.state = {}
        if saved:
            self._is_new = False
            self._show(self.state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        """For a copy or a pickle; take the model along in the same one, or its weights are lost."""
        return {k: v for k, v in self.__dict__.items() if not k.startswith(_NOT_COPIED)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._ids = [id(p) for p in self._parameters()]
        self._bind()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise once the optimizer is built: its groups are fixed."""
        if "_inner" in self.__dict__:
            raise ValueError("add parameter groups by building a new WeightNormOptimizer")
        super().add_param_group(param_group)


_NOT_COPIED = ("step", "_units", "_ids", "_optimizer_", "_zero_grad_")
"""Beginnings of names: what is found again, hooks, and what torch makes itself."""
