"""State dicts inside a checkpoint: mappings in mappings, lists and tuples, shared or cyclic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weightnorm.checkpoints import StateDictError

State = Mapping[Any, Any]
MAX_DEPTH = 100
"""Nesting that is followed; checkpoints have a few levels."""


def join_path(place: str, name: str) -> str:
    """Join the path of a mapping and a name in it.

    >>> join_path("generator", "0.weight"), join_path("", "0.weight")
    ('generator.0.weight', '0.weight')
    """
    return f"{place}.{name}" if place else name


def nested_mappings(
    value: Any, place: str = "", *, depth: int = 0, seen: set[int] | None = None
) -> Iterator[tuple[str, State]]:
    """Yield every mapping in a checkpoint with its path, each once, the outermost first.

    >>> [place for place, _ in nested_mappings({"models": [{}], "steps": 7})]
    ['', 'models.0']
    """
    seen = set() if seen is None else seen
    is_mapping = isinstance(value, Mapping)
    if not (is_mapping or type(value) in (list, tuple)) or id(value) in seen:
        return
    if depth > MAX_DEPTH:
        raise StateDictError(f"mappings are nested more than {MAX_DEPTH} deep")
    seen.add(id(value))
    if is_mapping:
        yield place, value
    for key, item in value.items() if is_mapping else enumerate(value):
        yield from nested_mappings(item, join_path(place, str(key)), depth=depth + 1, seen=seen)


def with_mappings(checkpoint: State, new: dict[int, dict[Any, Any]]) -> Any:
    """Return a checkpoint in which ``new[id(mapping)]`` takes the place of every mapping.

    The values of `new` are changed in place, since mappings may be shared or contain themselves.
    """
    done: dict[int, Any] = {**new}
    for mapping in new.values():
        for key, value in mapping.items():
            mapping[key] = _replaced(value, done)
    return new[id(checkpoint)]


def _replaced(value: Any, done: dict[int, Any]) -> Any:
    """Return a value of a checkpoint with its mappings replaced by those that are `done`."""
    if id(value) in done:
        return done[id(value)]
    if type(value) is tuple:
        return tuple(_replaced(item, done) for item in value)
    if type(value) is list:
        copy = done[id(value)] = []  # first, since a list may contain itself
        copy += [_replaced(item, done) for item in value]
        return copy
    return value
