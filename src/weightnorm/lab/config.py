"""Config fields common to all experiments, their validation, and the folder a run is recorded in.

An experiment's Config is a frozen dataclass whose defaults are the paper's settings. The annotation
of a field is also its valid range: `epochs: Count` is an integer from 1 up, and any other value
raises a ConfigError.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import tyro

from weightnorm import Parameterization
from weightnorm.lab.errors import require
from weightnorm.lab.records import to_json

C = TypeVar("C", bound="RunConfig")


# — valid values —


class Range(NamedTuple):
    """Range of a number, limits included. NaN is outside of every range."""

    low: float
    high: float
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"from {self.low:,} to {self.high:,}"


TINY, LARGE = math.ulp(0.0), sys.float_info.max  # the smallest positive and the largest float

Count = Annotated[int, Range(1, 10**9)]
"""A number of steps, epochs or examples."""
Size = Annotated[int, Range(1, 100_000)]
"""A dimension of a tensor."""
Several = Annotated[int, Range(2, 100_000)]
"""A number of examples whose mean and variance are taken."""
Limit = Annotated[int, Range(2, 10**9)]
"""A number of training examples, enough for a mean and a variance."""
Positive = Annotated[float, Range(TINY, LARGE, "a positive number")]
Nonnegative = Annotated[float, Range(0, LARGE, "a finite number of 0 or more")]
Probability = Annotated[float, Range(0, 1)]


# — the fields of every experiment —


@dataclass(frozen=True)
class RunConfig:
    """Fields of every experiment."""

    preset: Literal["paper", "cpu", "demo"] = "paper"
    """Defaults of the other fields: the paper's sizes, real data on a laptop, or one minute."""
    parameterization: Parameterization = Parameterization.WEIGHT_NORM
    """Parameterization of the weights and normalization of the pre-activations."""
    learning_rate: Positive | None = None
    """Learning rate at the start; by default the preset's for this parameterization."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 1
    """Seed of the initial weights, the order of the data, and the noise."""

    out: Path = Path("runs")
    """Folder for the records of all runs."""
    data_dir: Path | None = None
    """Folder of the data sets. Default: $WEIGHTNORM_DATA, then the user's cache folder."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto for the fastest one available."""
    compile: bool = False
    """Compile the model with torch.compile."""
    checkpoint_seconds: Annotated[float, Range(0, math.inf, "0 or more")] = 60.0
    """Time between checkpoints: at most this much is repeated after a kill."""
    wait_seconds: Annotated[float, Range(TINY, 1e7, "above 0 and at most 1e+07")] = 300.0
    """Time to wait for another rank before the run fails."""
    about: tyro.conf.Suppress[str] = dataclasses.field(default="", repr=False, compare=False)
    """Size and duration of a preset, for `weightnorm list`."""

    EXECUTION_FIELDS: ClassVar[frozenset[str]] = frozenset(
        {"out", "data_dir", "device", "compile", "checkpoint_seconds", "wait_seconds", "about"}
    )
    """Fields that do not change what is computed. They may differ when a run is resumed."""

    FOLDER_FIELDS: ClassVar[tuple[str, ...]] = ("parameterization",)
    """Fields with a folder level of their own, between the preset and the learning rate."""

    COMPARED: ClassVar[tuple[Parameterization, ...]] = tuple(Parameterization)
    """Parameterizations that the experiment compares; it has no others."""

    def __post_init__(self) -> None:
        """Raise a ConfigError for a number outside of its range or an unknown choice."""
        kind: Any = type(self)  # mypy takes a class for unhashable whose instances are
        for name, optional, limits in _limits(kind):
            value = getattr(self, name)
            if optional and value is None:
                continue
            if isinstance(limits, Range):
                require(limits.low <= value <= limits.high, name, value, str(limits))
            else:
                require(value in limits, name, repr(value), f"one of {', '.join(limits)}")
        how, compared = self.parameterization, " or ".join(map(str, self.COMPARED))
        require(how in self.COMPARED, "parameterization", how, f"{compared} in this experiment")
        object.__setattr__(self, "parameterization", Parameterization(how))  # also for a string

    @property
    def rate(self) -> float:
        """The initial learning rate: the one that was given, or else the default."""
        return self.default_rate if self.learning_rate is None else self.learning_rate

    @property
    def default_rate(self) -> float:
        """The preset's learning rate for the parameterization."""
        raise NotImplementedError


@cache
def _limits(kind: Any) -> list[tuple[str, bool, Range | tuple[str, ...]]]:
    """Return each limited field, whether it may be None, and its range or its choices."""
    found: list[tuple[str, bool, Range | tuple[str, ...]]] = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        choices = typing.get_args(hint)
        extras = [x for part in (hint, *choices) for x in getattr(part, "__metadata__", ())]
        found += [(name, NoneType in choices, x) for x in extras if isinstance(x, Range)]
        if typing.get_origin(hint) is Literal:
            found.append((name, False, choices))
    return found


# — records and folders —


def scientific_fields(config: RunConfig) -> dict[str, Any]:
    """Return the fields that determine what is computed, as JSON values."""
    fields = {
        name: value
        for name, value in {**dataclasses.asdict(config), "learning_rate": config.rate}.items()
        if name not in config.EXECUTION_FIELDS
    }
    values: dict[str, Any] = json.loads(to_json(fields))
    return values


def completed(recorded: Mapping[str, Any], kind: type[RunConfig]) -> dict[str, Any]:
    """Return the fields of a recorded config, with the defaults of those that are newer than it."""
    return {**scientific_fields(kind()), **recorded}


def find_preset(presets: Mapping[str, C], name: str, data: str) -> C:
    """Return the preset for a data set, such as ``cpu cifar10``, or else the one called `name`."""
    return presets.get(f"{name} {data}", presets[name])


def preset_of(config: C, presets: Mapping[str, C]) -> C:
    """Return the preset that a config was derived from."""
    return find_preset(presets, config.preset, getattr(config, "data", ""))


def folder(experiment: str, config: C, presets: Mapping[str, C]) -> Path:
    """Return ``runs/<experiment>/<preset>/<parameterization>/lr-…/seed-…``.

    Other fields that differ from the preset are appended to its name: ``cpu+epochs=3``.
    """
    own_level = {"learning_rate", "seed", *config.FOLDER_FIELDS}
    defaults = scientific_fields(preset_of(config, presets))
    changed = [
        f"{name.replace('_', '-')}={value}"
        for name, value in scientific_fields(config).items()
        if value != defaults[name] and name not in own_level
    ]
    levels = [str(getattr(config, name)) for name in config.FOLDER_FIELDS]
    label = "+".join([config.preset, ",".join(changed)]) if changed else config.preset
    return Path(
        config.out, experiment, label, *levels, f"lr-{config.rate:g}", f"seed-{config.seed}"
    )
