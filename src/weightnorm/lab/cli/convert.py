"""The verb `convert`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from weightnorm.lab.checkpoint_files import convert_file
from weightnorm.lab.cli.arguments import parse
from weightnorm.lab.cli.console import OUT, print_line


@dataclass(frozen=True)
class ConvertOptions:
    """A checkpoint file in another format: .pt, .pth, .bin, .safetensors, or an index of shards."""

    source: tyro.conf.Positional[Path]
    """The checkpoint. Pickles are loaded as tensors only: no code in them runs."""
    target: tyro.conf.Positional[Path]
    """The file to write, of the same kind; it appears whole or not at all."""
    to: Literal["parametrize", "hook", "folded"]
    """torch's newer keys, its older ones (weight_g, weight_v), or plain weights."""
    weights: tuple[str, ...] = ()
    """Plain weights to decompose, by name or pattern such as '*.weight'."""
    dim: int | Literal["infer"] | None = "infer"
    """The kept axis, where shapes do not tell it: a flat g, or plain weights (else 0)."""


def main(words: list[str]) -> int:
    options = parse(ConvertOptions, words, "convert")
    names = convert_file(options.source, options.target, options.to, options.weights, options.dim)
    print_line(OUT, f"{options.target}: {len(names)} normalized weights, written as {options.to}")
    return 0
