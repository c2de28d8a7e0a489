"""Lost ranks and machines: the documented commands, in real processes on one machine."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commands import HANGS, environment, free_port, outcome, run_folder, same, spread, wait_for
from weightnorm.lab.environment import Ranks
from weightnorm.lab.records import load_record

DOCS = Path(__file__).parents[3] / "docs" / "frameworks.md"
WORDS = ("--parameterization", "weight-norm-mean-only", "--epochs", 4, "--limit", 191)
WORDS = (*WORDS, "--batch-size", 20, "--init-examples", 51)
WAIT_SECONDS = 600


def documented(nodes: int, port: int, *words: object) -> list[str]:
    """Return the documented command for `nodes` machines, with two ranks and small sizes."""
    text = DOCS.read_text().replace("\\\n", " ")
    start = "--standalone" if nodes == 1 else f"--nnodes {nodes}"
    (line,) = re.findall(rf"^\$ torchrun {start} .*$", text, re.MULTILINE)
    line = line.partition("#")[0].replace("first-host:29500", f"127.0.0.1:{port}")
    line = line.replace("--nproc-per-node 8", f"--nproc-per-node {2 // nodes}")
    line = line.replace("--preset paper", "--preset demo").replace("--out /shared/runs", "")
    command = shlex.split(line)[2:]
    return [sys.executable, "-m", "torch.distributed.run", *command, *map(str, words)]


class Node:
    """One machine's torchrun."""

    def __init__(self, nodes: int, port: int, *words: object):
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
        """Kill torchrun and its ranks, as when a machine is lost."""
        ranks = self.ranks()
        self.process.kill()
        for pid in ranks.values():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=HANGS)
        return self.process.returncode, output


@pytest.fixture
def machine():
    """Start machines; those still running are killed at the end."""
    started = []

    def start(*args: object) -> Node:
        started.append(Node(*args))
        return started[-1]

    yield start
    for node in started:
        if node.process.poll() is None:
            node.lose()


def test_lost_machine_ends_the_run_and_another_one_resumes_it(tmp_path, machine):
    runs = tmp_path / "many"
    words = (*WORDS, "--out", runs, "--wait-seconds", WAIT_SECONDS, "--checkpoint-seconds", 0)
    port = free_port()
    first, second = machine(2, port, *words), machine(2, port, *words)
    wait_for(lambda: list(runs.rglob("checkpoint-previous.pt")))
    began = time.monotonic()
    second.lose()
    code, output = first.end()
    assert code == 1, output
    assert time.monotonic() - began < WAIT_SECONDS
    assert re.search(r"failed: .*: rank \d of 2: another rank died", output)
    assert "start all ranks again with the same command to continue" in output

    assert machine(1, free_port(), *words).end()[0] == 0
    record = load_record(run_folder(runs))
    assert [session["ranks"] for session in record.sessions] == [2, 2]
    assert [row["epoch"] for row in record.metrics] == [1, 2, 3, 4]

    whole = tmp_path / "undisturbed"
    spread(2, "run", "classify", "--preset", "demo", *WORDS, "--out", whole)
    assert same(outcome(runs), outcome(whole))


@pytest.mark.parametrize(
    ("device", "backend", "gpu"),
    [
        ("cpu", "gloo", None),
        ("cuda", "cpu:gloo,cuda:nccl", 3),
        ("cuda:1", "cpu:gloo,cuda:nccl", None),
    ],
)
def test_one_gpu_per_rank(monkeypatch, device, backend, gpu):
    asked = {}
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: asked.update(gpu=index))
    monkeypatch.setattr(dist, "init_process_group", lambda b, timeout: asked.update(b=b, t=timeout))
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    assert Ranks.join(torch.device(device), 9) == Ranks(5, 8)
    assert asked.pop("gpu", None) == gpu
    assert asked == {"b": backend, "t": timedelta(seconds=9)}


LEAVE = """
import weakref
import torch
from weightnorm.lab.environment import Ranks

ranks = Ranks.join(torch.device("cpu"), 60)
group = weakref.ref(torch.distributed.group.WORLD)
weight = torch.ones(3, requires_grad=True)
weight.sum().backward()
torch.optim.Adam([weight]).step()  # imports torch.distributed.nn
ranks.leave()
raise SystemExit(group() is not None)
"""


def test_leave_frees_the_process_group():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    command = [*launch, sys.executable, "-c", LEAVE]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=HANGS, check=False
    )
    assert done.returncode == 0, done.stderr
