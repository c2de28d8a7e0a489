"""Data-dependent initialization (section 3): one forward pass that sets every scale and bias.

At each layer, in running order: t = v·x/‖v‖; μ, σ over the batch; g ← 1/σ, b ← −μ/σ (eq. 6); and
the layer passes on (t − μ)/σ (eq. 5), so the next one is measured on what it will really see.

Note [init scales g, not w]
    Only g and b are set: v keeps the scale it was drawn with, which is the scale its gradient
    steps are measured against. A plain layer has no g, so its w is divided by σ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer
from torch.nn.utils.parametrize import type_before_parametrizations

from weightnorm import kernels, layers
from weightnorm.distributed import Group, moments_over_ranks
from weightnorm.dtensor import refuse_sharded
from weightnorm.init_report import InitReport, LayerInit
from weightnorm.inspection import is_weight_normed, normalized_weight
from weightnorm.kernels import wide_dtype
from weightnorm.mean_only import Centered

TargetStd = float | Mapping[str, float]

_DEAD = 1e-6
"""A unit whose σ is this small beside its mean is constant but for rounding: it is dead."""


@torch.no_grad()
def data_dependent_init(
    model: nn.Module,
    *batch: Any,
    target_std: TargetStd = 1.0,
    group: Group = None,
    forward: Callable[..., object] | None = None,
) -> InitReport:
    """Set scales and biases so that all pre-activations have mean 0 and std 1 on `batch`.

    Works on any model, normalized (g and b are set) or plain (w and b are). The model runs once,
    in the mode it is in: with ``model.train()`` noise and dropout are on, as in the paper. Running
    statistics and all other buffers stay as they were. Call it once, before building the optimizer.

    Args:
        model: linear, bilinear and convolutional layers are initialized. Recurrent ones keep their
            initialization, as in the paper, and the report says so.
        batch: what the model is called with; the paper's code takes 500 training examples.
        target_std: the std to aim at, or one for each layer by name or pattern, such as
            ``{"blocks.*.conv2": 0.1}`` for residual branches; layers not named get 1.
        group: measure on the batches of all ranks of this process group together; by default that
            of a DistributedDataParallel model, whose ranks must not part. Before ``fully_shard``.
        forward: what to call with the batch in place of the model.

    A layer used more than once is set at its first use. A unit that is constant on the batch has
    no scale: it is left alone and reported. If the pass fails, the model is put back as it was.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> report = data_dependent_init(model, torch.randn(100, 4))
    >>> [layer.name for layer in report.done]
    ['0', '2']
    """
    refuse_sharded(model, "initialize it on data first, then fully_shard")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device: give it memory and values first")
    if group is None and isinstance(model, DistributedDataParallel):
        group = model.process_group
    goals = _goals(model, target_std)
    rows: dict[nn.Module, LayerInit] = {}
    backups: list[tuple[Tensor, Tensor]] = []

    def after(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if module in rows:
            return None
        name = names[module]
        output, rows[module] = _set_layer(module, name, output, goals[name], group, backups)
        return output

    names = {module: name for name, module in _targets(model)}
    hooks = [module.register_forward_hook(after) for module in names]
    buffers = [(b, b.clone()) for b in model.buffers() if not isinstance(b, UninitializedBuffer)]
    try:
        (model if forward is None else forward)(*batch)
    except BaseException:
        _restore(backups)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        _restore(buffers)
    return InitReport((*rows.values(), *_skipped(model, rows)))


def _targets(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers whose output is a pre-activation; a centred layer counts as one."""
    inside = {module.layer for module in model.modules() if isinstance(module, Centered)}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Bilinear, layers.Conv, Centered)) and (
            module not in inside
        ):
            yield name, module


def _goals(model: nn.Module, target_std: TargetStd) -> dict[str, float]:
    """The std to aim at, for each layer by name."""
    names = [name for name, _ in _targets(model)]
    wanted = target_std if isinstance(target_std, Mapping) else {"*": target_std}
    goals = dict.fromkeys(names, 1.0)
    for pattern, std in wanted.items():
        matches = [name for name in names if pattern in ("*", name) or fnmatchcase(name, pattern)]
        if not matches and pattern != "*":
            near = get_close_matches(pattern, names, 3) or names
            raise ValueError(
                f"target_std names {pattern!r}, but no layer is called so; there are {near}"
            )
        if not (isinstance(std, (int, float)) and 0 < std < float("inf")):
            raise ValueError(f"target_std must be a positive number; got {std!r} for {pattern!r}")
        goals.update(dict.fromkeys(matches, float(std)))
    return goals


def _set_layer(
    module: nn.Module,
    name: str,
    output: Tensor,
    goal: float,
    group: Group,
    backups: list[tuple[Tensor, Tensor]],
) -> tuple[Tensor, LayerInit]:
    """Eq. 5 and 6 at one layer: set its scale and bias, and correct the output it just gave."""
    centered = isinstance(module, Centered)
    layer: Any = module.layer if centered else module
    axis = output.ndim - 1
    if isinstance(layer, layers.Conv):
        axis -= len(layer.kernel_size)
    mean, std = _moments(output, axis, name, isinstance(layer, layers.Conv), group)

    bias: Tensor | None = layer.bias
    old_bias = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype, copy=True)
    t_mean = mean - old_bias
    dead = std <= _DEAD * t_mean.abs()
    scale = torch.where(dead, 1.0, goal / torch.where(dead, 1.0, std))
    new_bias = old_bias
    _scale_weight(layer, scale, backups)
    if bias is not None:
        # A centred layer's mean is 0 already; b of eq. 7 starts at 0.
        new_bias = torch.where(dead, old_bias, 0.0 if centered else -t_mean * scale)
        backups.append((bias, bias.clone()))
        bias.copy_(new_bias)
    row = LayerInit(
        name=name,
        kind=type_before_parametrizations(layer).__name__,
        units=len(mean),
        mean_before=mean.mean().item(),
        std_before=std.mean().item(),
        target_std=goal,
        dead=tuple(dead.nonzero().flatten().tolist()),
    )
    per_unit = (-1, *[1] * (output.ndim - 1 - axis))
    offset = (new_bias - old_bias * scale).view(per_unit)
    corrected = torch.addcmul(offset, output.to(mean.dtype), scale.view(per_unit))
    return corrected.to(output.dtype), row


def _moments(
    output: Tensor, axis: int, name: str, spatial: bool, group: Group
) -> tuple[Tensor, Tensor]:
    """Population mean and std of each unit over the batch (and space), over all ranks."""
    units = output.shape[axis]
    per_example = math.prod(output.shape[axis + 1 :]) if spatial else 1
    count = output.numel() // max(units, 1)
    if count:
        wide = output.to(wide_dtype(output.dtype))
        wide = wide.reshape(-1, units) if axis == output.ndim - 1 else wide
        mean, variance = _mean_and_variance(wide if axis else wide.unsqueeze(0))
    else:
        mean = output.new_zeros(units, dtype=wide_dtype(output.dtype))
        variance = mean.clone()
    what = f"the moments of layer {name!r} in data_dependent_init"
    mean, variance, total = moments_over_ranks(mean, variance, count, group, what)
    count = int(total)
    if count <= per_example:
        raise ValueError(
            f"layer {name!r} saw {count // per_example} example(s): a standard deviation needs "
            "two or more; initialize on a larger batch (the paper's code takes 500)"
        )
    if not (mean.isfinite().all() and variance.isfinite().all()):
        raise ValueError(
            f"layer {name!r} gave NaN or infinity on the init batch: look for them in the batch "
            "itself, and in the weights up to this layer"
        )
    return mean, variance.sqrt()


def _mean_and_variance(t: Tensor) -> tuple[Tensor, Tensor]:
    """Of each unit along axis 1, over the population."""
    axes = [d for d in range(t.ndim) if d != 1]
    if not t.is_cpu:
        variance, mean = torch.var_mean(t, axes, correction=0)
        return mean, variance
    # var_mean takes a quarter of the time of the convolution before it; these take a tenth of that,
    # but where the spread is far below the mean they are less exact.
    if t.ndim > 2 and t.is_contiguous():
        mean, variance = torch.batch_norm_update_stats(t, None, None, 0.0)
    else:  # as it lies in memory: units last
        rows = t.movedim(1, -1).reshape(-1, t.shape[1])
        mean = rows.sum(0) / len(rows)
        variance = (rows - mean).square_().sum(0) / len(rows)
    narrow = (variance <= _NARROW**2 * mean.square()).nonzero().flatten()
    if len(narrow):
        variance[narrow], mean[narrow] = torch.var_mean(t[:, narrow], axes, correction=0)
    return mean, variance


_NARROW = 1e-2


def _scale_weight(layer: nn.Module, scale: Tensor, backups: list[tuple[Tensor, Tensor]]) -> None:
    """Multiply each unit's weight vector: through g where one belongs to the unit, else in w."""
    dim, groups = layers.unit_axis(layer, "weight")
    weight = layer.get_parameter("weight") if not is_weight_normed(layer, "weight") else None
    if weight is None:
        site = normalized_weight(layer, "weight")
        v, g = site.stored
        backups.extend([(v, v.clone()), (g, g.clone())])
        if g.shape == kernels.unit_shape(v.shape, dim, groups):
            scale = scale.view(g.shape).to(g.dtype)
            g.add_(scale.log()) if site.is_log else g.mul_(scale)
        else:
            site.write(_scaled(site.weight(), scale, dim, groups))
    else:
        backups.append((weight, weight.clone()))
        weight.copy_(_scaled(weight, scale, dim, groups))


def _scaled(w: Tensor, scale: Tensor, dim: int, groups: int) -> Tensor:
    """Each unit's weight vector times its scale."""
    shape = kernels.block_shape(w.shape, dim, groups)
    return (w.reshape(shape) * scale.view(shape[0], 1, shape[2], 1)).reshape(w.shape).to(w.dtype)


def _skipped(model: nn.Module, done: Mapping[nn.Module, LayerInit]) -> Iterator[LayerInit]:
    """The modules that have weights but were not set, and why."""
    inside = {module.layer for module in done if isinstance(module, Centered)}
    for name, module in model.named_modules():
        if module in done or module in inside:
            continue
        if isinstance(module, layers.RECURRENT):
            why = "recurrent layers keep their initialization"
        elif isinstance(module, layers.EMBEDDING):
            why = "an embedding has no pre-activation"
        elif isinstance(module, nn.MultiheadAttention):
            why = "its projections are not layers that run by themselves"
        elif layers.weight_names(module):
            why = "it did not run on this batch"
        elif is_weight_normed(module):
            why = "not a layer whose output is known to be a pre-activation"
        else:
            continue
        yield LayerInit(name, type_before_parametrizations(module).__name__, skipped=why)


def _restore(saved: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in reversed(saved):
        tensor.copy_(value)
