"""Experiments on the command line: which one, and its config."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

from rich.table import Table

from weightnorm.lab.cli.arguments import parse, split_flags
from weightnorm.lab.cli.console import OUT, print_line
from weightnorm.lab.cli.verbs import VERBS
from weightnorm.lab.errors import UsageError, nearest
from weightnorm.lab.experiments import classify, dqn, draw, vae
from weightnorm.lab.runs.config import RunConfig, preset_of

EXPERIMENTS: dict[str, ModuleType] = {module.NAME: module for module in (classify, vae, draw, dqn)}


def split_experiment(words: list[str], verb: str) -> tuple[ModuleType, list[str]]:
    """The experiment that is named first, and the words after it."""
    if words and words[0] in ("-h", "--help"):
        print_line(OUT, f"usage: weightnorm {verb} EXPERIMENT [settings]\n")
        print_line(OUT, f"{VERBS[verb].summary}\n")
        print_experiments()
        raise SystemExit(0)
    if not words or words[0].startswith("-"):
        raise UsageError(f"which experiment? weightnorm {verb} {'|'.join(EXPERIMENTS)} [settings]")
    return EXPERIMENTS[nearest(words[0], EXPERIMENTS, "experiment")], words[1:]


def print_experiments() -> None:
    """Print every experiment with its presets."""
    table = Table("experiment", "preset", "settings", box=None)
    for name, module in EXPERIMENTS.items():
        table.add_row(f"[bold]{name}", "", module.TITLE)
        for preset in module.PRESETS:
            table.add_row("", preset, ", ".join(module.SIZES[preset]))
    OUT.print(table)
    OUT.print("\nweightnorm run EXPERIMENT --help  explains every setting", highlight=False)


def parse_config(module: ModuleType, words: list[str], verb: str) -> Any:
    """An experiment's config: its preset, then the flags, then the preset's learning rate."""
    said = dict(pairwise([*split_flags(words), ""]))
    name = said.get("--preset", "cpu")
    if name not in module.PRESETS:
        name = "cpu"  # it is refused below
    preset = preset_of(module.PRESETS, name, said.get("--data", ""))
    config: RunConfig = parse(type(preset), words, verb, default=preset)
    if "--learning-rate" not in split_flags(words):
        rate = module.LEARNING_RATES[config.preset][config.parameterization]
        config = replace(config, learning_rate=rate)
    return config
