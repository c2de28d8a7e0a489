"""The suite itself: every feature can be missed, and what it leaves out it leaves out fairly."""

import pytest
import torch

from conformance.features import FEATURES
from conformance.implementation import Implementation, TorchHook, TorchParametrization


class Careless(Implementation):
    """One norm for all units, taken for a constant and branched on; g = 1; parts kept outside."""

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
def test_every_feature_can_be_missed(feature):
    implementations = (Careless(), TorchHook(), TorchParametrization())
    assert any(feature.miss(one, "linear") for one in implementations)


class Plain(Implementation):
    """No weight normalization at all."""

    def apply(self, layer, name, **options):
        return layer

    def parts(self, layer, name):
        return (layer.get_parameter(name),) * 2


LEFT_OUT = [pytest.param(f, layer, id=f"{f.name}-{layer}") for f in FEATURES for layer in f.without]


@pytest.mark.parametrize(("feature", "layer"), LEFT_OUT)
def test_what_is_left_out_fails_without_weight_norm_too(feature, layer):
    assert isinstance(feature.miss(Plain(), layer), NotImplementedError)


def test_features_have_names_of_their_own():
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)
