"""Ranks and machines come and go: the documented commands, in real processes on this one."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from commands import environment, run_folder, wait_for, weightnorm
from weightnorm.lab.records import load_record

DOCS = Path(__file__).parents[3] / "docs" / "scaling.md"
QUIET = ("--parameterization", "weight-norm-mean-only", "--noise", 0, "--dropout", 0)
WORDS = (*QUIET, "--epochs", 4, "--limit", 111, "--batch-size", 20, "--init-examples", 51)
PATIENCE = 60


def documented(nodes: int, port: int, *words: object) -> list[str]:
    """The documented command for so many machines, on this one: two ranks and small sizes."""
    text = DOCS.read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"^\$ torchrun --nnodes {nodes} .*$", text, re.MULTILINE)
    line = line.partition("#")[0].replace("first-host:29500", f"127.0.0.1:{port}")
    line = line.replace("--nproc-per-node 8", f"--nproc-per-node {2 // nodes}")
    line = line.replace("--preset paper", "--preset demo").replace("--runs /shared/runs", "")
    command = shlex.split(line)[2:]
    return [sys.executable, "-m", "torch.distributed.run", *command, *map(str, words)]


class Node:
    """One machine's torchrun."""

    def __init__(self, nodes: int, port: int, *words: object):
        self.log: list[str] = []
        self.process = subprocess.Popen(
            documented(nodes, port, *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(GLOO_SOCKET_IFNAME="lo"),
        )

    def ranks(self) -> dict[int, int]:
        """Process ids of its ranks."""
        pid, found = self.process.pid, {}
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found.update({int(v[5:]): int(child) for v in variables if v.startswith(b"RANK=")})
        return found

    def lose(self) -> None:
        """The machine is gone: torchrun, then its ranks, without a word."""
        ranks = self.ranks()
        self.process.kill()
        for pid in ranks.values():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def end(self, seconds: float = 240) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def weights(runs):
    state = torch.load(run_folder(runs) / "checkpoint.pt", weights_only=True)
    return state["states"]["model"]


def test_a_lost_rank_ends_the_run_in_time_and_the_same_command_goes_on(tmp_path):
    runs = tmp_path / "many"
    words = (*WORDS, "--runs", runs, "--wait-seconds", PATIENCE, "--checkpoint-seconds", 0)
    checkpoint = "checkpoint-previous.pt"

    machine = Node(1, free_port(), *words)
    wait_for(lambda: list(runs.rglob(checkpoint)))
    began = time.monotonic()
    os.kill(machine.ranks()[1], signal.SIGKILL)
    code, said = machine.end()
    assert code == 1, said
    assert time.monotonic() - began < PATIENCE
    assert re.search(r"failed .*: rank 0 of 2 waited for .* in vain", said)
    assert "start all ranks again with the same command to go on" in said

    port, before = free_port(), (run_folder(runs) / checkpoint).stat().st_mtime_ns
    first, second = Node(2, port, *words), Node(2, port, *words)
    wait_for(lambda: (run_folder(runs) / checkpoint).stat().st_mtime_ns > before)
    began = time.monotonic()
    second.lose()
    code, said = first.end()
    assert code == 1, said
    assert time.monotonic() - began < PATIENCE
    assert "in vain" in said

    port = free_port()
    nodes = Node(2, port, *words), Node(2, port, *words)
    assert [node.end()[0] for node in nodes] == [0, 0]
    together = load_record(run_folder(runs))
    assert [session["ranks"] for session in together.sessions] == [2, 2, 2]
    assert [row["epoch"] for row in together.metrics] == [1, 2, 3, 4]

    assert weightnorm("run", "classify", "--preset", "demo", *WORDS, "--runs", tmp_path)[0] == 0
    alone = load_record(run_folder(tmp_path / "classify"))
    for name in ("train_loss", "test_loss", "v_norm", "effective_step"):
        assert together.column(name) == pytest.approx(alone.column(name), rel=1e-3)
    torch.testing.assert_close(weights(runs), weights(tmp_path / "classify"), atol=1e-3, rtol=1e-3)
