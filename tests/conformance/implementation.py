"""What the suite asks of a weight normalization, and torch's two."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


class Implementation:
    """A weight normalization. For another one, derive from this and fill in the first four."""

    name: str
    """What the table calls it."""

    def apply(self, layer: nn.Module, name: str, **options: int | None) -> nn.Module:
        """Normalize one weight of a layer. `options` is empty, or says which axis `dim` to keep."""
        raise NotImplementedError

    def remove(self, layer: nn.Module, name: str) -> object:
        """Make that weight a plain parameter again, in place."""
        raise NotImplementedError

    def parts(self, layer: nn.Module, name: str) -> tuple[Tensor, Tensor]:
        """The trained parameters (v, g); g has size 1 along the axes its norm is taken over."""
        raise NotImplementedError

    def weight(self, layer: nn.Module, name: str) -> Tensor:
        """w as it is now."""
        return getattr(layer, name)

    def load(self, layer: nn.Module, state: Mapping[str, Tensor]) -> object:
        """Load a checkpoint from elsewhere."""
        return layer.load_state_dict(state)


class TorchHook(Implementation):
    """torch's first: a hook computes the weight before every forward pass."""

    name = "torch, hook"

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
    """torch's second: the weight is a property, computed whenever it is read."""

    name = "torch, parametrization"

    def apply(self, layer, name, **options):
        return parametrizations.weight_norm(layer, name, **options)

    def remove(self, layer, name):
        parametrize.remove_parametrizations(layer, name)

    def parts(self, layer, name):
        originals = layer.parametrizations[name]
        return originals.original1, originals.original0
