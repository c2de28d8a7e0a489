"""Parametrize a tensor of a module as w = g·v/‖v‖, and turn it into a plain parameter again.

Built on torch.nn.utils.parametrize: the module gets a class of its own, with a property in place of
the tensor. Added to torch's implementation:

- reading the tensor takes fewer Python calls;
- modules can be copied, pickled and sent to spawned processes, and each copy has its own class
  (torch's copies share one, so removing the parametrization from a copy breaks the original);
- ``load_state_dict`` accepts v and g under the keys of both of torch's flavours, and plain weights;
- ``reset_parameters`` initializes the weight through v and g (torch's fills a temporary tensor);
- a recurrent layer computes its weights once per forward pass and keeps none of them;
- ``unparametrize`` replaces the tensor by a plain parameter and returns a function to undo it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm as TorchHook

from weightnorm import _kernels, functional
from weightnorm._dtensor import any_true, placed_like
from weightnorm._units import EPS, Units

Scale = Literal["linear", "log"]
SCALES = ("linear", "log")


class WeightNorm(nn.Module):
    """Compute w = g·v/‖v‖: the module that torch.nn.utils.parametrize evaluates.

    ``forward(g, v)`` returns w, and ``right_inverse(w)`` returns (g, v). With ``scale="log"`` the
    first of the two is s, with g = eˢ. Arguments as in ``weight_norm``; `units` instead of `dim`.
    """

    mask: Tensor | None

    def __init__(
        self,
        units: Units,
        *,
        scale: Scale = "linear",
        mask: Tensor | None = None,
        eps: float = EPS,
    ) -> None:
        super().__init__()
        if scale not in SCALES:
            raise ValueError(f"scale={scale!r} is unknown; expected one of {SCALES}")
        self.units, self.scale, self.eps = units, scale, eps
        self.register_buffer("mask", mask, persistent=False)
        self.plain = mask is None and scale == "linear"
        if scale == "log":
            # A key of its own in the state dict, so that s is never loaded as g, or g as s. Not a
            # bool: averages of buffers must leave it as it is.
            self.register_buffer("log_scale", torch.tensor(1.0))

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        if not self.plain:
            g, v = self.length(g), functional.masked(v, self.mask)
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            return self._traced(g=g, v=v)
        return _kernels.compose(v, g, self.units, self.eps)

    def _traced(self, *, g: Tensor, v: Tensor) -> Tensor:
        """The same for torch.jit.trace, which must record one graph with and without gradients."""
        with torch.enable_grad(), warnings.catch_warnings():
            # The formula branches on the weight's shape, which is a constant.
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
            return _kernels.formula(v, g, self.units, self.eps)

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        v, g = functional.decompose(w, self.units, mask=self.mask, eps=self.eps)
        return self.stored(g), v

    def length(self, stored: Tensor) -> Tensor:
        """Compute g from the stored parameter: the parameter itself, or eˢ."""
        return stored.exp() if self.scale == "log" else stored

    def stored(self, g: Tensor) -> Tensor:
        """Compute the parameter to store for g: g itself, or s = log g.

        A log-scale cannot represent g = 0, and stores the smallest normal number instead.
        """
        return g.clamp_min(torch.finfo(g.dtype).tiny).log() if self.scale == "log" else g

    def extra_repr(self) -> str:
        groups = f", groups={self.units.groups}" if self.units.groups > 1 else ""
        masked = ", masked" * (self.mask is not None)
        return f"dim={self.units.dim}{groups}, scale={self.scale!r}{masked}"


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


class WeightNormParametrizationList(ParametrizationList):
    """Hold original0 = g (or s) and original1 = v of one normalized weight."""

    original0: Tensor
    original1: Tensor

    def forward(self) -> Tensor:
        return _compute(self) if is_plain(self) else super().forward()

    @torch.no_grad()
    def right_inverse(self, value: Tensor) -> None:
        """Set v and g by copying, so that they never share memory with `value`, as torch's do."""
        if value.shape != self.original1.shape:
            raise ValueError(
                f"got a weight of shape {tuple(value.shape)}, "
                f"expected {tuple(self.original1.shape)}"
            )
        for original, part in zip(
            (self.original0, self.original1), self._inverted(value), strict=True
        ):
            original.copy_(placed_like(part, original))

    def _inverted(self, weight: Tensor) -> Any:
        """Return the values of original0 and original1 that give this weight."""
        inverse: Any = weight
        for parametrization in reversed(list[Any](self)):
            inverse = parametrization.right_inverse(inverse)
        return inverse

    def loaded(self, stored: list[Tensor], *, is_log: bool, assign: bool) -> tuple[Tensor, Tensor]:
        """Return the values of original0 and original1 for [w], [g, v] or [s, v] of a checkpoint.

        v is masked, so that the state dict alone determines w. With `assign` the type and device
        stay those of the checkpoint.
        """
        weight_norm: Any = self[0]
        own_g, own_v, mask = self.original0, self.original1, weight_norm.mask
        _check_weight(stored[-1], own_v)
        if not (assign or own_v.is_meta):
            stored = [x.to(own_v.device, own_v.dtype) for x in stored]
        if len(stored) == 1:
            g, v = self._inverted(stored[0])
            if not g.is_meta and any_true(g.isfinite().logical_not()):
                raise ValueError("‖w‖ is not finite, so w cannot be represented by v and g")
            return placed_like(g, own_g), placed_like(v, own_v)
        g, v = stored
        if g.shape != own_g.shape and not (own_g.ndim == 0 and g.shape == (1,)):
            raise ValueError(
                f"g has shape {tuple(g.shape)} in the checkpoint and {tuple(own_g.shape)} here: "
                "its units lie along another axis. To load the weight itself, pass "
                'convert_state_dict(state, to="folded"); to keep v and g, apply weight norm with '
                "the checkpoint's dim (torch's is 0, also for transposed convolutions)"
            )
        if is_log and weight_norm.scale != "log":
            g = g.exp()
        if weight_norm.scale == "log" and not is_log:  # w stays the same: g is positive
            v = torch.where(weight_norm.units.spread(g < 0, v), -v, v)
            g = weight_norm.stored(g.abs())
        if mask is not None:
            v = functional.masked(v, (mask != 0).to(v.device))
        return placed_like(g, own_g), placed_like(v, own_v)


def _check_weight(w: Any, own_v: Tensor) -> None:
    """Raise unless this value of a checkpoint, w or v, is a tensor of the shape of v."""
    if not (isinstance(w, Tensor) and w.is_floating_point()):
        kind = w.dtype if isinstance(w, Tensor) else type(w).__name__
        raise TypeError(f"is {kind} in the checkpoint; expected a floating-point tensor")
    if w.shape != own_v.shape:
        raise ValueError(f"has shape {tuple(w.shape)} in the checkpoint, {tuple(own_v.shape)} here")


def is_plain(parametrizations: Any) -> bool:
    """Whether the weight is g·v/‖v‖ of its own v and g and nothing else.

    False with a further parametrization, a hook, another ``forward`` (accelerate's, for offloaded
    parameters), a part that is pruned, and in the replicas of ``nn.DataParallel``: torch's
    implementation serves them.
    """
    if type(parametrizations) is not WeightNormParametrizationList:
        return False
    parameters, modules = parametrizations._parameters, parametrizations._modules
    if len(modules) != 1 or "original1" not in parameters:
        return False
    if "original0" not in parameters and "original0" not in parametrizations._buffers:
        return False
    weight_norm: Any = modules["0"]
    return not (
        "forward" in parametrizations.__dict__
        or parametrizations._forward_pre_hooks
        or parametrizations._forward_hooks
        or weight_norm._forward_pre_hooks
        or weight_norm._forward_hooks
    )


def _compute(parametrizations: Any) -> Tensor:
    """Compute a weight that `is_plain`."""
    parameters = parametrizations._parameters
    g = parameters.get("original0")
    w: Tensor = parametrizations._modules["0"].forward(
        parametrizations._buffers["original0"] if g is None else g, parameters["original1"]
    )
    return w


def freeze_length(parametrizations: WeightNormParametrizationList) -> None:
    """Make g a buffer: ``requires_grad_(True)`` on the model does not train it."""
    g = parametrizations._parameters.pop("original0")
    assert g is not None
    parametrizations.register_buffer("original0", g.detach())


def register(
    module: nn.Module, name: str, weight_norm: WeightNorm
) -> WeightNormParametrizationList:
    """Parametrize ``module.<name>`` by `weight_norm`; its v and g are new parameters."""
    return _register(module, name, weight_norm)


def register_tied(
    module: nn.Module, name: str, parametrizations: WeightNormParametrizationList
) -> None:
    """Parametrize ``module.<name>`` by the v and g of another module's tensor."""
    _register(module, name, nn.Identity())
    parametrizations_of(module)[name] = parametrizations


def _register(
    module: nn.Module, name: str, parametrization: nn.Module
) -> WeightNormParametrizationList:
    parametrize.register_parametrization(module, name, parametrization, unsafe=True)
    registered: WeightNormParametrizationList = parametrizations_of(module)[name]
    registered.__class__ = WeightNormParametrizationList
    _extend_class(module, [name])
    return registered


def unparametrize(module: nn.Module, weights: Mapping[str, nn.Parameter]) -> Callable[[], None]:
    """Replace parametrized tensors by plain `weights`; the returned function undoes it exactly."""
    cls, parametrizations = type(module), parametrizations_of(module)
    saved, children = dict(parametrizations.items()), dict(module._modules)
    for name in weights:
        del parametrizations[name]
    # The class itself is not changed: copies made by torch share it.
    module.__class__ = _class_without(cls, weights) if parametrizations else cls.__bases__[0]
    if not parametrizations:
        del module._modules["parametrizations"]
    _set_parameters(module, weights)

    def undo() -> None:
        for name in weights:
            module._parameters.pop(name, None)  # it may have been pruned, say
            module.__dict__.pop(name, None)
        module.__class__ = cls
        for name in list(parametrizations):
            del parametrizations[name]
        parametrizations.update(saved)
        _restore_entries(module._modules, children, ["parametrizations"])
        refresh_recurrent(module)

    return undo


def _class_without(cls: type, names: Iterable[str]) -> type:
    """Copy a class without the properties of these names."""
    removed = {"__dict__", "__weakref__", *names}
    kept = {k: v for k, v in vars(cls).items() if k not in removed}
    return type(cls.__name__, cls.__bases__, kept)


def unregister(module: nn.Module, name: str, parameters: Mapping[str, nn.Parameter | None]) -> None:
    """Undo `register`; `parameters` are those that the module had before, in their order."""
    weight = parameters[name]
    assert weight is not None
    unparametrize(module, {name: weight})
    _restore_entries(module._parameters, dict(parameters), [])


def remove_torch_hook(module: nn.Module, name: str, weight: nn.Parameter) -> Callable[[], None]:
    """Replace a tensor normalized by torch's older weight norm by a plain `weight`.

    That flavour is a forward pre-hook that computes ``<name>`` from ``<name>_g`` and ``<name>_v``.
    The returned function undoes it exactly.
    """
    key = next(k for k, hook in _torch_hooks(module).items() if hook.name == name)
    computed = module.__dict__.pop(name, None)
    saved, hooks = dict(module._parameters), dict(module._forward_pre_hooks)
    del module._forward_pre_hooks[key]
    for part in (f"{name}_g", f"{name}_v"):
        del module._parameters[part]
    _set_parameters(module, {name: weight})

    def undo() -> None:
        module._parameters.pop(name, None)
        module.__dict__.pop(name, None)
        _restore_entries(module._parameters, saved, [f"{name}_g", f"{name}_v"])
        _restore_entries(module._forward_pre_hooks, hooks, [key])
        if computed is not None:
            setattr(module, name, computed)

    return undo


def torch_hook(module: nn.Module, name: str) -> Any:
    """Return the hook of torch's older weight norm on this tensor, or None."""
    return next((hook for hook in _torch_hooks(module).values() if hook.name == name), None)


def torch_hook_names(module: nn.Module) -> list[str]:
    """Return the names of the tensors that torch's older weight norm has normalized."""
    return [hook.name for hook in _torch_hooks(module).values()]


def _torch_hooks(module: nn.Module) -> dict[int, Any]:
    return {k: h for k, h in module._forward_pre_hooks.items() if isinstance(h, TorchHook)}


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
    ordered = _ordered_parameters(module, weights)
    module._parameters.clear()
    module._parameters.update(ordered)
    refresh_recurrent(module)


def _ordered_parameters(
    module: nn.Module, weights: Mapping[str, nn.Parameter]
) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module and the weights, in the order of a plain layer."""
    parameters = {**weights, **module._parameters}
    ordered = getattr(module, "_flat_weights_names", _CELL_AND_ATTENTION_WEIGHTS)
    first = [name for name in ordered if name in parameters]
    return {name: parameters[name] for name in [*first, *parameters]}


def _restore_entries(now: dict[Any, Any], before: dict[Any, Any], keys: list[Any]) -> None:
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
    cls.register_parameter = _register_parameter
    for method in ("reset_parameters", "_reset_parameters"):
        if hasattr(cls, method):
            setattr(cls, method, reset_through_parts(method))
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
    ours = next(cls for cls in type(module).__mro__ if vars(cls).get("_has_weight_norm"))
    return ours.__bases__[0]


def _fast_property(name: str, torchs: property) -> property:
    """Return torch's property with fewer calls per read."""

    def read(module: nn.Module) -> Any:
        parametrizations = module._modules["parametrizations"]._modules[name]  # type: ignore
        if parametrize._cache_enabled or not is_plain(parametrizations):
            return torchs.fget(module)  # type: ignore[misc]
        return _compute(parametrizations)

    return property(read, torchs.fset)


def _reduce_ex(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    base = _plain_class(module)
    # Python 3.10 has no object.__getstate__; torch's own on this class only raises.
    state = base.__getstate__(module) if hasattr(base, "__getstate__") else dict(module.__dict__)
    return _rebuild, (base, tuple(parametrizations_of(module))), state


def _register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Refuse ``layer.weight = nn.Parameter(…)``: the weight is not a parameter."""
    if name in parametrizations_of(module):
        raise TypeError(
            f"{name} of this {_plain_class(module).__name__} is computed from v and g and cannot "
            f"be replaced by a parameter. To set its value, assign a tensor: layer.{name} = "
            "parameter.detach(). To share a parameter with another layer, share it first, then "
            "normalize both"
        )
    _plain_class(module).register_parameter(module, name, param)


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
        inner = f"{prefix}parametrizations.{name}"
        own, mark = (f"{inner}.original0", f"{inner}.original1"), f"{inner}.0.log_scale"
        flavours = [own, (f"{prefix}{name}_g", f"{prefix}{name}_v"), (f"{prefix}{name}",)]
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
            errors.append(f"{prefix}{name}: {error}")
            g, v = parametrizations.original0, parametrizations.original1
        state.update(zip(own, (g, v), strict=True))
        if "log_scale" in parametrizations[0]._buffers:
            state[mark] = torch.tensor(1.0)
    _plain_class(module)._load_from_state_dict(
        module, state, prefix, metadata, strict, missing, unexpected, errors
    )


def reset_through_parts(method: str) -> Callable[[nn.Module], None]:
    """Return the layer's own ``reset_parameters``, with its result written to v and g.

    It runs on a plain layer with the same attributes, whose normalized weights are parameters: a
    method may fill a weight, a part of it, or all of ``self.parameters()``.
    """

    def reset(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        lists = dict(parametrizations_of(module).items())
        plain = _plain_class(module)
        layer = plain.__new__(plain)
        layer.__dict__.update(module.__dict__)
        children = {k: child for k, child in module._modules.items() if k != "parametrizations"}
        with torch.no_grad():
            weights = {
                name: nn.Parameter(getattr(module, name).clone(), _is_trained(parametrizations))
                for name, parametrizations in lists.items()
            }
        layer.__dict__.update(_parameters=_ordered_parameters(module, weights), _modules=children)
        if isinstance(module, nn.RNNBase):  # without moving its weights into one piece of memory
            named = layer._parameters
            layer.__dict__["_flat_weights"] = [named[name] for name in module._flat_weights_names]
        before = dict(layer.__dict__)
        values = {name: weight.detach().clone() for name, weight in weights.items()}
        getattr(plain, method)(layer, *args, **kwargs)
        for key, value in layer.__dict__.items():  # what it has assigned
            if key not in before or before[key] is not value:
                module.__dict__[key] = value
        module._modules.update(children)
        for name, parameter in layer._parameters.items():
            if isinstance(lists.get(name), WeightNormParametrizationList):
                lists[name].right_inverse(parameter)
            elif name not in lists:
                module._parameters[name] = parameter
            elif not torch.equal(parameter, values[name]):
                setattr(module, name, parameter.detach())  # another parametrization inverts it

    return reset


def _is_trained(parametrizations: Any) -> bool:
    """Whether gradients reach the originals of a parametrized tensor."""
    return any(original.requires_grad for original in parametrizations.parameters(recurse=False))


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
