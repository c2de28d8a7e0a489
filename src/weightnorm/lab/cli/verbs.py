"""The verbs of the command line: the module, the extra and the one-line summary of each.

Needs nothing installed: a verb's module is imported when the verb is used.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """A verb of ``weightnorm``; its module has a function ``main(words) -> exit code``."""

    module: str
    summary: str
    extra: str = "lab"
    """The extra that installs what the module imports."""


def _verb(name: str, summary: str, extra: str = "lab") -> Verb:
    return Verb(f"weightnorm.lab.cli.{name}", summary, extra)


VERBS = {
    "list": _verb("list", "List the experiments and their presets."),
    "run": _verb("run", "Run one experiment, or resume it."),
    "sweep": _verb("sweep", "Run a grid: parameterizations × learning rates × seeds."),
    "claims": _verb("claims", "Measure the paper's claims, or resume measuring."),
    "bench": _verb("bench", "Measure the cost of weight norm and its alternatives."),
    "report": _verb("report", "Write figures, tables and a page from the records."),
    "data": _verb("data", "Show and download the data sets."),
    "convert": _verb("convert", "Convert a checkpoint file between weight-norm formats.", "files"),
    "inspect": _verb("inspect", "Show the normalized weights of a checkpoint file.", "files"),
    "demo": _verb("demo", "Compare five parameterizations in three minutes."),
}
