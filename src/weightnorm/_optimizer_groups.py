"""The inner optimizers: which parameter is in which of their groups, options and state."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from weightnorm._dtensor import refuse_flattened
from weightnorm._in_place import InPlaceWeight, State
from weightnorm.layers import Dim, PlainWeight, Where, memory_key, select

Factory = Callable[..., torch.optim.Optimizer]
ROLES = ("directions", "lengths", "others")
DECAYS = ("auto", "parts", "w", "g", None)
_NOT_OPTIONS = ("params", "param_names")
COMPARED = {
    "weight_decay_on": "weight_decay_on",
    "scale": "g_scale",
    "retract": "retract",
    "v_norm": "v_norm",
    "project": "project",
}
"""Arguments by the group keys that `load_state_dict` compares; not forwarded."""
_OWN_KEYS = (*COMPARED.values(), "steps")


@dataclass
class Bucket:
    """Parameters that form one parameter group of an inner optimizer.

    g has no group of its own where another one of the same optimizer has the same options:
    torch.distributed.checkpoint cannot flatten a group without model parameters.
    """

    settings: dict[str, Any]
    decays: bool
    """Whether the inner optimizer's weight decay acts on it."""
    roles: list[str] = field(default_factory=list)
    model_params: list[nn.Parameter] = field(default_factory=list)
    inner_params: list[nn.Parameter] = field(default_factory=list)
    has_weights: bool = False
    """Whether v or g of a normalized weight is among them."""
    optimizer: int = 0
    group: int = 0
    """The numbers of the inner optimizer and of its group."""


class InnerOptimizers:
    """The optimizers of v, of g and of all other parameters.

    Args:
        groups: the user's parameter groups.
        found: the weights to normalize.
        factories: by role, those that have an optimizer of their own.
        decay_on: the argument `weight_decay_on`.
        log: whether s = log g is trained.
        train_g: whether g is.
        matrices: whether directions are handed over as matrices.
        normalize_update: whether updates are rescaled.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        found: dict[nn.Parameter, InPlaceWeight],
        factories: dict[str, Factory],
        *,
        decay_on: str | None,
        log: bool,
        train_g: bool,
        matrices: bool,
        normalize_update: bool,
    ) -> None:
        build = functools.partial(_build, groups, found, factories, train_g, matrices)
        roles = {"auto": {*ROLES}, "parts": {*ROLES}, "g": {"lengths", "others"}}
        self.optimizers, self.buckets = build(roles.get(decay_on or "", {"others"}))
        if decay_on == "auto":
            if any(b.has_weights and group.get("weight_decay") for b, group in self.groups()):
                is_l2 = not log and adds_decay_to_gradient(factories["directions"])
                own = "lengths" in factories
                decay_on = ("g" if is_l2 and not own else "w") if train_g else None
                decaying = {"others", *(["lengths"] if own or decay_on == "g" else [])}
                self.optimizers, self.buckets = build(decaying)
        elif decay_on in ("w", "g"):
            for bucket, group in self.groups():
                if "directions" in bucket.roles and "weight_decay" not in group:
                    raise ValueError(
                        f"weight_decay_on={decay_on!r} needs an optimizer with `weight_decay`; it "
                        f"has {sorted(options_of(group))}"
                    )
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers) and (
            len(self.optimizers) > 1 or normalize_update
        ):
            raise ValueError(
                "LBFGS evaluates the loss many times per step, so it cannot be one of several "
                "optimizers, or have normalize_update; use it for all parameters: "
                "WeightNormOptimizer(model, torch.optim.LBFGS)"
            )
        self.decay_on = decay_on
        self._found = found
        self.group_of = {p: i for i, b in enumerate(self.buckets) for p in b.model_params}
        """The number of the group that has a parameter of the model."""
        self._mover = {
            p: self.optimizers[b.optimizer] for b in self.buckets for p in b.inner_params
        }

    def groups(self) -> Iterator[tuple[Bucket, dict[str, Any]]]:
        """Yield the parameter groups of the inner optimizers, in the order of ours."""
        for bucket in self.buckets:
            yield bucket, self.optimizers[bucket.optimizer].param_groups[bucket.group]

    def versions(self) -> list[int]:
        """Return how often the parameters that the inner optimizers move were written to."""
        return [p._version for p in self._mover]

    def write_options(self, ours: list[dict[str, Any]]) -> None:
        """Take over the options of our groups. Where weight decay does not act on v or g, the inner
        value is 0; ours keeps the user's."""
        for group, (bucket, inner) in zip(ours, self.groups(), strict=True):
            inner.update(options_of(group, _OWN_KEYS))
            if not bucket.decays and "weight_decay" in inner:
                inner["weight_decay"] = 0.0
            if self.decay_on == "auto" and bucket.has_weights and inner.get("weight_decay"):
                raise ValueError(
                    "weight_decay was 0 when the optimizer was built, so it was not decided what "
                    'it acts on; build it with weight_decay_on="w" (or "parts", "g")'
                )

    def read_options(self, ours: list[dict[str, Any]]) -> None:
        """Hand to our groups what the inner optimizers changed in theirs."""
        for group, (bucket, inner) in zip(ours, self.groups(), strict=True):
            group.update(options_of(inner, () if bucket.decays else ("weight_decay",)))

    def write_state(self, states: dict[nn.Parameter, State]) -> None:
        """Take over the state of the model's parameters."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for p, state in states.items():
            parts: dict[Any, State] = {p: state}
            if p in self._found:
                parts = self._found[p].split_state(state)
            for moved, part in parts.items():
                if moved in self._mover:
                    self._mover[moved].state[moved] = part

    def take_state(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, State]:
        """Return the state by the model's parameters; the inner optimizers keep none."""
        kept: dict[Any, State] = {}
        for optimizer in self.optimizers:
            kept.update(optimizer.state)
            optimizer.state.clear()
        return {
            p: self._found[p].joined_state(kept) if p in self._found else kept.get(p, {})
            for p in parameters
        }

    def saved_states(
        self, state_dict: dict[str, Any], parameters: list[nn.Parameter]
    ) -> dict[nn.Parameter, State]:
        """Return the saved state of each parameter; raise if it is that of another model."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        found = zip(parameters, map(state_dict["state"].get, numbers), strict=True)
        saved = {p: dict(state) for p, state in found if state}
        for p, state in saved.items():
            if p in self._found:
                self._found[p].check_own_state(state)
            elif "v_norm" in state:
                raise ValueError(
                    f"the state has g for a parameter of shape {tuple(p.shape)} that is not "
                    "normalized here; expected one of a WeightNormOptimizer with the same weights"
                )
        return saved


def check_same_kind(ours: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Raise unless the groups of a saved state are those of an optimizer like ours."""
    decays = any(group.get("weight_decay") for group in (*ours, *saved))
    for argument, key in COMPARED.items():
        expected = ours[0][key]
        got = saved[0].get(key, expected) if saved else expected
        if got != expected and (decays or key != "weight_decay_on"):
            raise ValueError(
                f"the loaded state dict is of an optimizer with {argument}={got!r}, this one "
                f"has {expected!r}; build it as it was when the state was saved"
            )
    sizes, expected_sizes = ([len(group["params"]) for group in each] for each in (saved, ours))
    if sizes != expected_sizes:
        raise ValueError(
            f"loaded state dict has groups of {sizes} parameters, expected {expected_sizes}: it "
            "doesn't match the size of the optimizer's groups"
        )


def _build(
    groups: list[dict[str, Any]],
    found: dict[nn.Parameter, InPlaceWeight],
    factories: dict[str, Factory],
    train_g: bool,
    matrices: bool,
    decaying: set[str],
) -> tuple[list[torch.optim.Optimizer], list[Bucket]]:
    """Return the inner optimizers and their groups, given the user's groups.

    The inner optimizers' weight decay acts on the roles that are `decaying`.
    """
    owner = {role: role if role in factories else "directions" for role in ROLES}
    if "lengths" in factories and "others" not in factories:
        owner["others"] = "lengths"
    plans: dict[str, list[Bucket]] = {name: [] for name in factories}
    for group in groups:
        buckets: dict[tuple[str, bool, str], Bucket] = {}
        bare = options_of(group, ROLES)
        for role in ROLES:
            # A group's learning rate is not that of an optimizer which is for g alone.
            own = role == owner[role] == "lengths"
            settings = {k: v for k, v in bare.items() if not (own and k == "lr")}
            differs = role in group or settings != bare
            key = owner[role], role in decaying, role if differs else ""
            if key not in buckets:
                buckets[key] = Bucket({**settings, **group.get(role, {})}, role in decaying)
            buckets[key].roles.append(role)
        by_role = {role: bucket for bucket in buckets.values() for role in bucket.roles}
        for p in group["params"]:
            weight = found.get(p)
            moved = by_role["others" if weight is None else "directions"]
            moved.model_params.append(p)
            moved.inner_params += [p] if weight is None else weight.directions
            moved.has_weights |= weight is not None
            if weight is not None and train_g:
                by_role["lengths"].inner_params.append(weight.g)
                by_role["lengths"].has_weights = True
        for (name, _, _), bucket in buckets.items():
            plans[name] += [bucket] if bucket.inner_params else []
    if matrices and any(p.ndim != 2 for b in plans["directions"] for p in b.inner_params):
        raise ValueError(
            "the optimizer of the directions moves matrices only; give g and all other "
            "parameters another one: lengths=functools.partial(torch.optim.AdamW, lr=…)"
        )
    optimizers: list[torch.optim.Optimizer] = []
    for name, plan in plans.items():
        for i, bucket in enumerate(plan):
            bucket.optimizer, bucket.group = len(optimizers), i
        if plan:
            groups_of_it = [{**b.settings, "params": b.inner_params} for b in plan]
            optimizers.append(factories[name](groups_of_it))
    return optimizers, [bucket for plan in plans.values() for bucket in plan]


def options_of(group: dict[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """Return a group's options."""
    return {k: v for k, v in group.items() if k not in (*_NOT_OPTIONS, *without)}


def plain_weights(
    model: nn.Module, where: Where | None, dim: Dim | Callable[[str, nn.Module], Dim]
) -> tuple[dict[nn.Parameter, PlainWeight], dict[str, nn.Parameter]]:
    """Return the weights to normalize, tied ones once, and by name those that are frozen."""
    found: dict[nn.Parameter, PlainWeight] = {}
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
        if parameter.requires_grad:
            found.setdefault(parameter, chosen)
        else:
            frozen[chosen.path] = parameter
    if not found:
        raise ValueError(
            f"nothing to normalize in {type(model).__name__}: all chosen weights are frozen"
        )
    _refuse_shared_memory(model, {id(weight) for weight in found})
    return found, frozen


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


def in_place(weight: PlainWeight, matrices: bool) -> InPlaceWeight:
    """Return a weight with g and ‖v‖; with `matrices`, one that hands over its matrices."""
    units, shape = weight.units, weight.parameter.shape
    blocks = _stacked(weight.module, weight.name)
    if isinstance(units.dim, tuple):  # a stack of matrices
        blocks = shape[: len(units.dim) - 1].numel()
    made = InPlaceWeight(weight.path, weight.parameter, units, blocks if matrices else 0)
    made.owner = weakref.ref(weight.module), weight.name
    return made


def _stacked(layer: nn.Module, name: str) -> int:
    """Return how many matrices a layer stacks along axis 0 of a weight."""
    if isinstance(layer, nn.MultiheadAttention) and name == "in_proj_weight":
        return 3
    if name.startswith("weight_hr"):  # the projection of an LSTM
        return 1
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        return 4
    return 3 if isinstance(layer, nn.GRU | nn.GRUCell) else 1


def check_options(
    scale: str, train_g: bool, project: bool, retract: Any, weight_decay_on: str | None
) -> None:
    """Raise for options that cannot work."""
    if scale not in ("linear", "log"):
        raise ValueError(f'scale={scale!r} is unknown; expected "linear" or "log"')
    if weight_decay_on not in DECAYS:
        raise ValueError(
            f"weight_decay_on={weight_decay_on!r} is unknown; expected one of {DECAYS}"
        )
    if not 0 <= retract <= 1:
        raise ValueError(
            f"retract={retract!r}; expected a number from 0 (no retraction) to 1 (‖v‖ is held); "
            "the norm to hold it at is `v_norm`"
        )
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


def moves_matrices(inner: Factory) -> bool:
    """Return whether an optimizer takes matrices only."""
    return _is_one_of(inner, "Muon")


def adds_decay_to_gradient(inner: Factory) -> bool:
    """Return whether this is an optimizer of torch whose `weight_decay` is added to the gradient,
    as weight_decay·w."""
    if isinstance(inner, functools.partial) and inner.keywords.get("decoupled_weight_decay"):
        return False
    l2 = ("SGD", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD")
    return _is_one_of(inner, *l2) and not _is_one_of(inner, "AdamW")


def _is_one_of(inner: Factory, *names: str) -> bool:
    made = inner.func if isinstance(inner, functools.partial) else inner
    classes = tuple(getattr(torch.optim, name) for name in names if hasattr(torch.optim, name))
    return isinstance(made, type) and issubclass(made, classes)
