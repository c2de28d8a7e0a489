"""State dicts inside a checkpoint: mappings in mappings, lists and tuples, shared or cyclic."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
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


def nested_mappings(checkpoint: State) -> list[tuple[str, State]]:
    """Return every mapping in a checkpoint with its path, each once, the outermost first.

    >>> [place for place, _ in nested_mappings({"models": [{}], "steps": 7})]
    ['', 'models.0']
    """
    containers: list[tuple[str, Any]] = [("", checkpoint)]
    depths = {id(checkpoint): 0}
    for place, container in containers:  # grows while it is read: no recursion
        depth = depths[id(container)] + 1
        items = container.items() if isinstance(container, Mapping) else enumerate(container)
        for key, value in items:
            nested = isinstance(value, Mapping) or type(value) in (list, tuple)
            if nested and id(value) not in depths:
                if depth > MAX_DEPTH:
                    raise StateDictError(f"mappings are nested more than {MAX_DEPTH} deep")
                depths[id(value)] = depth
                containers.append((join_path(place, str(key)), value))
    return [(place, found) for place, found in containers if isinstance(found, Mapping)]


def convert_nested(checkpoint: State, convert: Callable[[State], State]) -> Any:
    """Return a checkpoint in which every mapping is replaced by ``convert(mapping)``.

    A mapping that occurs several times is converted once. The versions of modules, which
    ``load_state_dict`` reads from a state dict's ``_metadata``, are kept.
    """
    results: dict[int, Any] = {}
    for _, mapping in nested_mappings(checkpoint):
        result: Any = dict(convert(mapping))
        if hasattr(mapping, "_metadata"):
            result = OrderedDict(result)
            result._metadata = mapping._metadata
        results[id(mapping)] = result
    for result in list(results.values()):
        for key, value in result.items():
            result[key] = _replaced(value, results)
    return results[id(checkpoint)]


def _replaced(value: Any, results: dict[int, Any]) -> Any:
    """Return a value of a checkpoint with its mappings replaced by their `results`."""
    if id(value) in results:
        return results[id(value)]
    if type(value) is tuple:
        return tuple(_replaced(item, results) for item in value)
    if type(value) is list:
        copy = results[id(value)] = []  # first, since a list may contain itself
        copy += [_replaced(item, results) for item in value]
        return copy
    return value


def untouched(tensors: Iterable[tuple[str, int]], converted: Iterable[str]) -> dict[str, int]:
    """Return the outermost parts of a checkpoint without a converted weight, and their tensors.

    >>> untouched([("model", 9), ("optim.0", 3), ("optim.1", 2), ("", 1)], ["model"])
    {'optim': 5}

    Args:
        tensors: the place of each mapping and its number of tensors.
        converted: the places of the mappings in which a weight was converted.
    """
    touched = {place[:end] for place in converted for end in _ends(place)}
    found: Counter[str] = Counter()
    for place, count in tensors:
        outermost = (place[:end] for end in _ends(place) if place[:end] not in touched)
        if count and (part := next(outermost, None)) is not None:
            found[part] += count
    return dict(found)


def _ends(place: str) -> list[int]:
    """Return the lengths of a path's beginnings, the empty one first."""
    return [0, *(i for i, char in enumerate(place) if char == "."), len(place)]
