"""Run the real command line in real processes."""

import os
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from weightnorm.lab.records import load_record

BASE = [sys.executable, "-W", "error::UserWarning:weightnorm", "-m", "weightnorm"]
OFFLINE = "http://127.0.0.1:9"
"""A proxy that refuses every connection, so that tests never download."""
HANGS = 1200.0
"""Seconds after which a process counts as hanging; a slow and busy machine takes far less."""


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
    """Run a command to its end. Returns exit code, standard output, standard error."""
    done = subprocess.run(
        [*prefix, *BASE, *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(**env),
        timeout=HANGS,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def started(*words: object, **env: str) -> subprocess.Popen:
    """Start a command without waiting for it."""
    return subprocess.Popen(
        [*BASE, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**env),
    )


def wait_for(condition, seconds: float = HANGS):
    """Wait until a condition holds; returns its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"the condition did not hold within {seconds} s")


def free_port() -> int:
    """Return a free port. The system gives it to no other process, as it does above 32767."""
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def run_folder(runs: Path) -> Path:
    """Return the folder of the only run below `runs`."""
    (config,) = runs.rglob("config.json")
    return config.parent


def spread(ranks: int, *words: object) -> None:
    """Run a command on several ranks to its end."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "weightnorm", *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(GLOO_SOCKET_IFNAME="lo"),
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def outcome(runs: Path):
    """Return what must not depend on how often a run was stopped."""
    folder = run_folder(runs)
    record = load_record(folder)
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    metrics = [{k: v for k, v in row.items() if k != "seconds"} for row in record.metrics]
    result = {k: v for k, v in record.result.items() if k != "seconds"}
    arrays = {path.name: path.read_bytes() for path in folder.glob("*.npz")}
    return metrics, result, state["states"], state["random"], arrays


def same(a, b) -> bool:
    """Whether two outcomes are bit-equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
