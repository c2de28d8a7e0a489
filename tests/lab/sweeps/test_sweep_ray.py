"""Sweeps on a real Ray cluster: one machine that declares two cores and a GPU."""

import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from rich.console import Console

from commands import HANGS, free_port, wait_for
from lab.sweeps.test_sweep import gone, grid, run_sweep, signal_when
from stub_runs import StubRuns
from weightnorm.lab.errors import RunError
from weightnorm.lab.executors import RayExecutor
from weightnorm.lab.sweep import sweep

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.xdist_group("ray"),  # one cluster at a time
]


@pytest.fixture(scope="module")
def address():
    """The address of a cluster."""
    port = free_port()
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets need a short path
    words = f"start --head --block --port={port} --num-cpus=2 "
    words += "--num-gpus=1 --include-dashboard=false --object-store-memory=100000000 "
    words += f"--disable-usage-stats --temp-dir={folder}"
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *words.split()],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: listens(port))
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(HANGS)
        shutil.rmtree(folder, ignore_errors=True)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def place(tmp_path):
    return tmp_path / "stub runs"


def test_runs_use_the_whole_cluster(tmp_path, place, address):
    two = grid(tmp_path, 1, 2)
    stub = StubRuns(place, two, seed_1="finish beside another", seed_2="finish beside another")
    handler = signal.getsignal(signal.SIGTERM)
    result, text = run_sweep(two, stub, jobs=2, cluster=address)
    assert (result.failed, result.interrupted) == ({}, False)
    assert [r.result for r in result.records] == [{"test_error": 0.01}, {"test_error": 0.02}]
    rows = stub.rows("started")
    assert len({row["parent"] for row in rows} - {os.getpid()}) == 2  # two of Ray's workers
    assert [row["threads"] for row in rows] == [["1", "1"]] * 2
    assert "started  weight-norm lr 0.003 seed 2" in text
    assert "hello from 2" in two.plan()[1].log.read_text()
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == handler


def test_real_run_with_a_relative_folder(tmp_path, address, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = grid(Path("runs"), epochs=1, limit=200, device="cpu")
    console = Console(file=io.StringIO(), width=200)
    result = sweep(one, jobs=2, cluster=address, console=console)
    assert result.failed == {}
    (run,) = result.records
    assert run.folder.is_relative_to(tmp_path / "runs")
    assert 0 <= run.result["test_error"] <= 1
    assert run.sessions[0]["threads"] == 1


def test_failed_run_does_not_stop_the_others(tmp_path, place, address):
    """One job per machine gets all its cores."""
    five = grid(tmp_path, 1, 2, 3, 4, 5)
    blocked = five.plan()[4].folder
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a folder should be")
    behaviours = {"seed_1": "fail", "seed_2": "lose worker", "seed_3": "lose worker once"}
    stub = StubRuns(place, five, **behaviours)
    result, _ = run_sweep(five, stub, jobs=1, cluster=address)
    reasons = {label[-1]: reason for label, reason in result.failed.items()}
    assert sorted(reasons) == ["1", "2", "5"]
    assert reasons["1"].startswith("exit code 1\n")
    assert reasons["1"].endswith("[red]out of luck[/]")
    assert reasons["2"].startswith("lost by Ray: ")
    assert "File exists" in reasons["5"]
    assert [r.finished for r in result.records] == [False, False, True, True, False]
    assert stub.seeds("started") == [1, 2, 2, 3, 3, 4]  # a lost run is started once more
    wait_for(lambda: all(gone(row["pid"]) for row in stub.rows("started")), 50)
    assert {tuple(row["threads"]) for row in stub.rows("started")} == {("2", "2")}


def test_stopped_sweep_saves_running_and_keeps_queued_runs(tmp_path, place, address):
    four = grid(tmp_path, 1, 2, 3, 4)
    stub = StubRuns(place, four, seed_1="hang", seed_2="hang", seed_3="hang", seed_4="hang")
    sender = signal_when(lambda: len(stub.rows("started")) == 2, signal.SIGINT)
    result, text = run_sweep(four, stub, jobs=2, cluster=address)
    sender.join()
    assert result.interrupted
    assert result.failed == {}
    assert len(stub.rows("started")) == 2
    assert stub.seeds("saved") == stub.seeds("started")
    assert stub.rows("interrupted twice") == []
    assert "0 done · 0 running · 0 failed · 4 left" in text


def test_run_that_does_not_stop_is_killed(tmp_path, place, address):
    one = grid(tmp_path)
    stub = StubRuns(place, one, seed_1="stubborn")
    sender = signal_when(lambda: stub.rows("started"), signal.SIGINT)
    result, _ = run_sweep(one, stub, cluster=address, grace_seconds=0.5)
    sender.join()
    assert result.interrupted
    (run,) = stub.rows("started")
    assert time.monotonic() - run["time"] < 50
    wait_for(lambda: gone(run["pid"]))


def test_existing_connection_is_used_and_kept(tmp_path, place, address):
    """A run on cuda gets a GPU."""
    ray.init(address, log_to_driver=False, logging_level="error")
    try:
        one = grid(tmp_path, device="cuda")
        stub = StubRuns(place, one)
        result, _ = run_sweep(one, stub, cluster="auto")
        assert result.records[0].finished
        assert [row["gpu"] for row in stub.rows("started")] == ["0"]
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_connection_failure_is_an_error(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("not Ray")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(RunError, match=r"cannot join the Ray cluster at auto: not Ray.*ray start"):
        RayExecutor("auto", 1)
