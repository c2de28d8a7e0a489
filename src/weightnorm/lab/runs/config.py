"""What every experiment's config shares: how it is executed, and the folder it is recorded in."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from weightnorm import Parameterization
from weightnorm.lab.runs.validation import POSITIVE, Limits, validate

C = TypeVar("C", bound="RunConfig")


@dataclass(frozen=True)
class RunConfig:
    """Fields of every experiment."""

    preset: Literal["paper", "cpu", "demo"] = "cpu"
    """Where the other fields start from: the paper's sizes, real data on a laptop, or a minute."""
    parameterization: Parameterization = Parameterization.WEIGHT_NORM
    """How the weights are expressed and the pre-activations normalized."""
    learning_rate: float = 0.003
    """Step size at the start; on the command line, by default what the preset has for the
    parameterization: the paper's choice, except for digits."""
    seed: int = 1
    """Decides the initial weights, the order of the data, and the noise."""

    runs: Path = Path("runs")
    """Folder that holds the records of all runs."""
    data_dir: Path | None = None
    """Folder of the data sets; else $WEIGHTNORM_DATA, else the user's cache."""
    device: str = "auto"
    """cpu, cuda, cuda:1, mps, or auto for the best there is."""
    compile: bool = False
    """Run the model through torch.compile."""
    checkpoint_seconds: float = 60.0
    """A checkpoint at least this often; after a kill, at most this much is done again."""
    wait_seconds: float = 300.0
    """With many ranks: how long to wait for another one before giving it up for lost."""

    EXECUTION: ClassVar[frozenset[str]] = frozenset(
        {"runs", "data_dir", "device", "compile", "checkpoint_seconds", "wait_seconds"}
    )
    """Fields that say how to run, not what: they do not name the folder and may change."""

    PLACE: ClassVar[tuple[str, ...]] = ("parameterization",)
    """Fields that are folders of their own between the preset and the learning rate."""

    LIMITS: ClassVar[dict[str, Limits]] = {
        "learning_rate": POSITIVE,
        "seed": Limits(0, 2**63 - 1),
        "checkpoint_seconds": Limits(0, math.inf),
        "wait_seconds": Limits(0, 1e7, open_low=True),
    }
    """Valid range of every number."""

    def __post_init__(self) -> None:
        validate(self, self.LIMITS)


def what(config: RunConfig) -> dict[str, Any]:
    """The fields that decide what is computed."""
    fields = dataclasses.asdict(config)
    return {name: value for name, value in fields.items() if name not in config.EXECUTION}


def recorded(config: RunConfig) -> dict[str, Any]:
    """The same as a record has it: after JSON."""
    fields: dict[str, Any] = json.loads(json.dumps(what(config), default=str))
    return fields


def preset_of(presets: Mapping[str, C], name: str, data: str) -> C:
    """A preset by its name: the one for the data, such as ``cpu cifar10``, if it has its own."""
    return presets.get(f"{name} {data}", presets[name])


def start_of(config: C, presets: Mapping[str, C]) -> C:
    """The preset that a config departs from."""
    return preset_of(presets, config.preset, getattr(config, "data", ""))


def folder(experiment: str, config: C, presets: Mapping[str, C]) -> Path:
    """runs/<experiment>/<preset>/<parameterization>/lr-…/seed-…; what departs from the preset is
    named beside it, as in ``cpu+epochs=3``."""
    apart = {"learning_rate", "seed", *config.PLACE}
    theirs = what(start_of(config, presets))
    changed = [
        f"{name.replace('_', '-')}={value}"
        for name, value in what(config).items()
        if value != theirs[name] and name not in apart
    ]
    places = [str(getattr(config, name)) for name in config.PLACE]
    label = "+".join([config.preset, ",".join(changed)]) if changed else config.preset
    rate, seed = f"lr-{config.learning_rate:g}", f"seed-{config.seed}"
    return Path(config.runs, experiment, label, *places, rate, seed)
