"""How a tensor of a module becomes a function of v and g, and a tensor again.

Built on torch.nn.utils.parametrize: the module gets a class of its own, with a property in the
tensor's place. Added to it:

- reading the tensor is quicker than torch's way to it;
- copies, pickles and spawned processes work, and a copy gets a class of its own (torch lets copies
  share it, so that un-parametrizing one breaks the other);
- torch's older checkpoint keys load as well;
- ``reset_parameters`` initializes the tensor itself, where torch's would fill a temporary one;
- a recurrent layer hands its kernel the weights of this very call, and keeps none of them;
- ``detach`` puts plain tensors in place and returns the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm as TorchHook

from weightnorm import functional, kernels
from weightnorm.dtensor import on_mesh_of, placed_like
from weightnorm.functional import EPS

Scale = Literal["linear", "log"]
SCALES = ("linear", "log")


class WeightNorm(nn.Module):
    """The map (g, v) → w = g·v/‖v‖ that torch's parametrization mechanism evaluates.

    With ``scale="log"`` the stored scalar is s and g = eˢ.
    """

    mask: Tensor | None

    def __init__(
        self,
        dim: int | None,
        *,
        groups: int = 1,
        scale: Scale = "linear",
        mask: Tensor | None = None,
        eps: float = EPS,
    ) -> None:
        super().__init__()
        self.dim, self.groups, self.scale, self.eps = dim, groups, scale, eps
        self.register_buffer("mask", mask, persistent=False)
        self.plain = mask is None and scale == "linear"
        if scale == "log":
            # A key of its own in the state dict: s must never be loaded as g, or g as s.
            self.register_buffer("log_scale", torch.tensor(True))

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        if not self.plain:
            g = self.length(g)
            v = v if self.mask is None else v * on_mesh_of(self.mask, v)
        return kernels.compose(v, g, self.dim, self.groups, self.eps)

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        v, g = functional.decompose(w, self.dim, groups=self.groups, mask=self.mask, eps=self.eps)
        return self.stored(g), v

    def length(self, stored: Tensor) -> Tensor:
        """g from what is stored: itself, or eˢ."""
        return stored.exp() if self.scale == "log" else stored

    def stored(self, g: Tensor) -> Tensor:
        """What is stored for g. A log-scale cannot say 0: it says the least number instead."""
        return g.clamp_min(torch.finfo(g.dtype).tiny).log() if self.scale == "log" else g

    def extra_repr(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return f"dim={self.dim}{groups}, scale={self.scale!r}{', masked' * (self.mask is not None)}"


class Originals(ParametrizationList):
    """torch's holder of original0 = g and original1 = v, quicker to read and safe to write."""

    original0: Tensor
    original1: Tensor

    def forward(self) -> Tensor:
        held = self._parameters
        if len(self._modules) == 1 and held:  # torch searches for further maps on every access
            first: Any = self._modules["0"]
            w: Tensor = first.forward(held["original0"], held["original1"])
            return w
        return super().forward()

    @torch.no_grad()
    def right_inverse(self, value: Tensor) -> None:
        """Write a weight through its parts, by copying: torch would alias the caller's memory."""
        if value.shape != self.original1.shape:
            raise ValueError(
                f"got a weight of shape {tuple(value.shape)}, "
                f"expected {tuple(self.original1.shape)}"
            )
        inverse: Any = value
        for parametrization in reversed(list[Any](self)):
            inverse = parametrization.right_inverse(inverse)
        for original, value in zip((self.original0, self.original1), inverse, strict=True):
            original.copy_(placed_like(value, original))


def attach(module: nn.Module, name: str, parametrization: nn.Module) -> Originals:
    """Turn ``module.<name>`` into ``parametrization(g, v)``."""
    parametrize.register_parametrization(module, name, parametrization, unsafe=True)
    originals: Originals = parametrizations_of(module)[name]
    originals.__class__ = Originals
    _adopt(module, [name])
    return originals


def share(module: nn.Module, name: str, originals: Originals) -> None:
    """Let ``module.<name>`` be computed from the parts of another, tied tensor."""
    attach(module, name, nn.Identity())
    parametrizations_of(module)[name] = originals


def parametrizations_of(module: nn.Module) -> Any:
    """The module's ParametrizationLists by tensor name; empty if there are none."""
    return module.parametrizations if parametrize.is_parametrized(module) else {}


def detach(module: nn.Module, weights: Mapping[str, nn.Parameter]) -> Callable[[], None]:
    """Put plain `weights` where parametrized tensors are. The returned call undoes it exactly."""
    cls, parametrizations = type(module), parametrizations_of(module)
    saved, children = dict(parametrizations.items()), dict(module._modules)
    for name in weights:
        del parametrizations[name]
    # The class itself stays as it is: copies made by torch share it.
    module.__class__ = _class_without(cls, weights) if parametrizations else cls.__bases__[0]
    if not parametrizations:
        del module._modules["parametrizations"]
    _set_parameters(module, weights)

    def undo() -> None:
        for name in weights:
            del module._parameters[name]
        module.__class__ = cls
        for name in list(parametrizations):
            del parametrizations[name]
        parametrizations.update(saved)
        _reorder(module._modules, children, ["parametrizations"])
        refresh(module)

    return undo


def _class_without(cls: type, names: Iterable[str]) -> type:
    """The same class, where these names are no properties."""
    left = {"__dict__", "__weakref__", *names}
    return type(cls.__name__, cls.__bases__, {k: v for k, v in vars(cls).items() if k not in left})


def detach_hook(module: nn.Module, name: str, weight: nn.Parameter) -> Callable[[], None]:
    """The same for torch's older flavour: a forward pre-hook over ``<name>_g`` and ``<name>_v``."""
    key = next(k for k, hook in _hooks(module).items() if hook.name == name)
    stale = module.__dict__.pop(name, None)
    saved, hooks = dict(module._parameters), dict(module._forward_pre_hooks)
    del module._forward_pre_hooks[key]
    for part in (f"{name}_g", f"{name}_v"):
        del module._parameters[part]
    _set_parameters(module, {name: weight})

    def undo() -> None:
        del module._parameters[name]
        _reorder(module._parameters, saved, [f"{name}_g", f"{name}_v"])
        _reorder(module._forward_pre_hooks, hooks, [key])
        if stale is not None:
            setattr(module, name, stale)

    return undo


def hook_of(module: nn.Module, name: str) -> Any:
    """torch's older weight-norm hook on this tensor, if it has one."""
    return next((hook for hook in _hooks(module).values() if hook.name == name), None)


def hooked_names(module: nn.Module) -> list[str]:
    """Names of the tensors that torch's older flavour has normalized."""
    return [hook.name for hook in _hooks(module).values()]


def _hooks(module: nn.Module) -> dict[int, Any]:
    return {k: h for k, h in module._forward_pre_hooks.items() if isinstance(h, TorchHook)}


def refresh(module: nn.Module) -> None:
    """Tell a recurrent layer that its tensors are others now."""
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


_SEVERAL = ("weight_ih", "weight_hh", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Weights of the cells and attention layers that have several, in torch's order."""


def _set_parameters(module: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    """Register parameters where a plain layer has them: weights before biases."""
    all_ = {**weights, **module._parameters}
    first = [n for n in getattr(module, "_flat_weights_names", _SEVERAL) if n in all_]
    module._parameters.clear()
    module._parameters.update({n: all_[n] for n in [*first, *all_]})
    refresh(module)


def _reorder(now: dict[Any, Any], before: dict[Any, Any], returning: list[Any]) -> None:
    """Put the returning entries back where they were among those that are there now."""
    now.update({key: before[key] for key in returning})
    ordered = {key: now[key] for key in before if key in now}
    ordered.update(now)
    now.clear()
    now.update(ordered)


def _adopt(module: nn.Module, names: Iterable[str]) -> None:
    """Teach the class that torch made for this one module to read fast, copy, pickle and recur."""
    cls: Any = type(module)
    for name in names:
        setattr(cls, name, _quick_property(name, getattr(cls, name)))
    cls._adopted = True
    cls.__reduce_ex__ = _reduce_ex
    cls._load_from_state_dict = _load_from_state_dict
    for reset in ("reset_parameters", "_reset_parameters"):
        if hasattr(cls, reset):
            setattr(cls, reset, _landing(reset))
    if "__deepcopy__" in cls.__dict__:  # torch's: the copy would share this class
        del cls.__deepcopy__
    if isinstance(module, nn.RNNBase):
        cls.forward = _recurrent_forward
        cls._init_flat_weights = _forget_flat_weights
        cls._update_flat_weights = _nothing_to_update
        module._init_flat_weights()


def _plain_class(module: nn.Module) -> Any:
    """The class from before, also where FSDP2 has put one of its own on top since."""
    ours = next(cls for cls in type(module).__mro__ if vars(cls).get("_adopted"))
    return ours.__bases__[0]


def _quick_property(name: str, slow: property) -> property:
    """torch's property without its detours: two module calls and a search for more maps."""

    def read(module: nn.Module) -> Any:
        if parametrize._cache_enabled:
            known = parametrize._cache.get((id(module), name))
            return slow.fget(module) if known is None else known  # type: ignore[misc]
        return module._modules["parametrizations"]._modules[name].forward()  # type: ignore

    return property(read, slow.fset)


def _reduce_ex(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    base = _plain_class(module)
    # Python 3.10 has no object.__getstate__; torch's own on this class only raises.
    state = base.__getstate__(module) if hasattr(base, "__getstate__") else dict(module.__dict__)
    return _rebuild, (base, tuple(parametrizations_of(module))), state


def _load_from_state_dict(
    module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Load what is stored, also under torch's older keys ``<name>_g`` and ``<name>_v``."""
    for name, originals in parametrizations_of(module).items():
        older = f"{prefix}{name}_g", f"{prefix}{name}_v"
        newer = [f"{prefix}parametrizations.{name}.{key}" for key in originals.state_dict()]
        # A log-scale has a third key, and no older ones: g must not be loaded as s.
        if len(newer) == 2 and state.keys() >= set(older):
            state.update(zip(newer, [state.pop(key) for key in older], strict=True))
    _plain_class(module)._load_from_state_dict(module, state, prefix, *rest)


def _landing(reset: str) -> Callable[[nn.Module], None]:
    """The layer's own initialization, of the tensor itself; v and g may be anything before."""

    def land(module: nn.Module) -> None:
        with torch.no_grad(), parametrize.cached():  # what is filled is what is read after it
            getattr(_plain_class(module), reset)(module)
            for name, originals in parametrizations_of(module).items():
                if isinstance(originals, Originals):
                    # Recurrent layers fill every parameter, v among them.
                    fills_v = isinstance(module, (nn.RNNBase, nn.RNNCellBase))
                    filled = originals.original1 if fills_v else getattr(module, name)
                    originals.right_inverse(filled)

    return land


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """An empty module of the parametrized class; the state that follows fills it."""
    module = base.__new__(base)
    nn.Module.__init__(module)
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.empty(0)))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)
    if isinstance(module, nn.RNNBase):
        module._flat_weights_names = []
    _adopt(module, names)
    return module


def _recurrent_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel on weights computed once, now; a list kept from before would be stale.

    (torch's RNN reads ``_flat_weights``; left alone it would train a frozen copy, pytorch#65688.)
    """
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
    try:
        return _plain_class(module).forward(module, *args, **kwargs)
    finally:
        module._init_flat_weights()


def _forget_flat_weights(module: Any) -> None:
    module._flat_weights = [None] * len(module._flat_weights_names)
    module._flat_weight_refs = list(module._flat_weights)


def _nothing_to_update(module: Any) -> None:
    """The weights of the call are already in place."""
