"""Errors whose message is written for the user, and the check that raises one for a bad setting."""

from __future__ import annotations

from typing import Any, ClassVar


class LabError(Exception):
    """Base of all errors that the command line prints as one message, without a traceback."""

    exit_code: ClassVar[int] = 1


class UsageError(LabError):
    """A command line that cannot be parsed; the message names the nearest valid words."""

    exit_code = 2


class ConfigError(LabError, ValueError):
    """A config that cannot be run; the message names the field and its valid values."""

    exit_code = 2


class DataError(LabError, RuntimeError):
    """Data that is missing, damaged, or of the wrong kind; the message says what to do."""


class RunError(LabError):
    """A run that cannot continue; the message says what to do."""


class CheckpointError(LabError):
    """No readable checkpoint is left in a run's folder."""


class RecordError(LabError):
    """A record that cannot be read, with the reason."""


class ReportError(LabError):
    """A report that cannot be made; the message says what to do."""


class FileError(LabError):
    """A checkpoint file that cannot be read, converted or written, with the reason."""


class Interrupted(LabError):
    """The user asked to stop; everything is saved in the folder that the message names."""

    exit_code = 130


def require(holds: bool, field: str, got: Any, expected: str) -> None:
    """Raise a ConfigError that names the field unless `holds`."""
    if not holds:
        raise ConfigError(f"{field.replace('_', '-')} is {got}; expected {expected}")
