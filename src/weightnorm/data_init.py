"""Data-dependent initialization (section 3): one forward pass that sets every scale and bias.

At each layer, in the order in which they run: t = v·x/‖v‖; μ, σ over the batch; g ← 1/σ,
b ← −μ/σ (eq. 6). The layer then passes on (t − μ)/σ (eq. 5), so that the next layer is measured on
the input it will have in training.

Note [init scales g, not w]
    Only g and b are set. v keeps the norm it was drawn with, since ‖v‖ determines the effective
    learning rate. A layer without weight norm has no g, so its w is divided by σ.

Note [what is reported was measured]
    Each layer runs again after it was set. The moments of that output are reported, and the output
    is passed on. A class may transform its weight in forward (weight standardization): if the
    target is missed, the layer is corrected from what was measured and runs again, a few times,
    and is left as it was if that does not help.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer
from torch.nn.utils.parametrize import type_before_parametrizations

from weightnorm import layers
from weightnorm._distributed import Group, moments_over_ranks
from weightnorm._dtensor import refuse_sharded
from weightnorm._torch_private import tree_leaves
from weightnorm._units import exact_dtype
from weightnorm.folding import refuse_folded
from weightnorm.init_report import InitReport, LayerInit
from weightnorm.inspection import is_weight_normed, normalized_weight
from weightnorm.mean_only import Centered, unit_count

Std = float | Mapping[str, float]

_DEAD = 1e-6
"""A unit with σ below this fraction of |μ| is constant up to rounding, and has no scale."""
_TOLERANCE = 0.05
"""Largest deviation of a unit's mean and std from the target, as a fraction of the target std."""
_RUNS = 4
"""How often a layer is set and run before it is skipped; once, if it is linear in its weight."""


@torch.no_grad()
def data_dependent_init(
    model: nn.Module,
    *batch: Any,
    target_std: Std = 1.0,
    group: Group = None,
    forward: Callable[..., object] | None = None,
) -> InitReport:
    """Set scales and biases so that all pre-activations have mean 0 and std 1 on `batch`.

    Works on weight-normalized layers (sets g and b) and on plain ones (sets w and b). The model
    runs once, and each layer again when it is set, in the mode it is in: with ``model.train()``
    noise and dropout are on, as in the paper. Running statistics and all other buffers are
    restored. Call it once, before building the optimizer.

    Args:
        model: its linear, bilinear and convolutional layers are initialized. Recurrent layers keep
            their initialization, as in the paper, and are reported as skipped.
        batch: the arguments of the model; the paper's code uses 500 training examples.
        target_std: the target standard deviation, or one per layer by name or pattern, such as
            ``{"blocks.*.conv2": 0.1}`` for residual branches; other layers get 1.
        group: process group over whose ranks mean and std are taken. Default: the group of a
            DistributedDataParallel model. Call this function before ``fully_shard``.
        forward: called with the batch instead of the model.

    Returns:
        Mean and std of every layer before and after, as measured, and why a layer was skipped.

    A layer that is used several times is set at its first use; of layers that share a parameter,
    the first to run is set. Frozen layers are skipped. A unit that is constant on the batch has no
    scale: it is left as it was and reported as dead. If the pass raises, all parameters are
    restored.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> report = data_dependent_init(model, torch.randn(100, 4))
    >>> [layer.name for layer in report.done]
    ['0', '2']
    """
    check_writable(model, "data_dependent_init")
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise ValueError("the model is in nn.DataParallel; initialize the one inside, model.module")
    if group is None:
        wrapped = (m for m in model.modules() if isinstance(m, DistributedDataParallel))
        group = next((module.process_group for module in wrapped), None)
    initializer = _Initializer(model, batch, target_std, group)
    with _keep_buffers(model), _uncompiled(), initializer.hooks():
        try:
            (model if forward is None else forward)(*batch)
        except BaseException:
            _restore(initializer.saved)
            raise
    rows = initializer.rows
    return InitReport((*rows.values(), *_not_run(model, rows)))


@contextmanager
def _keep_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model in place, also those that it replaces."""
    saved = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if not isinstance(buffer, UninitializedBuffer)
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in saved:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)


def _uncompiled() -> AbstractContextManager[Any]:
    """Run compiled models in eager mode, in all threads: their compiled code runs no hooks."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; importing it takes a second
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


class _Initializer:
    """Sets every layer, in forward hooks, while the model runs."""

    def __init__(self, model: nn.Module, batch: Any, target_std: Std, group: Group) -> None:
        self.names = {module: name for name, module in target_layers(model)}
        self.targets = layers.per_layer(list(self.names.values()), target_std, "target_std")
        self.sharing = layers.sharing(model)
        self.batch, self.group = batch, group
        self.rows: dict[nn.Module, LayerInit] = {}
        self.saved: list[tuple[Tensor, Tensor]] = []
        """The parameters of the layers that were set, and their values before."""
        self._inputs: dict[nn.Module, tuple[Any, Any]] = {}
        self._running_again = False

    def hooks(self) -> ExitStack:
        """Register the hooks; the context that is returned removes them."""
        stack = ExitStack()
        for module in self.names:
            # Before other hooks, which may change the inputs: they run again with the layer.
            stack.enter_context(
                module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            )
            stack.enter_context(module.register_forward_hook(self._after))
        return stack

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._running_again:
            self._inputs[module] = (args, kwargs)

    def _after(self, module: nn.Module, _: Any, output: Any) -> Any:
        if self._running_again:
            return None
        inputs = self._inputs.pop(module, ((), {}))
        if module in self.rows:
            return None
        name, layer = self.names[module], layer_of(module)
        if reason := self._cannot_set(layer, output):
            self.rows[module] = _skipped(name, layer, reason)
            return None
        self._running_again = True
        try:
            run = _LayerRun(module, name, self.targets[name], inputs, output, self.group)
            output, self.rows[module] = self._set_layer(run)
        finally:
            self._running_again = False
        return output

    def _set_layer(self, run: _LayerRun) -> tuple[Tensor, LayerInit]:
        """Set scale and bias by eq. 6 and return the output of eq. 5, with what was measured.

        See Note [what is reported was measured]. The device is read once for each run.
        """
        saved = [(p, p.clone()) for p in layers.own_parameters(run.layer)]
        self.saved += saved
        before = after = run.moments(run.output)
        rounding = torch.full_like(before.mean, torch.inf)
        for _ in range(_RUNS):
            dead, moved = run.rescale(after)
            # Keep the smaller tolerance, or a layer that ignores its weight would pass in the end.
            rounding = rounding.minimum(moved)
            output = run.again()
            after = run.moments(output)
            count, deviation, row = run.read(before, after, dead, rounding)
            if count <= run.positions:
                raise ValueError(
                    f"layer {run.name!r} saw {int(count) // max(run.positions, 1)} example(s): a "
                    "standard deviation needs two or more; initialize on a larger batch (the "
                    "paper's code uses 500)"
                )
            if not math.isfinite(row.mean_before + row.std_before):
                raise ValueError(_origin(run, self.batch))
            if deviation <= _TOLERANCE:  # NaN is not
                return output, row
        _restore(saved)
        reason = (
            "rescaling its weight did not bring the std to the target: it stays "
            f"{row.std_before:.3g}"
        )
        return run.output, _skipped(run.name, run.layer, reason)

    def _cannot_set(self, layer: Any, output: Any) -> str:
        """Return why this layer is skipped; "" if it can be set."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            what = output.dtype if isinstance(output, Tensor) else type(output).__name__
            return f"its output is not a floating-point tensor ({what})"
        axis = _unit_axis(layer, output)
        if axis < 0 or output.shape[axis] != unit_count(layer):
            return f"its output of shape {tuple(output.shape)} has no axis of its units"
        if reason := refusal(layer):
            return reason
        targets = {layer_of(module): module for module in self.names}
        for name, other in self.sharing.get(layer, ()):
            if other not in targets:
                kind = type_before_parametrizations(other).__name__
                return f"shares a parameter with {name!r} ({kind}), which would change too"
            if targets[other] in self.rows:
                return f"shares a parameter with {name!r}, which ran first"
        return ""


class _Moments(NamedTuple):
    """Moments of each unit, (units,), over the examples of all ranks, in float64."""

    mean: Tensor
    std: Tensor
    total: Tensor
    """(1,): how many numbers each unit's mean is taken over."""


class _LayerRun(NamedTuple):
    """One call of a layer: its inputs and its output."""

    module: nn.Module
    name: str
    target: float
    inputs: tuple[Any, Any]
    output: Tensor
    group: Group

    @property
    def layer(self) -> Any:
        return layer_of(self.module)

    @property
    def is_centered(self) -> bool:
        """Whether the layer's outputs have mean 0 already; then b of eq. 7 starts at 0."""
        return isinstance(self.module, Centered)

    @property
    def positions(self) -> int:
        """How many outputs of one example a unit has in space."""
        return math.prod(self.output.shape[_unit_axis(self.layer, self.output) + 1 :])

    def again(self) -> Tensor:
        """Run the layer again on the same inputs."""
        output: Tensor = self.module(*self.inputs[0], **self.inputs[1])
        return output

    def moments(self, output: Tensor) -> _Moments:
        """Return population mean and std of each unit over the batch (and space), over all ranks.

        In float64: in float32 the variance of numbers above 10¹⁹ overflows.
        """
        axis = _unit_axis(self.layer, output)
        units = output.shape[axis]
        t = output.to(exact_dtype(output)).unsqueeze(0)  # so that there is another axis
        if count := output.numel() // max(units, 1):
            axes = [d for d in range(t.ndim) if d != axis + 1]
            variance, mean = torch.var_mean(t, axes, correction=0)
        else:
            mean = variance = t.new_zeros(units)
        mean, variance, total = moments_over_ranks(mean, variance, count, self.group)
        return _Moments(mean, variance.sqrt(), total)

    def rescale(self, now: _Moments) -> tuple[Tensor, Tensor]:
        """Set weight and bias so that mean and std `now` become 0 and the target.

        Returns, per unit, whether it is dead, and how far rounding may move its mean.
        """
        if self.is_centered:  # whose outputs do not show how large t is, and so what is rounding
            now = self.moments(self.layer(*self.inputs[0], **self.inputs[1]))
        bias: Tensor | None = self.layer.bias
        old_bias = torch.zeros_like(now.mean) if bias is None else bias.to(now.mean, copy=True)
        t_mean = now.mean - old_bias
        dead = now.std <= _DEAD * t_mean.abs()
        scale = torch.where(dead, 1.0, self.target / torch.where(dead, 1.0, now.std))
        _scale_weight(self.layer, scale)
        if bias is not None:
            bias.copy_(torch.where(dead, old_bias, 0.0 if self.is_centered else -t_mean * scale))
        torch.clear_autocast_cache()  # it holds casts of the former values
        return dead, 4 * torch.finfo(self.output.dtype).eps * t_mean.abs() * scale

    def read(
        self, before: _Moments, after: _Moments, dead: Tensor, rounding: Tensor
    ) -> tuple[float, float, LayerInit]:
        """Read from the device, at once: the count of a unit's outputs, the largest deviation of
        its mean and std as a fraction of the target std, and the row of the report."""
        centers = self.layer.bias is not None or self.is_centered
        live = (~dead).to(before.mean.dtype)
        units = live.sum().clamp_min(1)
        means = [(x * live).sum() / units for x in (*before[:2], *after[:2])]
        excess = (after.std - self.target).abs()
        if centers:
            excess = torch.maximum(excess, after.mean.abs())
        excess = ((excess - rounding).clamp_min(0) * live / self.target).amax()
        numbers = torch.cat([before.total, torch.stack([excess, *means]), 1 - live])
        count, deviation, mean_before, std_before, mean_after, std_after, *flags = numbers.tolist()
        row = LayerInit(
            name=self.name,
            kind=type_before_parametrizations(self.layer).__name__,
            units=len(live),
            mean_before=mean_before,
            std_before=std_before,
            mean_after=mean_after,
            std_after=std_after,
            target_std=self.target,
            dead=tuple(i for i, is_dead in enumerate(flags) if is_dead),
            centers=centers,
        )
        return count, deviation, row


def _scale_weight(layer: nn.Module, scale: Tensor) -> None:
    """Multiply each unit's weight vector by its scale: g if every unit has one, else w."""
    units = layers.units_of(layer)

    def scaled(w: Tensor) -> Tensor:
        return (w * units.spread(scale.view(units.shape(w.shape)), w)).to(w.dtype)

    if not is_weight_normed(layer, "weight"):
        weight = layer.get_parameter("weight")
        weight.copy_(scaled(weight))
        return
    normalized = normalized_weight(layer, "weight")
    v, g = normalized.stored
    if g.shape == units.shape(v.shape):
        factor = scale.view(g.shape).to(g.dtype)
        g.add_(factor.log()) if normalized.is_log else g.mul_(factor)
    else:
        normalized.write(scaled(normalized.weight()))


def _origin(run: _LayerRun, batch: Any) -> str:
    """Name the first place where NaN or infinity is found, given a layer whose output has some."""
    if not _all_finite(batch):
        return "the init batch contains NaN or infinity: remove those examples"
    if not _all_finite(run.inputs):
        return (
            f"layer {run.name!r} received NaN or infinity, though the init batch has none: check "
            "the modules before it"
        )
    return (
        f"layer {run.name!r} gave NaN or infinity for a finite input: check its parameters (and, "
        "with a process group, the batches of the other ranks)"
    )


def _all_finite(tree: Any) -> bool:
    tensors = [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
    return all(x.isfinite().all() for x in tensors if x.is_floating_point())


def _restore(saved: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in saved:
        tensor.copy_(value)
    torch.clear_autocast_cache()


def check_writable(model: nn.Module, function: str) -> None:
    """Check that the weights of a model can be initialized."""
    refuse_sharded(model, f"call {function} first, then fully_shard")
    for module in model.modules():
        refuse_folded(module, "initialize the weights")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device: give it memory and values first")


def target_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers whose output is a pre-activation; mean-only batch norm around a layer
    counts as that layer."""
    wrapped = {module.layer for module in model.modules() if isinstance(module, Centered)}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Bilinear, layers.Conv, Centered)) and (
            module not in wrapped
        ):
            yield name, module


def layer_of(module: nn.Module) -> Any:
    """Return the layer itself: the inner one of mean-only batch norm around a layer."""
    return module.layer if isinstance(module, Centered) else module


def refusal(layer: Any) -> str:
    """Return why weight and bias of a layer cannot be set; "" if they can."""
    normalized = is_weight_normed(layer, "weight")
    if not normalized and layer._parameters.get("weight") is None:
        return "its weight is computed by another parametrization or hook"
    if layer.bias is not None and layer._parameters.get("bias") is None:
        return "its bias is computed by another parametrization or hook"
    scale = normalized_weight(layer, "weight").stored.g if normalized else layer.weight
    if not (scale.requires_grad and (layer.bias is None or layer.bias.requires_grad)):
        return "it is frozen: its g, weight or bias requires no gradient"
    return ""


def _unit_axis(layer: nn.Module, output: Tensor) -> int:
    """Return the axis of the output along which the units lie."""
    space = len(layer.kernel_size) if isinstance(layer, layers.Conv) else 0
    return output.ndim - 1 - space


def _not_run(model: nn.Module, done: Mapping[nn.Module, LayerInit]) -> Iterator[LayerInit]:
    """Yield the modules that have weights but were not called, with the reason."""
    wrapped = {module.layer for module in done if isinstance(module, Centered)}
    for name, module in model.named_modules():
        if module in done or module in wrapped:
            continue
        if isinstance(module, layers.RECURRENT):
            reason = "recurrent layers keep their initialization"
        elif isinstance(module, layers.EMBEDDING):
            reason = "an embedding has no pre-activation"
        elif isinstance(module, nn.MultiheadAttention):
            reason = "its projections are not layers that run by themselves"
        elif layers.weight_names(module):
            reason = "it did not run on this batch"
        elif is_weight_normed(module):
            reason = "not a layer whose output is known to be a pre-activation"
        else:
            continue
        yield _skipped(name, module, reason)


def _skipped(name: str, layer: nn.Module, reason: str) -> LayerInit:
    return LayerInit(name, type_before_parametrizations(layer).__name__, skipped=reason)
