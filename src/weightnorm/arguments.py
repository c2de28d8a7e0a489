"""Checks of arguments that several public functions share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def check_module(module: object, function: str) -> None:
    """Raise a TypeError that says what to pass instead if `module` is not a torch.nn.Module."""
    if isinstance(module, nn.Module):
        return
    if isinstance(module, type):
        got = f"the class {module.__name__}: pass an instance of it"
    elif isinstance(module, Tensor):
        got = f"a tensor of shape {tuple(module.shape)}: pass the module that it belongs to"
    elif module is None or isinstance(module, str):
        got = f"{module!r}: pass the module itself"
    else:
        got = f"{type(module).__name__}: pass the module itself"
    raise TypeError(f"{function} expects a torch.nn.Module; got {got}")


def check_optimizer(optimizer: Any, function: str) -> Any:
    """Return the optimizer, or the one that a framework has wrapped; raise a TypeError for others.

    Wrappers (accelerate's, Lightning's) have its parameter groups but not its hooks and methods.
    """
    if isinstance(optimizer, type):
        got = f"the class {optimizer.__name__}"
    elif hasattr(optimizer, "param_groups"):
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        return optimizer
    else:
        got = repr(optimizer) if optimizer is None else type(optimizer).__name__
    raise TypeError(f"{function} expects the optimizer that trains the model; got {got}")


def check_dim(dim: object) -> None:
    """Raise a ValueError if `dim` is not "auto", None or an integer."""
    if not (dim is None or dim == "auto" or (isinstance(dim, int) and not isinstance(dim, bool))):
        raise ValueError(f'dim={dim!r} is unknown; expected "auto", an integer or None')


def check_where(where: object) -> None:
    """Raise a TypeError if `where` is neither None nor a function."""
    if where is not None and not callable(where):
        hint = "pass a function such as lambda name, module: name in (…)"
        raise TypeError(f"where must be a function of name and module; got {where!r}: {hint}")
