"""Validate the fields of a config: their types and their ranges."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple

from weightnorm.lab.errors import require


class Limits(NamedTuple):
    """Range of a number. NaN is outside of every range."""

    low: float
    high: float
    open_low: bool = False
    """Whether `low` itself is excluded."""
    open_high: bool = False
    """Whether `high` itself is excluded."""

    def contain(self, value: float) -> bool:
        above = self.low < value if self.open_low else self.low <= value
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        """
        >>> print(POSITIVE, "|", NONNEGATIVE, "|", PROBABILITY)
        a positive number | a finite number of 0 or more | from 0 to 1
        """
        low, high = (f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in (self.low, self.high))
        if self.high == math.inf:
            if self.open_low and self.low == 0:
                return "a positive number"
            return f"a finite number of {low} or more" if self.open_high else f"{low} or more"
        if self.open_low or self.open_high:
            first = f"above {low}" if self.open_low else f"at least {low}"
            return f"{first} and {'below' if self.open_high else 'at most'} {high}"
        return f"from {low} to {high}"


COUNT = Limits(1, 10**9)
"""A number of steps, epochs or examples."""
SIZE = Limits(1, 100_000)
"""A dimension of a tensor."""
SEVERAL = Limits(2, 100_000)
"""A number of examples whose mean and variance are taken."""
POSITIVE = Limits(0, math.inf, open_low=True, open_high=True)
NONNEGATIVE = Limits(0, math.inf, open_high=True)
PROBABILITY = Limits(0, 1)


def validate(config: Any, limits: Mapping[str, Limits]) -> None:
    """Raise a ConfigError for a field of the wrong type or outside of its limits."""
    for name, hint in _hints(config.__class__).items():
        value = getattr(config, name)
        shown = repr(value) if isinstance(value, str) else value
        require(_is_instance(value, hint), name, shown, _expected(hint))
        if name in limits and value is not None:
            require(limits[name].contain(value), name, value, str(limits[name]))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _is_instance(value: Any, hint: Any) -> bool:
    """`isinstance` for the annotations that a config uses. A bool is not a number."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if origin is UnionType or origin is typing.Union:
        return any(_is_instance(value, choice) for choice in typing.get_args(hint))
    if hint in (int, float):
        numbers = (int, float) if hint is float else int
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, hint)


def _expected(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    choices = typing.get_args(hint) or (hint,)
    return " or ".join("none" if choice is NoneType else choice.__name__ for choice in choices)
