"""Every feature, in the order of the table."""

from conformance.feature import Feature
from conformance.features import compilers, copies, training, values, weights

FEATURES = [
    feature
    for section in (values, training, copies, weights, compilers)
    for feature in vars(section).values()
    if isinstance(feature, Feature)
]
