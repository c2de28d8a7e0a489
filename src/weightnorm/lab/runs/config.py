"""Config fields common to all experiments, and the folder a run is recorded in."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from weightnorm import Parameterization
from weightnorm.lab.records import to_json
from weightnorm.lab.runs.validation import POSITIVE, Limits, validate

C = TypeVar("C", bound="RunConfig")


@dataclass(frozen=True)
class RunConfig:
    """Fields of every experiment."""

    preset: Literal["paper", "cpu", "demo"] = "cpu"
    """Defaults of the other fields: the paper's sizes, real data on a laptop, or one minute."""
    parameterization: Parameterization = Parameterization.WEIGHT_NORM
    """Parameterization of the weights and normalization of the pre-activations."""
    learning_rate: float = 0.003
    """Learning rate at the start. The command line's default is the preset's for this
    parameterization."""
    seed: int = 1
    """Seed of the initial weights, the order of the data, and the noise."""

    runs: Path = Path("runs")
    """Folder for the records of all runs."""
    data_dir: Path | None = None
    """Folder of the data sets. Default: $WEIGHTNORM_DATA, then the user's cache folder."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto for the fastest one available."""
    compile: bool = False
    """Compile the model with torch.compile."""
    checkpoint_seconds: float = 60.0
    """Time between checkpoints: at most this much is repeated after a kill."""
    wait_seconds: float = 300.0
    """Time to wait for another rank before the run fails."""

    EXECUTION_FIELDS: ClassVar[frozenset[str]] = frozenset(
        {"runs", "data_dir", "device", "compile", "checkpoint_seconds", "wait_seconds"}
    )
    """Fields that do not change what is computed. They may differ when a run is resumed."""

    FOLDER_FIELDS: ClassVar[tuple[str, ...]] = ("parameterization",)
    """Fields with a folder level of their own, between the preset and the learning rate."""

    LIMITS: ClassVar[dict[str, Limits]] = {
        "learning_rate": POSITIVE,
        "seed": Limits(0, 2**63 - 1),
        "checkpoint_seconds": Limits(0, math.inf),
        "wait_seconds": Limits(0, 1e7, open_low=True),
    }
    """Valid range of every number."""

    def __post_init__(self) -> None:
        validate(self, self.LIMITS)


def scientific_fields(config: RunConfig) -> dict[str, Any]:
    """Return the fields that determine what is computed, as JSON values."""
    fields = {
        name: value
        for name, value in dataclasses.asdict(config).items()
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
    rate, seed = f"lr-{config.learning_rate:g}", f"seed-{config.seed}"
    return Path(config.runs, experiment, label, *levels, rate, seed)
