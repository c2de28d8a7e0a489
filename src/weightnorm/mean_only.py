"""Mean-only batch normalization (section 4): t̃ = t − μ[t] + b, eq. 7.

Two forms of the same numbers:

- ``MeanOnlyBatchNorm1d/2d/3d``: a module behind anything, like torch's BatchNorm.
- ``mean_only_batch_norm(layer)``: around a layer, whose bias is b, and in which the running mean
  disappears in evaluation.

Around a linear layer or a convolution the mean of the outputs follows from a sum of the inputs (see
output_sums.py): the layer runs once, with b − μ as its bias, and its outputs are not read again.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from inspect import cleandoc
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from weightnorm import layers
from weightnorm._distributed import Group, mean_over_ranks
from weightnorm._dtensor import is_sharded
from weightnorm._kernels import is_eager, no_autocast
from weightnorm._torch_private import (
    BatchNormBase,
    current_graph_task_id,
    has_any_global_hook,
)
from weightnorm._units import wide_dtype
from weightnorm.output_sums import output_axes, output_count, sum_outputs


class _GroupReference:
    """A weak reference to a process group. A copy refers to the same group, a pickle to none."""

    def __init__(self, group: Group) -> None:
        self.get: Callable[[], Group] = (lambda: None) if group is None else weakref.ref(group)

    def __deepcopy__(self, memo: object) -> _GroupReference:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _GroupReference, (None,)


class _MeanOnlyBatchNorm(nn.Module):
    """t − μ[t] + b per feature (eq. 7); its gradient is centred: ∇t = ∇t̃ − μ[∇t̃] (eq. 8).

    Args:
        num_features: C of an input (B, C, …).
        momentum: weight of the newest batch in the running mean; ``None`` averages all batches.
        bias: learn b, starting at 0.
        track_running_stats: keep the running mean for evaluation; without it the batch's own mean
            is used there too.
        group: take the mean over all ranks of this process group. The layer does not keep it alive:
            a group that outlives the interpreter aborts the process. Groups cannot be pickled: set
            `group` again to train a pickled layer.
    """

    dims: tuple[int, ...]
    bias: nn.Parameter | None
    running_mean: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        momentum: float | None = 0.1,
        bias: bool = True,
        track_running_stats: bool = True,
        *,
        group: Group = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features, self.momentum = num_features, momentum
        self.group = group
        self.track_running_stats = track_running_stats
        b = nn.Parameter(torch.zeros(num_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", b)
        tracked = track_running_stats
        mean = torch.zeros(num_features, device=device, dtype=dtype) if tracked else None
        count = torch.zeros((), dtype=torch.long, device=device) if tracked else None
        self.register_buffer("running_mean", mean)
        self.register_buffer("num_batches_tracked", count)

    @property
    def group(self) -> Group:
        """The process group of the mean, or None."""
        if self._group is None:
            return None
        group = self._group.get()
        if group is None:
            raise RuntimeError(
                f"the process group of {type(self).__name__} was destroyed, or not pickled with it;"
                " set `group` to a new one, or to None"
            )
        return group

    @group.setter
    def group(self, group: Group) -> None:
        self._group = None if group is None else _GroupReference(group)

    def forward(self, t: Tensor) -> Tensor:
        if t.ndim not in self.dims or t.shape[1] != self.num_features:
            expected = " or ".join(f"{d}-d" for d in self.dims)
            raise ValueError(
                f"{type(self).__name__} got an input of shape {tuple(t.shape)}; expected {expected}"
                f" with {self.num_features} features along axis 1"
            )
        return t + _along(_shift(self.bias, self.mean(t, 1)), t, 1)

    @property
    def fixed_mean(self) -> Tensor | None:
        """The running mean in evaluation; None where the mean of the batch is subtracted."""
        return None if self.training else self.running_mean

    def mean(self, t: Tensor, axis: int, added: Tensor | None = None) -> Tensor:
        """Return the mean to subtract from `t`, of the features along `axis`, before `added` was
        added: of the batch on all ranks, in float32 or wider, or the running mean."""
        if (mean := self.fixed_mean) is not None:
            return mean
        axes = [d for d in range(t.ndim) if d != axis]
        total, count = t.sum(axes, dtype=wide_dtype(t.dtype)), t.numel() // max(t.shape[axis], 1)
        total = total if added is None else total - count * added
        mean = mean_over_ranks(total, count, self.group)
        self.update(mean, count)
        return mean

    def update(self, mean: Tensor, count: int) -> None:
        """Update the running mean by that of a batch, in training mode."""
        is_empty = self.group is None and not count  # it has no mean
        if not self.training or self.running_mean is None or is_empty or _is_recomputed():
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        new: Any = self.momentum
        if new is None:  # in tensors: reading the count would wait for the device
            new = self.num_batches_tracked.to(mean.dtype).reciprocal().to(self.running_mean.dtype)
        self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), new)

    def reset_running_stats(self) -> None:
        """Forget every batch."""
        if self.running_mean is not None and self.num_batches_tracked is not None:
            self.running_mean.zero_()
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Reset bias and running statistics, as torch's norms do; for use after ``to_empty``."""
        self.reset_running_stats()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def fold_into(self, layer: nn.Module) -> nn.Module:
        """Return a copy of `layer` with this module's shift in evaluation: bias ← bias − μ̄ + b."""
        if self.running_mean is None:
            raise ValueError("without running statistics there is no fixed mean to fold")
        layer = copy.deepcopy(layer)
        with torch.no_grad():
            own = getattr(layer, "bias", None)
            bias = _shift(self.bias, self.running_mean).to(layer.weight.dtype)  # type: ignore[arg-type]
            layer.bias = nn.Parameter(bias if own is None else own + bias)
        return layer

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, momentum={self.momentum}, bias={self.bias is not None}, "
            f"track_running_stats={self.track_running_stats}"
        )


_DESCRIPTION = cleandoc(_MeanOnlyBatchNorm.__doc__ or "")


class MeanOnlyBatchNorm1d(_MeanOnlyBatchNorm):
    __doc__ = f"Mean-only batch normalization of (B, C) or (B, C, L).\n\n{_DESCRIPTION}"
    dims = (2, 3)


class MeanOnlyBatchNorm2d(_MeanOnlyBatchNorm):
    __doc__ = f"Mean-only batch normalization of (B, C, H, W).\n\n{_DESCRIPTION}"
    dims = (4,)


class MeanOnlyBatchNorm3d(_MeanOnlyBatchNorm):
    __doc__ = f"Mean-only batch normalization of (B, C, D, H, W).\n\n{_DESCRIPTION}"
    dims = (5,)


class Centered(nn.Module):
    """A layer whose pre-activations are centred over the batch: t̃ = w·x − μ[w·x] + b.

    b is the layer's own bias.
    """

    def __init__(self, layer: nn.Module, norm: _MeanOnlyBatchNorm) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        norm, layer = self.norm, self.layer
        if any(map(is_sharded, layer.parameters())):
            raise ValueError(
                f"{type(layer).__name__} is sharded over ranks during a forward pass: call "
                "fully_shard on the module around this layer, not on the layer alone"
            )
        if named or len(inputs) != 1 or not _is_plain(layer):
            return self._center_outputs(layer(*inputs, **named), self.bias)
        x = inputs[0]
        _check_batched(layer, x)
        weight: Any = layer.weight
        if (mean := norm.fixed_mean) is not None:
            return layers.linear_map(layer, x, weight=weight, bias=_shift(self.bias, mean))
        axes = output_axes(layer, x.shape)
        count = 0 if axes is None else output_count(layer, x.shape, axes)
        # Reading the input costs less than reading the output: from the input it is read once, its
        # gradient read and written; from the output it is read twice and written, its gradient read
        # twice and a centred copy written.
        if axes is None or x.numel() > 2 * unit_count(layer) * count:
            # Without b: its gradient through the layer would be 0.
            t = layers.linear_map(layer, x, weight=weight, bias=None)
            return self._center_outputs(t, None)
        with no_autocast(x):
            total = sum_outputs(layer, x, weight, axes)
        mean = mean_over_ranks(total, count, norm.group)
        t = layers.linear_map(layer, x, weight=weight, bias=_shift(self.bias, mean))
        norm.update(mean, count)  # last: a batch that raises an error does not count
        return t

    def _center_outputs(self, t: Tensor, added: Tensor | None) -> Tensor:
        """Return t̃ from outputs t to which the layer has `added` b; without b, t is ours."""
        _check_batched(self.layer, t)
        axis = 1 if isinstance(self.layer, layers.Conv) else t.ndim - 1
        mean = self.norm.mean(t, axis, added)
        shift = _along(_shift(self.bias, mean) if added is None else -mean, t, axis)
        # In place is twice as fast; under vmap the shift may have an axis that t has not.
        return t.add_(shift) if added is None and is_eager(t) else t + shift

    @property
    def bias(self) -> nn.Parameter | None:
        """b of eq. 7."""
        bias: nn.Parameter | None = self.layer.bias  # type: ignore[assignment]
        return bias

    def fold(self) -> nn.Module:
        """The layer alone, with the running mean folded into its bias: for inference."""
        return self.norm.fold_into(self.layer)


def mean_only_batch_norm(
    layer: nn.Module, momentum: float | None = 0.1, *, group: Group = None
) -> Centered:
    """Centre a layer's pre-activations over the batch (eq. 7); its bias becomes b of the paper.

    >>> layer = mean_only_batch_norm(nn.Linear(3, 2))
    >>> t = layer(torch.randn(8, 3))
    >>> torch.allclose(t.mean(0), layer.bias, atol=1e-6)
    True
    """
    kind, features = norm_rank(layer), unit_count(layer)
    cls = {1: MeanOnlyBatchNorm1d, 2: MeanOnlyBatchNorm2d, 3: MeanOnlyBatchNorm3d}[kind]
    like: Any = layer.weight
    norm = cls(features, momentum, bias=False, group=group, device=like.device, dtype=like.dtype)
    return Centered(layer, norm.train(layer.training))


@torch.no_grad()
def update_running_means(
    loader: Iterable[Any], model: nn.Module, device: torch.device | str | None = None
) -> None:
    """Recompute the running statistics of a model's mean-only and full batch norm layers.

    The counterpart of ``torch.optim.swa_utils.update_bn``, which does not recognize mean-only
    layers. Use it after weights were averaged or replaced: running statistics are reset, then
    averaged over all batches of the loader in training mode.

    Args:
        loader: yields inputs, or tuples or lists whose first item is the input.
        model: called on each input.
        device: where to move the inputs.
    """
    kinds = (_MeanOnlyBatchNorm, BatchNormBase)
    norms = [module for module in model.modules() if isinstance(module, kinds)]
    momenta = [norm.momentum for norm in norms]
    modes = {module: module.training for module in model.modules()}
    if not norms:
        return
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        model.train()
        for batch in loader:
            x = batch[0] if isinstance(batch, (list, tuple)) else batch
            model(x if device is None else x.to(device))
    finally:
        for module, mode in modes.items():
            module.training = mode
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _shift(bias: Tensor | None, mean: Tensor) -> Tensor:
    """b − μ."""
    return -mean if bias is None else bias - mean


def _along(shift: Tensor, t: Tensor, axis: int) -> Tensor:
    """Return one number per feature so that it broadcasts to t, whose features are along `axis`."""
    return shift.to(t.dtype).view(-1, *[1] * (t.ndim - 1 - axis))


def norm_rank(layer: nn.Module) -> int:
    """Return which of the norms, 1d, 2d or 3d, fits behind this layer."""
    if isinstance(layer, (nn.Linear, nn.Bilinear)):
        return 1
    if isinstance(layer, layers.Conv):
        return len(layer.kernel_size)
    raise TypeError(
        f"no batch statistics behind {type(layer).__name__}: expected a linear, bilinear or "
        "convolutional layer"
    )


def unit_count(layer: nn.Module) -> int:
    """Return the number of output units of a linear, bilinear or convolutional layer."""
    units: Any = layer.out_channels if isinstance(layer, layers.Conv) else layer.out_features
    return int(units)


def _is_plain(layer: nn.Module) -> bool:
    """Return whether calling this layer applies torch's own linear map and nothing else."""
    return (
        type_before_parametrizations(layer) in _PLAIN_LAYERS
        and "forward" not in layer.__dict__
        and "_conv_forward" not in layer.__dict__
        and not layer._forward_pre_hooks
        and not layer._forward_hooks
        and not layer._backward_pre_hooks
        and not layer._backward_hooks
        and not has_any_global_hook()
    )


_PLAIN_LAYERS = {
    nn.Linear,
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
}  # fmt: skip
"""Subclasses may have a forward of their own."""


def _check_batched(layer: nn.Module, x: Tensor) -> None:
    """Check that the input or output of a convolution has a batch axis: torch needs none."""
    if isinstance(layer, layers.Conv) and x.ndim != (batched := len(layer.kernel_size) + 2):
        raise ValueError(
            f"mean-only batch norm needs a batch: expected {batched} dimensions, got shape "
            f"{tuple(x.shape)}"
        )


def _is_recomputed() -> bool:
    """Return whether activation checkpointing repeats a forward pass, inside the backward pass."""
    return not torch.compiler.is_compiling() and current_graph_task_id() >= 0
