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
    "list": _verb("list", "List the experiments, their presets and how long they take."),
    "run": _verb("run", "Run one experiment; the same command resumes a run that was stopped."),
    "sweep": _verb("sweep", "Run a grid: parameterizations × learning rates × seeds."),
    "claims": _verb("claims", "Measure the paper's claims; the same command resumes."),
    "bench": _verb("bench", "Measure what weight norm costs, side by side with its peers."),
    "report": _verb("report", "Turn records into figures, tables and one HTML page."),
    "data": _verb("data", "Show which data sets are there, and download the others."),
    "convert": _verb("convert", "Convert a checkpoint file between weight-norm formats.", "files"),
    "inspect": _verb("inspect", "Show the normalized weights of a checkpoint file.", "files"),
    "demo": _verb("demo", "Compare five parameterizations on embedded digits; with a report."),
}
