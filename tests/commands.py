"""The real command line, in real processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

BASE = [sys.executable, "-W", "error::UserWarning:weightnorm", "-m", "weightnorm"]
OFFLINE = "http://127.0.0.1:9"
"""A proxy that refuses every connection."""


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "http_proxy": OFFLINE,
        "https_proxy": OFFLINE,
        **more,
    }


def weightnorm(*words: object, prefix: tuple[str, ...] = (), **env: str):
    """Run a command to its end: (exit code, standard output, standard error)."""
    done = subprocess.run(
        [*prefix, *BASE, *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(**env),
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def started(*words: object, **env: str) -> subprocess.Popen:
    """Start a command and return at once."""
    return subprocess.Popen(
        [*BASE, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**env),
    )


def wait_for(condition, seconds: float = 120):
    """Wait until a condition holds; its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def run_folder(runs: Path) -> Path:
    """The one run below a folder."""
    (config,) = runs.rglob("config.json")
    return config.parent
