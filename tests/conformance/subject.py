"""One implementation applied to one layer type, with the formula as a reference."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from conformance.implementation import Implementation
from zoo import Case


@dataclass(frozen=True)
class Subject:
    """The implementation and the layer type that a feature is tested on."""

    implementation: Implementation
    case: Case

    @cached_property
    def names(self) -> list[str]:
        """Names of the layer's own weights: its parameters of two or more dimensions."""
        parameters = self.case.make().named_parameters(recurse=False)
        return [name for name, p in parameters if p.ndim > 1]

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.case.inputs()

    def normalized(self, layer: nn.Module | None = None, **options: int | None) -> nn.Module:
        """Normalize all weights of a layer, by default of a new one."""
        layer = self.case.make() if layer is None else layer
        for name in self.names:
            layer = self.implementation.apply(layer, name, **options)
        return layer

    def trained(self, **options: int | None) -> nn.Module:
        """Return a normalized layer with g ≠ ‖v‖, as after training; some g are negative."""
        layer = self.normalized(**options)
        with torch.no_grad():
            for v, g in self.parts(layer):
                v.add_(0.3 * torch.randn_like(v))
                g.mul_(torch.where(torch.rand_like(g) < 0.3, -1.5, 1.5))
        return layer

    def remove(self, layer: nn.Module) -> nn.Module:
        for name in self.names:
            self.implementation.remove(layer, name)
        return layer

    def parts(self, layer: nn.Module) -> list[tuple[Tensor, Tensor]]:
        return [self.implementation.parts(layer, name) for name in self.names]

    def weights(self, layer: nn.Module) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return (w, v, g) of each weight."""
        read = self.implementation.weight
        return [
            (read(layer, name), *pair)
            for name, pair in zip(self.names, self.parts(layer), strict=True)
        ]

    def run(self, layer: nn.Module) -> Tensor:
        return self.case.run(layer, self.inputs)

    def double(self) -> "Subject":
        """Return the same in float64, for comparisons without visible rounding."""
        wide = Case(lambda: self.case.make().double(), lambda: _double(self.case.inputs()))
        return Subject(self.implementation, wide)

    def oracle(self, layer: nn.Module, leaves: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute the output of a plain layer whose weights are w = g·v/‖v‖."""
        plain, own = self.case.make(), dict(layer.named_parameters())
        given = {name: own[name] for name, _ in plain.named_parameters() if name in own}
        weights = {name: compose(v, g) for name, (v, g) in zip(self.names, leaves, strict=True)}
        out = torch.func.functional_call(plain, {**given, **weights}, self.inputs)
        return out[0] if isinstance(out, tuple) else out


def compose(v: Tensor, g: Tensor) -> Tensor:
    """w = g·v/‖v‖ (eq. 2), the norm over the axes along which g has size 1.

    If g has fewer entries along axis 0 than v but more than one, axis 0 of v is split into groups.
    """
    shape = v.shape
    if g.ndim and g.shape[0] not in (1, v.shape[0]):
        v, g = v.unflatten(0, (g.shape[0], -1)), g.unsqueeze(1)
    axes = [axis for axis in range(v.ndim) if not g.ndim or g.shape[axis] == 1]
    return (g * v / torch.linalg.vector_norm(v, dim=axes, keepdim=True)).reshape(shape)


def units(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return the weight as a matrix with one row for each output unit of the layer."""
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):  # (in, out / groups, …)
        weight = weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
    return weight.flatten(1)


def leaves(parts: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Copy (v, g) to new leaf tensors that require gradients."""
    return [tuple(p.detach().clone().requires_grad_() for p in pair) for pair in parts]


def flat(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [tensor for pair in pairs for tensor in pair]


def _double(value):
    if isinstance(value, tuple):
        return tuple(map(_double, value))
    return value.double() if value.is_floating_point() else value
