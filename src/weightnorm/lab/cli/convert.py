"""The verb `convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from weightnorm.files.convert import convert_file
from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.console import OUT, print_line


@dataclass(frozen=True)
class ConvertOptions:
    """Reads and writes .pt, .pth, .bin, .ckpt, .safetensors, and the .safetensors.index.json of
    shards. The output is of the same kind as the input."""

    source: tyro.conf.Positional[Path]
    """The checkpoint. Nothing in it is executed."""
    target: tyro.conf.Positional[Path]
    """The file to write. It is replaced when everything is written, or not at all."""
    to: Literal["parametrize", "hook", "folded"]
    """The keys of torch.nn.utils.parametrizations.weight_norm, those of torch.nn.utils.weight_norm
    (weight_g, weight_v), or plain weights."""
    weights: tuple[str, ...] = ()
    """Plain weights to decompose, by name or pattern such as '*.weight'."""
    dim: int | Literal["infer"] | None = "infer"
    """The kept axis, for plain weights (else 0) and where shapes leave it open: a flat g beside a
    square v."""


def main(words: list[str]) -> int:
    options = parse(ConvertOptions, words, "convert")
    names = convert_file(
        options.source, options.target, options.to, options.weights, options.dim
    ).names
    print_line(OUT, f"{options.target}: {len(names)} normalized weights, written as {options.to}")
    return 0
