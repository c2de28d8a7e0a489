"""Parse options with tyro; errors name the nearest valid word."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from dataclasses import make_dataclass
from difflib import get_close_matches
from enum import Enum
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import tyro
from rich.console import Console

from weightnorm.lab.cli.verbs import VERBS
from weightnorm.lab.errors import UsageError

T = TypeVar("T")


def parse(kind: type[T], words: list[str], verb: str, default: Any = None) -> T:
    """Parse the options of a verb; SystemExit(0) after help, SystemExit(2) after an error."""
    parsed: T = _cli(kind, words, verb, {"default": default} if default else {})
    return parsed


def parse_known(kind: type[T], words: list[str], verb: str) -> tuple[T, list[str]]:
    """Parse the options of a verb, and return the words that are none of them."""
    both: tuple[T, list[str]] = _cli(kind, words, verb, {"return_unknown_args": True})
    return both


def with_flags(kind: type[T], names: Iterable[str], about: str) -> type[T]:
    """Add a flag with any number of values for each name."""
    words = Annotated[tuple[str, ...], tyro.conf.arg(help=about)]
    more = [(name, words, dataclasses.field(default=())) for name in names]
    doc = {"__doc__": kind.__doc__}
    return make_dataclass(kind.__name__, more, bases=(kind,), namespace=doc, frozen=True)


def refuse_singular(words: list[str], kind: Any) -> None:
    """Raise UsageError for ``--seed 1``, which a grid would ignore: its flag is ``--seeds``."""
    plurals = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(kind)}
    for word in split_flags(words):
        if f"{word}s" in plurals:
            raise UsageError(f"a grid takes {word}s, one value or more; got {word}")


def _cli(kind: Any, words: list[str], verb: str, more: dict[str, Any]) -> Any:
    try:
        return tyro.cli(
            kind,
            args=words,
            prog=f"weightnorm {verb}",
            description=f"{VERBS[verb.split()[0]].summary}\n\n{kind.__doc__}",
            config=(tyro.conf.EnumChoicesFromValues,),
            **more,
        )
    except SystemExit as stop:
        if stop.code == 2:
            for hint in _hints(kind, words):
                Console(stderr=True).print(f"did you mean {hint}?", highlight=False)
        raise


def _hints(kind: Any, words: list[str]) -> list[str]:
    """Return the nearest valid value for each value that is not among its field's choices."""
    types, hints = typing.get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        known, flag = _choices(types[field.name]), f"--{field.name.replace('_', '-')}"
        for word, value in pairwise(split_flags(words)):
            if word == flag and known and value not in known:
                hints += [f"{flag} {near}" for near in get_close_matches(value, known, 1)]
    return hints


def _choices(hint: Any) -> list[str]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [str(choice.value) for choice in hint]
    return [choice for choice in typing.get_args(hint) if isinstance(choice, str)]


def split_flags(words: list[str]) -> list[str]:
    """Split ``--flag=value`` into two words, and write flags with dashes.

    >>> split_flags(["--learning_rate=0.1", "--data_dir", "a_b"])
    ['--learning-rate', '0.1', '--data-dir', 'a_b']
    """
    split: list[str] = []
    for word in words:
        if word.startswith("--"):
            flag, *value = word.split("=", 1)
            split += [flag.replace("_", "-"), *value]  # tyro accepts both
        else:
            split.append(word)
    return split
