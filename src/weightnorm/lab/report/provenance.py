"""Which records are of code in the repository's history."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from weightnorm.lab.records import RunRecord


def commits(root: Path) -> list[str]:
    """Return all commits of the repository at `root`; none without git or a whole history."""
    try:
        here, shallow = _git(root, "rev-parse", "--show-toplevel", "--is-shallow-repository")
        if shallow == "true" or Path(here).resolve() != root.resolve():
            return []
        return _git(root, "log", "--format=%H")
    except (OSError, subprocess.CalledProcessError):
        return []


def provenance(records: Sequence[RunRecord], commits: Iterable[str]) -> str:
    """Count the records of which some session ran code that is not in the history, or changed."""
    known = {commit[:12] for commit in commits}
    others = sum(
        not all(session.get("commit") in known for session in record.sessions or [{}])
        for record in records
    )
    return (
        "Records of code that is not in the repository's history, or had uncommitted changes: "
        f"{others} of {len(records)}."
    )


def _git(root: Path, *words: str) -> list[str]:
    found = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return found.stdout.split()
