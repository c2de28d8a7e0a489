"""This library, as an implementation for the suite."""

import weightnorm
from conformance.implementation import Implementation


class Ours(Implementation):
    name = "weightnorm"

    def apply(self, layer, name, **options):
        return weightnorm.weight_norm(layer, name, **options)

    def remove(self, layer, name):
        weightnorm.remove_weight_norm(layer, name)

    def parts(self, layer, name):
        return weightnorm.parts(layer, name)

    def load(self, layer, state):
        layer.load_state_dict(weightnorm.convert_state_dict(state, to="folded"))
