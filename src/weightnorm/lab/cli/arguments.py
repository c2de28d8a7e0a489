"""Words into configs, with tyro. A misspelt one is refused, and the nearest is named."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from dataclasses import make_dataclass, replace
from difflib import get_close_matches
from enum import Enum
from itertools import pairwise
from types import ModuleType
from typing import Annotated, Any, TypeVar

import tyro
from rich.console import Console

from weightnorm.lab.errors import UsageError
from weightnorm.lab.runs.config import RunConfig, preset_of

T = TypeVar("T")


def nearest(word: str, known: Iterable[str], kind: str) -> str:
    """The word itself if it is known; else an error that names the nearest.

    >>> nearest("rnu", ["list", "run"], "command")
    Traceback (most recent call last):
    weightnorm.lab.cli.arguments.UsageError: there is no command 'rnu'; did you mean 'run'?
    """
    names = list(known)
    if word in names:
        return word
    near = get_close_matches(word, names, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
    raise UsageError(f"there is no {kind} {word!r}; {hint}")


def parse_config(module: ModuleType, words: list[str], verb: str) -> Any:
    """An experiment's config: its preset, then the flags, then the preset's learning rate."""
    said = dict(pairwise([*_split(words), ""]))
    name = said.get("--preset", "cpu")
    if name not in module.PRESETS:
        name = "cpu"  # it is refused below
    preset = preset_of(module.PRESETS, name, said.get("--data", ""))
    config: RunConfig = parse(type(preset), words, verb, module.run, default=preset)
    if "--learning-rate" not in _split(words):
        rate = module.LEARNING_RATES[config.preset][config.parameterization]
        config = replace(config, learning_rate=rate)
    return config


def parse(kind: type[T], words: list[str], verb: str, about: Any, default: Any = None) -> T:
    """Options of a verb; SystemExit as argparse has it: 0 after help, 2 after a refusal."""
    parsed: T = _cli(kind, words, verb, about, {"default": default} if default else {})
    return parsed


def parse_known(kind: type[T], words: list[str], verb: str, about: Any) -> tuple[T, list[str]]:
    """Options of a verb, and the words that are not among them."""
    both: tuple[T, list[str]] = _cli(kind, words, verb, about, {"return_unknown_args": True})
    return both


def with_flags(kind: type[T], names: Iterable[str], about: str) -> type[T]:
    """The options, and for each name a flag that takes words."""
    words = Annotated[tuple[str, ...], tyro.conf.arg(help=about)]
    more = [(name, words, dataclasses.field(default=())) for name in names]
    doc = {"__doc__": kind.__doc__}
    return make_dataclass(kind.__name__, more, bases=(kind,), namespace=doc, frozen=True)


def refuse_singular(words: list[str], kind: Any) -> None:
    """A grid's ``--seed 1`` would be lost: its name is ``--seeds``."""
    plurals = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(kind)}
    for word in _split(words):
        if f"{word}s" in plurals:
            raise UsageError(f"a grid takes {word}s, one value or more; got {word}")


def _cli(kind: Any, words: list[str], verb: str, about: Any, more: dict[str, Any]) -> Any:
    try:
        return tyro.cli(
            kind,
            args=words,
            prog=f"weightnorm {verb}",
            description=f"{(about.__doc__ or '').splitlines()[0]}\n\n{kind.__doc__}",
            config=(tyro.conf.EnumChoicesFromValues,),
            **more,
        )
    except SystemExit as stop:
        if stop.code == 2:
            for hint in _hints(kind, words):
                Console(stderr=True).print(f"did you mean {hint}?", highlight=False)
        raise


def _hints(kind: Any, words: list[str]) -> list[str]:
    """For each value that is not among its field's choices, the nearest that is."""
    types, hints = typing.get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        known, flag = _choices(types[field.name]), f"--{field.name.replace('_', '-')}"
        for word, value in pairwise(_split(words)):
            if word == flag and known and value not in known:
                hints += [f"{flag} {near}" for near in get_close_matches(value, known, 1)]
    return hints


def _choices(hint: Any) -> list[str]:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [str(choice.value) for choice in hint]
    return [choice for choice in typing.get_args(hint) if isinstance(choice, str)]


def _split(words: list[str]) -> list[str]:
    """``--flag=value`` as two words."""
    return [part for word in words for part in (word.split("=", 1) if word[:2] == "--" else [word])]
