"""This library passes every feature with every layer, but for the misses named here."""

import pytest

from conformance.features import FEATURES
from conformance.ours import Ours

KNOWN_MISSES = {"initializing"}
"""A tensor that is computed cannot know that it was written to: `init_` is the way."""

PAIRS = [pytest.param(f, layer, id=f"{f.name}-{layer}") for f in FEATURES for layer in f.layers]


@pytest.mark.parametrize(("feature", "layer"), PAIRS)
def test_conforms(feature, layer):
    miss = feature.miss(Ours(), layer)
    if feature.name in KNOWN_MISSES:
        assert miss is not None, "missed no more: take it off the list"
    elif miss is not None:
        raise miss
