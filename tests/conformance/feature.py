"""A feature: what any weight normalization should do; a function that raises where it does not."""

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
    """A check, and the layers it is tried on."""

    check: Callable[[Subject], None]
    layers: tuple[str, ...]
    """The layers of the zoo it is tried on."""
    without: Collection[str]
    """Layers that torch itself has no such feature for, normalized or not."""

    @property
    def name(self) -> str:
        return self.check.__name__

    @property
    def says(self) -> str:
        """One sentence, with the threads where users asked for it."""
        return " ".join(self.check.__doc__.split())

    @property
    def section(self) -> str:
        return sys.modules[self.check.__module__].__doc__

    def miss(self, implementation: Implementation, layer: str) -> Exception | None:
        """What goes wrong with this layer, if anything does."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.check(Subject(implementation, LAYERS[layer]))
            except Exception as error:
                return error
        return None


def feature(only: Iterable[str] = LAYERS, without: Collection[str] = ()):
    """Make a check a feature, tried on the layers named but those it goes `without`."""
    layers = tuple(name for name in only if name not in without)
    return lambda check: Feature(check, layers, without)
