"""Errors whose message is written for the user, and a check for config fields."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, ClassVar


class LabError(Exception):
    """Base of all errors that the command line prints as one message, without a traceback."""

    exit_code: ClassVar[int] = 1


class ConfigError(LabError, ValueError):
    """A config or command that cannot be run; the message names what is valid."""

    exit_code = 2


class DataError(LabError, RuntimeError):
    """Data that is missing, damaged, or of the wrong kind; the message includes what to do."""


class RunError(LabError):
    """A run that cannot continue; the message includes what to do."""


class Diverged(LabError):
    """A run that ended because a number was not finite; this is recorded as its result."""


class RecordError(LabError):
    """A record that cannot be read, with the reason."""


class ReportError(LabError):
    """A report that cannot be made; the message includes what to do."""


class Interrupted(LabError):
    """A command stopped by the user; the message is the folder in which everything is saved."""

    exit_code = 130


def require(holds: bool, field: str, got: Any, expected: str) -> None:
    """Raise a ConfigError that names the field and the expected values unless `holds`."""
    if not holds:
        raise ConfigError(f"{field.replace('_', '-')} is {got}; expected {expected}")


def nearest(word: str, known: Iterable[str], kind: str) -> str:
    """The word itself if it is known; else an error that names the nearest.

    >>> nearest("rnu", ["list", "run"], "command")
    Traceback (most recent call last):
    weightnorm.lab.errors.ConfigError: there is no command 'rnu'; did you mean 'run'?
    """
    names = list(known)
    if word in names:
        return word
    near = get_close_matches(word, names, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
    raise ConfigError(f"there is no {kind} {word!r}; {hint}")
