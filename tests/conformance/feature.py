"""A feature that any weight normalization should have, as a function that raises if it fails."""

import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

from conformance.implementation import Implementation
from conformance.subject import Subject
from zoo import LAYERS


@dataclass(frozen=True)
class Feature:
    """A check and the layer types it is run on."""

    check: Callable[[Subject], None]
    layers: tuple[str, ...]
    """Names in ``zoo.LAYERS``."""
    unsupported: Collection[str]
    """Layer types for which torch lacks the feature even without weight norm."""

    @property
    def name(self) -> str:
        return self.check.__name__

    @property
    def description(self) -> str:
        """One sentence, with links to the issues where users asked for it."""
        return " ".join(self.check.__doc__.split())

    @property
    def section(self) -> str:
        return sys.modules[self.check.__module__].__doc__

    def failure(self, implementation: Implementation, layer: str) -> Exception | None:
        """Run the check on a layer type; return the exception it raises, if any."""
        torch.manual_seed(0)
        with warnings.catch_warnings(), implementation.alone():
            warnings.simplefilter("ignore")
            try:
                self.check(Subject(implementation, LAYERS[layer]))
            except Exception as error:
                return error
        return None


def feature(layers: Iterable[str] = LAYERS, unsupported: Collection[str] = ()):
    """Return a decorator that turns a check into a feature of these layer types."""
    supported = tuple(name for name in layers if name not in unsupported)
    return lambda check: Feature(check, supported, unsupported)
