"""This library has every feature on every layer type, except for the known failures."""

import pytest

from conformance.features import FEATURES
from conformance.ours import Ours

KNOWN_FAILURES = {"initializing"}
"""Writes to a computed tensor cannot be detected; ``init_`` initializes normalized weights."""

PAIRS = [pytest.param(f, layer, id=f"{f.name}-{layer}") for f in FEATURES for layer in f.layers]


@pytest.mark.parametrize(("feature", "layer"), PAIRS)
def test_conforms(feature, layer):
    failure = feature.failure(Ours(), layer)
    if feature.name in KNOWN_FAILURES:
        assert failure is not None, "it passes now: remove it from KNOWN_FAILURES"
    elif failure is not None:
        raise failure
