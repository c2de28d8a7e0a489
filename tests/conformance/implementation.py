"""The interface that the suite tests, and torch's two implementations."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.nn.utils import parametrizations as torch_parametrizations
from torch.nn.utils import parametrize


class Implementation:
    """An implementation of weight normalization. Subclasses define ``name`` and three methods."""

    name: str
    """Heading of its column in the table."""

    def apply(self, layer: nn.Module, name: str, **options: int | None) -> nn.Module:
        """Normalize one weight of a layer. `options` is empty, or holds the axis `dim` to keep."""
        raise NotImplementedError

    def remove(self, layer: nn.Module, name: str) -> object:
        """Replace that weight by a plain parameter, in place."""
        raise NotImplementedError

    def parts(self, layer: nn.Module, name: str) -> tuple[Tensor, Tensor]:
        """Return the parameters (v, g); g has size 1 along the axes the norm is taken over."""
        raise NotImplementedError

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which no other library changes this implementation."""
        return nullcontext()

    def weight(self, layer: nn.Module, name: str) -> Tensor:
        """Return the current w."""
        return getattr(layer, name)

    def load(self, layer: nn.Module, state: Mapping[str, Tensor]) -> object:
        """Load the state dict of another implementation."""
        return layer.load_state_dict(state)


@contextmanager
def without_correction() -> Iterator[None]:
    """Take back that using weightnorm corrects torch's second derivative."""
    functional = sys.modules.get("weightnorm.functional")
    if functional is None:
        yield
        return
    functional.correct_torch_second_derivative(False)
    try:
        yield
    finally:
        functional.correct_torch_second_derivative(True)


class TorchHook(Implementation):
    """``torch.nn.utils.weight_norm``: a hook computes the weight before every forward pass."""

    name = "torch, hook"
    alone = staticmethod(without_correction)

    def apply(self, layer, name, **options):
        return nn.utils.weight_norm(layer, name, **options)

    def remove(self, layer, name):
        nn.utils.remove_weight_norm(layer, name)

    def parts(self, layer, name):
        return getattr(layer, f"{name}_v"), getattr(layer, f"{name}_g")

    def weight(self, layer, name):
        for hook in layer._forward_pre_hooks.values():
            hook(layer, ())
        return getattr(layer, name)


class TorchParametrization(Implementation):
    """``torch.nn.utils.parametrizations.weight_norm``: the weight is computed when it is read."""

    name = "torch, parametrization"
    alone = staticmethod(without_correction)

    def apply(self, layer, name, **options):
        return torch_parametrizations.weight_norm(layer, name, **options)

    def remove(self, layer, name):
        parametrize.remove_parametrizations(layer, name)

    def parts(self, layer, name):
        parametrizations = layer.parametrizations[name]
        return parametrizations.original1, parametrizations.original0
