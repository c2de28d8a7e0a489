"""Parse the experiment and its config from the command line."""

from __future__ import annotations

import textwrap
from itertools import pairwise
from types import ModuleType
from typing import Any

from weightnorm.lab import classify, dqn, draw, language, vae
from weightnorm.lab.cli.arguments import parse, split_flags
from weightnorm.lab.cli.console import OUT, print_line
from weightnorm.lab.cli.verbs import VERBS
from weightnorm.lab.config import find_preset
from weightnorm.lab.errors import UsageError, nearest

EXPERIMENTS: dict[str, ModuleType] = {
    module.NAME: module for module in (classify, vae, draw, dqn, language)
}


def split_experiment(words: list[str], verb: str) -> tuple[ModuleType, list[str]]:
    """Return the experiment, the first word, and the words after it."""
    if words and words[0] in ("-h", "--help"):
        print_line(OUT, f"usage: weightnorm {verb} EXPERIMENT [settings]\n")
        print_line(OUT, f"{VERBS[verb].summary}\n")
        print_experiments()
        raise SystemExit(0)
    if not words or words[0].startswith("-"):
        raise UsageError(f"which experiment? weightnorm {verb} {'|'.join(EXPERIMENTS)} [settings]")
    return EXPERIMENTS[nearest(words[0], EXPERIMENTS, "experiment")], words[1:]


def print_experiments() -> None:
    """Print every experiment with the flags of its presets, in at most 80 columns."""
    for name, module in EXPERIMENTS.items():
        print_line(OUT, f"{name}: {module.TITLE}")
        flags = {preset: preset_flags(preset) for preset in module.PRESETS}
        width = max(map(len, flags.values()))
        for preset, words in flags.items():
            indent = " " * (width + 6)
            text = f"  {words:{width}}    {module.PRESETS[preset].about}"
            print_line(OUT, textwrap.fill(text, 80, subsequent_indent=indent))
    print_line(OUT, "\nweightnorm run EXPERIMENT --help explains every setting")


def preset_flags(name: str) -> str:
    """Return the flags that select a preset.

    >>> preset_flags("cpu cifar10")
    '--preset cpu --data cifar10'
    """
    preset, _, data = name.partition(" ")
    return f"--preset {preset} --data {data}" if data else f"--preset {preset}"


def parse_config(module: ModuleType, words: list[str], verb: str) -> Any:
    """Parse a config: the preset, then the flags."""
    given = dict(pairwise([*split_flags(words), ""]))
    name = given.get("--preset", "cpu")
    if name not in module.PRESETS:
        name = "cpu"  # parse() below raises the error
    preset = find_preset(module.PRESETS, name, given.get("--data", ""))
    return parse(type(preset), words, verb, default=preset)
