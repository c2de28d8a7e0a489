"""The suite itself: every feature can fail, and unsupported layer types fail in torch too."""

import pytest
import torch

from conformance.features import FEATURES
from conformance.implementation import Implementation, TorchHook, TorchParametrization


class Wrong(Implementation):
    """One norm for all units, detached and branched on; g = 1; v and g are not registered."""

    def apply(self, layer, name, **options):
        v = layer._parameters.pop(name)
        g = torch.ones(len(v), *[1] * (v.ndim - 1), requires_grad=True)
        object.__setattr__(layer, "hidden", (v, g))
        layer.register_forward_pre_hook(lambda *_: setattr(layer, name, self.weight(layer, name)))
        return layer

    def parts(self, layer, name):
        return layer.hidden

    def weight(self, layer, name):
        (v, g), norm = layer.hidden, layer.hidden[0].detach().norm()
        return g * v / norm if norm > 0 else v


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_every_feature_can_fail(feature):
    implementations = (Wrong(), TorchHook(), TorchParametrization())
    assert any(feature.failure(one, "linear") for one in implementations)


class Plain(Implementation):
    """No weight normalization."""

    def apply(self, layer, name, **options):
        return layer

    def parts(self, layer, name):
        return (layer.get_parameter(name),) * 2


UNSUPPORTED = [
    pytest.param(f, layer, id=f"{f.name}-{layer}") for f in FEATURES for layer in f.unsupported
]


@pytest.mark.parametrize(("feature", "layer"), UNSUPPORTED)
def test_unsupported_layers_fail_without_weight_norm(feature, layer):
    assert isinstance(feature.failure(Plain(), layer), NotImplementedError)


def test_feature_names_are_unique():
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)
