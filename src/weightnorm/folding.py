"""Replace normalized weights by plain parameters: permanently, or inside a ``with`` block."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor, nn

from weightnorm._dtensor import refuse_sharded
from weightnorm._parametrize import make_plain, pending_hooks
from weightnorm.inspection import NormalizedWeight, find_normalized

M = TypeVar("M", bound=nn.Module)

_GATHER = (
    "its v and g belong to fully_shard; gather them with get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict "
    'and use convert_state_dict(state, to="folded")'
)


def remove_weight_norm(module: M, name: str | None = None, *, include_torch: bool = True) -> M:
    """Replace the normalized weights of `module` and its submodules by plain parameters.

    The values of the weights stay the same. Returns the module; one without normalized weights is
    left as it is.

    Args:
        module: a layer or a model. It is changed in place.
        name: remove weight norm only from tensors of this name.
        include_torch: also remove torch's own weight norm, of both flavours. ``False`` removes only
            what ``weight_norm`` applied, and leaves the weight norm that a model is defined with,
            such as the positional convolution of wav2vec 2.0: the state dict then has the keys that
            the model's ``from_pretrained`` expects.

    >>> from weightnorm import weight_norm
    >>> model = nn.Sequential(weight_norm(nn.Linear(2, 3)))
    >>> list(remove_weight_norm(model).state_dict())
    ['0.weight', '0.bias']
    """
    with _LOCK:
        for submodule in module.modules():
            refuse_folded(submodule, "remove the weight norm")
        found = [
            weight
            for weight in find_normalized(module)
            if name in (None, weight.name) and (include_torch or not weight.is_torchs)
        ]
        if found:
            refuse_sharded(module, _GATHER)
        for weight in found:
            if len(weight.parametrizations) > 1:
                other = type(weight.parametrizations[1]).__name__
                raise ValueError(
                    f"{weight.path}: {other} is registered after weight norm; remove it first with "
                    "torch.nn.utils.parametrize.remove_parametrizations"
                )
        _replace_by_parameters(found)
    for submodule in module.modules():  # lazy ones, not normalized yet
        for weight_name, hook in pending_hooks(submodule).items():
            if name in (None, weight_name):
                hook.remove(submodule)
    if name is not None and not any(hasattr(submodule, name) for submodule in module.modules()):
        raise ValueError(f"no module of {type(module).__name__} has a tensor {name!r}")
    return module


@contextmanager
def folded(model: M, *, include_torch: bool = True) -> Iterator[M]:
    """Replace every normalized weight by a plain parameter inside the block.

    For inference, acting and export: no weight is recomputed, and the state dict is that of a plain
    model. After the block v and g are back bit for bit, also if the block raises; writes to the
    plain parameters are discarded, so training them raises a warning. A model that is moved, cast
    or frozen inside stays so. Pruning or parametrizing a folded weight inside the block is an error
    when the block ends.

    Threads: enter it once and call the model from any number of threads inside, or let each thread
    enter it; v and g come back when the last block is left. Threads that call the model outside of
    any block meanwhile may fail, since the weights are exchanged under them.

    Args:
        model: a layer or a model.
        include_torch: also fold torch's own weight norm, of both flavours.

    >>> from weightnorm import weight_norm
    >>> model = weight_norm(nn.Linear(2, 3))
    >>> with folded(model):
    ...     list(model.state_dict())
    ['weight', 'bias']
    """
    with _LOCK:
        modules = _fold(model, include_torch)
    try:
        yield model
    finally:
        with _LOCK:
            _unfold(modules)


_Move = Callable[[], object]
"""Moves v and g to the device and type that the plain weight was moved to inside the block."""
_Undo = Callable[[], tuple[list[_Move], list[str]]]
"""Restores v and g of a module; returns the moves, and the weights replaced inside the block."""


@dataclass
class _Fold:
    """A module whose weights are folded now, by one or several blocks."""

    undo: list[_Undo] = field(default_factory=list)
    blocks: int = 0


_LOCK = threading.RLock()
_FOLDS: dict[nn.Module, _Fold] = {}
"""Every module that is folded now. Changed only with the lock held."""


def _fold(model: nn.Module, include_torch: bool) -> list[nn.Module]:
    """Fold every module of a model that is not folded yet; return all that are folded."""
    found = [w for w in find_normalized(model) if include_torch or not w.is_torchs]
    if found:
        refuse_sharded(model, _GATHER)
    for module, undo in _replace_by_parameters(found, warn=_warn_of_training):
        _FOLDS.setdefault(module, _Fold()).undo.append(undo)
    modules = [module for module in model.modules() if module in _FOLDS]
    for module in modules:
        _FOLDS[module].blocks += 1
    return modules


def _unfold(modules: list[nn.Module]) -> None:
    """Restore v and g of the modules that no other block has folded."""
    moves: list[_Move] = []
    replaced: list[str] = []
    for module in reversed(modules):
        fold = _FOLDS[module]
        fold.blocks -= 1
        if not fold.blocks:
            del _FOLDS[module]
            for undo in reversed(fold.undo):
                to_move, gone = undo()
                moves += to_move
                replaced += gone
    for move in moves:  # last, since it may run out of memory
        move()
    if replaced:
        raise RuntimeError(
            f"{', '.join(sorted(replaced))}: pruned, parametrized or removed inside `with "
            "folded(...)`. v and g are restored, and that change is undone. To change the plain "
            "weight for good, use remove_weight_norm"
        )


def refuse_folded(module: nn.Module, action: str) -> None:
    """Raise if this module itself is folded now: the end of the block would undo `action`."""
    if module in _FOLDS:
        raise RuntimeError(
            f"cannot {action} of {type(module).__name__} inside `with folded(...)`: the end of the "
            "block restores v and g as they were; leave the block first"
        )


def _warn_of_training(weight: Tensor) -> None:
    warnings.warn(
        "a weight inside `with folded(...)` has received a gradient: an update of it is discarded "
        "at the end of the block; train outside of it",
        stacklevel=2,
    )


def _replace_by_parameters(
    found: list[NormalizedWeight], *, warn: Callable[[Tensor], None] | None = None
) -> list[tuple[nn.Module, _Undo]]:
    """Replace normalized weights by parameters of the same value; return how to undo each."""
    for weight in found:
        _refuse_pruned(weight)
    tied: dict[Hashable, nn.Parameter] = {}
    # All are computed before any is replaced: this may run out of memory. Parameters of inference
    # mode could not be trained.
    with torch.inference_mode(False), torch.no_grad():
        for weight in found:
            v, g = weight.stored
            if weight.identity not in tied:
                parameter = nn.Parameter(weight.folded(), v.requires_grad or g.requires_grad)
                if warn is not None and parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(warn)
                tied[weight.identity] = parameter
    undos: list[tuple[nn.Module, _Undo]] = []
    for module, group in groupby(found, key=lambda weight: weight.module):
        weights = {weight.name: weight for weight in group}
        plain = {name: tied[weight.identity] for name, weight in weights.items()}
        before = {name: _traits(parameter) for name, parameter in plain.items()}
        undo = make_plain(module, plain)
        undos.append((module, partial(_restore, module, weights, before, undo)))
    return undos


def _traits(weight: Tensor) -> tuple[bool, torch.dtype, torch.device]:
    """Return what may change in a plain weight inside the block, and stays."""
    return weight.requires_grad, weight.dtype, weight.device


def _restore(
    module: nn.Module,
    weights: dict[str, NormalizedWeight],
    before: dict[str, tuple[bool, torch.dtype, torch.device]],
    undo: Callable[[], list[str]],
) -> tuple[list[_Move], list[str]]:
    """Restore v and g, frozen or not as the plain weight is now; return the moves of those whose
    plain weight was cast or moved, and the names of weights replaced inside the block."""
    plain = dict(module._parameters)
    replaced = undo()
    moves: list[_Move] = []
    for name, weight in weights.items():
        now = plain.get(name)
        if now is None:
            continue
        if now.requires_grad != before[name][0]:
            for part in weight.stored:
                if isinstance(part, nn.Parameter):
                    part.requires_grad_(now.requires_grad)
        if _traits(now)[1:] != before[name][1:]:
            moved = module if weight.parametrization is None else weight.parametrizations
            moves.append(partial(moved.to, now.device, now.dtype))
    return moves, [weights[name].path for name in replaced]


def _refuse_pruned(weight: NormalizedWeight) -> None:
    """Raise if v or g of torch's hook is computed from something else."""
    if weight.parametrization is not None:
        return
    for part in (f"{weight.name}_g", f"{weight.name}_v"):
        if weight.module._parameters.get(part) is None:
            raise ValueError(
                f"{part} of {weight.path} is not a parameter; if it is pruned, call "
                f"torch.nn.utils.prune.remove(layer, {part!r}) first"
            )
