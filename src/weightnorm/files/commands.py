"""The commands ``weightnorm convert`` and ``weightnorm inspect``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

from weightnorm.files.errors import printable


def convert(
    source: Path,
    target: Path,
    /,
    to: Literal["parametrize", "hook", "folded"],
    weights: tuple[str, ...] = (),
    dim: int | Literal["infer"] | None = "infer",
) -> None:
    """Convert a checkpoint file between weight-norm formats.

    Args:
        source: the checkpoint: .pt, .pth, .bin, .ckpt, .safetensors, or the .safetensors.index.json
            of shards. Nothing in it is executed.
        target: the file to write, of the same kind, whole or not at all. No file is overwritten.
        to: the keys of torch.nn.utils.parametrizations.weight_norm, those of
            torch.nn.utils.weight_norm (weight_g, weight_v), or plain weights.
        weights: plain weights to decompose, by name or pattern such as '*.weight'.
        dim: the kept axis, for plain weights (else 0) and where shapes leave it open: a flat g
            beside a square v.
    """
    from weightnorm.files.convert import convert_file

    done = convert_file(source, target, to, weights, dim)
    _say(f"read:    {source}\nwritten: {target}")
    _say(f"{_count(len(done.names), 'normalized weight')}, written as {to}")
    for part, tensors in done.untouched.items():
        _say(f"left as it was: {part} ({_count(tensors, 'tensor')}, none of a normalized weight)")


def inspect(file: Path, /) -> None:
    """Show the normalized weights of a checkpoint file.

    A line for each: shape, kept axis, mean ‖v‖, mean |g|, units with w = 0.

    Args:
        file: the checkpoint: .pt, .pth, .bin, .ckpt, .safetensors, or the .safetensors.index.json
            of shards. Nothing in it is executed.
    """
    from weightnorm.files.inspect import inspect_file

    contents = inspect_file(file)
    rows = [("shape", "dim", "mean ‖v‖", "mean |g|", "dead", "weight")] * bool(contents.weights)
    for weight in contents.weights:
        unknown = weight.dim == "ambiguous"
        rows.append(
            (
                "×".join(map(str, weight.shape)),
                "?" if unknown else str(weight.dim).replace(" ", ""),
                "?" if unknown else f"{weight.v_norm:.4g}",
                f"{weight.g:.4g}",
                str(weight.dead or ""),
                weight.name,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, name in rows:  # the name last and whole, so that grep finds it
        _say("  ".join([*map(str.ljust, cells, widths), printable(name)]))
    formats = Counter(weight.format for weight in contents.weights)
    kinds = f" ({', '.join(f'{n} {format}' for format, n in formats.items())})" if formats else ""
    found = _count(len(contents.weights), "normalized weight")
    _say(f"{found}{kinds}, {_count(contents.others, 'other tensor')}")


def _say(text: str) -> None:
    print(printable(text, keep="\n"))


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
