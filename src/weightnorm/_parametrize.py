"""Parametrize a tensor of a module as w = g·v/‖v‖, and turn it into a plain parameter again.

Built on torch.nn.utils.parametrize: the module gets a class of its own, with a property in place of
the tensor. Added to torch's implementation:

- reading the tensor takes fewer Python calls;
- modules can be copied, pickled and sent to spawned processes, and each copy has its own class
  (torch's copies share one, so removing the parametrization from a copy breaks the original);
- ``load_state_dict`` accepts v and g under the keys of both of torch's flavours, and plain weights;
- ``reset_parameters`` initializes the weight through v and g (torch's fills a temporary tensor);
- a recurrent layer computes its weights once per forward pass and keeps none of them;
- ``make_plain`` replaces the tensor by a plain parameter and returns a function to undo it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm as TorchHook

from weightnorm._weight_norm import (
    WeightNorm,
    WeightNormParametrizationList,
    compute,
    is_plain,
)


def parametrizations_of(module: nn.Module) -> Any:
    """Return the module's ParametrizationLists by tensor name; empty if there are none.

    (torch's ``is_parametrized`` reads the attribute, so it is also true of a wrapper that forwards
    attributes to the module it wraps, as peft's do.)
    """
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    own = module._modules.get("parametrizations")
    if not isinstance(own, nn.ModuleDict):
        return {}
    return own if all(isinstance(one, ParametrizationList) for one in own.values()) else {}


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of a model with their paths, without those of parametrizations."""
    inner = {
        part
        for module in model.modules()
        for parametrizations in parametrizations_of(module).values()
        for part in parametrizations.modules()
    }
    return [(path, module) for path, module in model.named_modules() if module not in inner]


def register(
    module: nn.Module, name: str, weight_norm: WeightNorm | WeightNormParametrizationList
) -> WeightNormParametrizationList:
    """Parametrize ``module.<name>``, by new v and g or by those of another module's tensor."""
    tied = isinstance(weight_norm, ParametrizationList)
    new = nn.Identity() if tied else weight_norm
    parametrize.register_parametrization(module, name, new, unsafe=True)
    lists = parametrizations_of(module)
    if tied:
        lists[name] = weight_norm
    lists[name].__class__ = WeightNormParametrizationList
    _extend_class(module, [name])
    registered: WeightNormParametrizationList = lists[name]
    return registered


def unregister(module: nn.Module, name: str, parameters: Mapping[str, nn.Parameter | None]) -> None:
    """Undo `register`; `parameters` are those that the module had before, in their order."""
    weight = parameters[name]
    assert weight is not None
    make_plain(module, {name: weight})
    _restore_entries(module._parameters, parameters, ())


def make_plain(module: nn.Module, weights: Mapping[str, nn.Parameter]) -> Callable[[], list[str]]:
    """Replace normalized tensors of a module by plain `weights`.

    The returned function undoes it exactly. It returns the names of the weights that have been
    replaced meanwhile, by pruning or another parametrization, which it removes.
    """
    cls, attributes = type(module), dict(module.__dict__)
    parametrizations, hooks = parametrizations_of(module), torch_hooks(module)
    registries: list[dict[Any, Any]] = [
        module._parameters,
        module._buffers,
        module._modules,
        module._forward_pre_hooks,
    ]
    if parametrizations:
        registries.append(parametrizations._modules)
    before = [dict(registry) for registry in registries]
    for name in weights:
        if name in hooks:
            key = next(k for k, hook in module._forward_pre_hooks.items() if hook is hooks[name])
            del module._forward_pre_hooks[key]
            del module._parameters[f"{name}_g"], module._parameters[f"{name}_v"]
            module.__dict__.pop(name, None)
            continue
        del parametrizations[name]
        if parametrizations:  # the class itself is not changed: copies made by torch share it
            module.__class__ = _class_without(type(module), name)
        else:
            module.__class__ = _plain_class(module)
            del module._modules["parametrizations"]
    removed = [old.keys() - new.keys() for old, new in zip(before, registries, strict=True)]
    _set_parameters(module, weights)
    plain = [{*registry} for registry in registries]

    def undo() -> list[str]:
        replaced = [name for name in weights if module._parameters.get(name) is None]
        for registry, keys in zip(registries, plain, strict=True):
            for key in registry.keys() - keys if replaced else ():
                del registry[key]
        for name in weights:
            module._parameters.pop(name, None)
            module.__dict__.pop(name, None)
            if name in attributes:  # the weight that torch's hook has computed
                module.__dict__[name] = attributes[name]
        module.__class__ = cls
        for registry, old, keys in zip(registries, before, removed, strict=True):
            _restore_entries(registry, old, keys)
        refresh_recurrent(module)
        return replaced

    return undo


def _class_without(cls: type, name: str) -> type:
    """Copy a class without the property of this name."""
    removed = {"__dict__", "__weakref__", name}
    kept = {k: v for k, v in vars(cls).items() if k not in removed}
    return type(cls.__name__, cls.__bases__, kept)


def torch_hooks(module: nn.Module) -> dict[str, Any]:
    """Return the hooks of torch's older weight norm by the names of their tensors.

    Each computes ``<name>`` from ``<name>_g`` and ``<name>_v`` before a forward pass.
    """
    hooks = module._forward_pre_hooks.values()
    return {hook.name: hook for hook in hooks if isinstance(hook, TorchHook)}


class NormalizeWhenMaterialized:
    """Forward pre-hook that normalizes a weight of a lazy module once it has a shape."""

    def __init__(self, name: str, apply: Callable[[], None]) -> None:
        self.name, self.apply = name, apply

    def __call__(self, module: nn.Module, inputs: object) -> None:
        self.apply()
        self.remove(module)

    def remove(self, module: nn.Module) -> None:
        """Take the hook off the module."""
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]


def pending_hooks(module: nn.Module) -> dict[str, NormalizeWhenMaterialized]:
    """Return the hooks of weights to be normalized when a lazy module is materialized."""
    hooks = module._forward_pre_hooks.values()
    return {h.name: h for h in hooks if isinstance(h, NormalizeWhenMaterialized)}


def refresh_recurrent(module: nn.Module) -> None:
    """Update the list of weights that a recurrent layer passes to its kernel."""
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


_CELL_AND_ATTENTION_WEIGHTS = (
    "weight_ih",
    "weight_hh",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
)
"""Weights of the cells and attention layers that have several, in torch's order."""


def _set_parameters(module: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    """Register parameters in the order of a plain layer: weights before biases."""
    parameters = {**weights, **module._parameters}
    ordered = getattr(module, "_flat_weights_names", _CELL_AND_ATTENTION_WEIGHTS)
    first = [name for name in ordered if name in parameters]
    module._parameters.clear()
    module._parameters.update({name: parameters[name] for name in [*first, *parameters]})
    refresh_recurrent(module)


def _restore_entries(now: dict[Any, Any], before: Mapping[Any, Any], keys: Iterable[Any]) -> None:
    """Put the entries `keys` of `before` back into `now`, in their former positions."""
    now.update({key: before[key] for key in keys})
    ordered = {key: now[key] for key in before if key in now}
    ordered.update(now)
    now.clear()
    now.update(ordered)


def _extend_class(module: nn.Module, names: Iterable[str]) -> None:
    """Add to the class that torch made for this module what the module docstring lists."""
    cls: Any = type(module)
    for name in names:
        setattr(cls, name, _fast_property(name, getattr(cls, name)))
    cls._has_weight_norm = True
    cls.__reduce_ex__ = _reduce_ex
    cls._load_from_state_dict = _load_from_state_dict
    cls.__prepare_scriptable__ = _refuse_scripting
    for method in ("reset_parameters", "_reset_parameters"):
        if hasattr(cls, method):
            setattr(cls, method, _reset_through_parts(method))
    if "__deepcopy__" in cls.__dict__:  # torch's: the copy would share this class
        del cls.__deepcopy__
    if isinstance(module, nn.RNNBase):
        cls.forward = _recurrent_forward
        cls._flat_weights = property(_flat_weights, _ignore)
        cls._init_flat_weights = _drop_flat_weights
        cls._update_flat_weights = _ignore
        cls.flatten_parameters = _ignore
        module._init_flat_weights()


def _plain_class(module: nn.Module) -> Any:
    """Return the class from before weight norm, also if FSDP2 has derived another since."""
    cls = type(module)
    return next((c for c in cls.__mro__ if "_has_weight_norm" in vars(c)), cls).__bases__[0]


def _fast_property(name: str, torchs: property) -> property:
    """Return torch's property with fewer calls per read."""

    def read(module: nn.Module) -> Any:
        parametrizations = module._modules["parametrizations"]._modules[name]  # type: ignore
        if parametrize._cache_enabled or not is_plain(parametrizations):
            return torchs.fget(module)  # type: ignore[misc]
        return compute(parametrizations)

    return property(read, torchs.fset)


def _reduce_ex(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    base = _plain_class(module)
    # Python 3.10 has no object.__getstate__; torch's own on this class only raises.
    state = base.__getstate__(module) if hasattr(base, "__getstate__") else dict(module.__dict__)
    return _rebuild, (base, tuple(parametrizations_of(module))), state


def _refuse_scripting(module: nn.Module) -> None:
    raise RuntimeError(
        f"torch.jit.script cannot compile a weight-normalized {_plain_class(module).__name__}, "
        "whose weight is computed. Script the model inside `with weightnorm.folded(model):`, or "
        "use torch.jit.trace"
    )


def part_keys(path: str, format: str) -> tuple[str, str]:
    """Return the keys of g and v of the weight at `path`.

    >>> part_keys("encoder.weight", "hook")
    ('encoder.weight_g', 'encoder.weight_v')
    """
    if format == "hook":
        return f"{path}_g", f"{path}_v"
    prefix, dot, name = path.rpartition(".")
    inner = f"{prefix}{dot}parametrizations.{name}"
    return f"{inner}.original0", f"{inner}.original1"


def log_key(path: str) -> str:
    """Return the key that marks a log-scale."""
    return part_keys(path, "parametrize")[0].removesuffix("original0") + "0.log_scale"


@torch.no_grad()
def _load_from_state_dict(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Load v and g from their keys in either of torch's flavours, or from the plain weight."""
    others = {prefix + key for key in (*module._parameters, *module._buffers)}
    for name, parametrizations in parametrizations_of(module).items():
        if not isinstance(parametrizations, WeightNormParametrizationList):
            continue
        path = f"{prefix}{name}"
        own, mark = part_keys(path, "parametrize"), log_key(path)
        flavours = [own, part_keys(path, "hook"), (path,)]
        found = [keys for keys in flavours if state.keys() >= {*keys} and others.isdisjoint(keys)]
        if not found:
            continue  # torch reports what is missing
        stored = [[state.pop(key) for key in keys] for keys in found]
        is_log = found[0] is own and state.pop(mark, None) is not None
        try:
            if len(found) > 1:
                (*_, first), (*_, second) = found[:2]
                raise ValueError(f"{first!r} and {second!r} are both values of it; remove one")
            assign = metadata.get("assign_to_params_buffers", False)
            g, v = parametrizations.loaded(stored[0], is_log=is_log, assign=assign)
        except Exception as error:  # torch raises one error for all modules
            errors.append(f"{path}: {error}")
            g, v = parametrizations.original0, parametrizations.original1
        state.update(zip(own, (g, v), strict=True))
        if "log_scale" in parametrizations[0]._buffers:
            state[mark] = torch.tensor(1.0)
    _plain_class(module)._load_from_state_dict(
        module, state, prefix, metadata, strict, missing, unexpected, errors
    )


def _reset_through_parts(method: str) -> Callable[..., None]:
    """Return the layer's own ``reset_parameters``, with its result written to v and g.

    It runs while the layer is plain: it may fill a weight, a part of it, or all parameters.
    """

    def reset(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        lists = dict(parametrizations_of(module).items())
        with torch.no_grad():
            values = {name: getattr(module, name).clone() for name in lists}
        trained = {k: any(p.requires_grad for p in v.parameters(False)) for k, v in lists.items()}
        undo = make_plain(
            module, {k: nn.Parameter(w.clone(), trained[k]) for k, w in values.items()}
        )
        try:
            getattr(module, method)(*args, **kwargs)
            plain = dict(module._parameters)
        finally:
            undo()
        for name, one in lists.items():
            weight = plain[name]
            assert weight is not None
            if isinstance(one, WeightNormParametrizationList):
                one.right_inverse(weight)
            elif not torch.equal(weight, values[name]):  # it inverts its own parametrizations
                setattr(module, name, weight.detach())

    return reset


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """Return an empty module of the parametrized class, to be filled by unpickling."""
    module = base.__new__(base)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    if isinstance(module, nn.RNNBase):
        module._flat_weights_names = []
    _extend_class(module, names)
    return module


_THREAD = threading.local()
"""``running``: the recurrent layers whose forward pass this thread is in, with their weights."""


def _recurrent_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the layer with weights computed once, from the current v and g.

    torch's RNN passes the list ``_flat_weights`` to its kernel. Left alone, that list would hold
    copies of the weights that never change (pytorch#65688).
    """
    running = _THREAD.__dict__.setdefault("running", [])
    running.append((module, [getattr(module, name) for name in module._flat_weights_names]))
    try:
        return _plain_class(module).forward(module, *args, **kwargs)
    finally:
        running.pop()


def _flat_weights(module: Any) -> list[Any]:
    """Return the weights of the forward pass that this thread is in, and None outside of one.

    (torch's layer also writes to this list whenever a parameter is set, as FSDP2 does.)
    """
    for other, weights in reversed(getattr(_THREAD, "running", ())):
        if other is module:
            return weights  # type: ignore[no-any-return]
    return [None] * len(module._flat_weights_names)


def _drop_flat_weights(module: Any) -> None:
    """Keep no list of weights: ``_flat_weights`` is computed when it is read."""
    module.__dict__.pop("_flat_weights", None)
    # If torch takes the parametrization off, the plain class rebuilds the list on seeing dead refs.
    module._flat_weight_refs = [_dead_reference] * len(module._flat_weights_names)


def _dead_reference() -> None:
    """Return None, as a weakref does once its object is gone."""


def _ignore(module: Any, *args: object) -> None:
    """Do nothing: there is no list of weights to update."""
