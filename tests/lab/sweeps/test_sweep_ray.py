"""Sweeps on a real Ray cluster: one machine with two cores and, so it says, a GPU."""

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

from commands import wait_for
from lab.sweeps.test_sweep import StandIn, gone, grid, run_sweep, signal_when
from weightnorm.lab.errors import RunError
from weightnorm.lab.sweeps import executors
from weightnorm.lab.sweeps.grid import sweep

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own
    pytest.mark.xdist_group("ray"),  # one cluster at a time
]


def free_ports(count):
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


@pytest.fixture(scope="module")
def address():
    """The address of a cluster."""
    (port,) = free_ports(1)
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
        wait_for(lambda: listens(port), 60)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def place(tmp_path):
    return tmp_path / "stand in"


def test_runs_are_spread_over_the_cluster(tmp_path, place, address):
    two = grid(tmp_path, 1, 2)
    stand_in = StandIn(place, two, seconds=0.5)
    handler = signal.getsignal(signal.SIGTERM)
    result, text = run_sweep(two, stand_in, jobs=2, cluster=address)
    assert (result.failed, result.interrupted) == ([], False)
    assert [r.result for r in result.records] == [{"test_error": 0.01}, {"test_error": 0.02}]
    rows = stand_in.rows("started")
    assert len({row["parent"] for row in rows} - {os.getpid()}) == 2  # two of Ray's workers
    assert [row["threads"] for row in rows] == [["1", "1"]] * 2
    assert "started weight-norm lr 0.003 seed 2" in text
    assert "hello from 2" in two.plan()[1].log.read_text()
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_real_run_from_a_relative_folder(tmp_path, address, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = grid(Path("runs"), epochs=1, limit=200, device="cpu")
    console = Console(file=io.StringIO(), width=200)
    result = sweep(one, jobs=2, cluster=address, console=console)
    assert result.failed == []
    (run,) = result.records
    assert run.folder.is_relative_to(tmp_path / "runs")
    assert 0 <= run.result["test_error"] <= 1
    assert run.sessions[0]["threads"] == 1


def test_a_failing_run_does_not_stop_the_others(tmp_path, place, address):
    """And one job on each machine has all its cores."""
    five = grid(tmp_path, 1, 2, 3, 4, 5)
    blocked = five.plan()[4].folder
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a folder should be")
    manners = {"seed_1": "fail", "seed_2": "lose worker", "seed_3": "lose worker once"}
    stand_in = StandIn(place, five, **manners)
    result, _ = run_sweep(five, stand_in, jobs=1, cluster=address)
    reasons = {label[-1]: reason for label, reason in result.failed}
    assert sorted(reasons) == ["1", "2", "5"]
    assert reasons["1"].startswith("exit code 1\n")
    assert reasons["1"].endswith("[red]out of luck[/]")
    assert reasons["2"].startswith("lost by Ray: ")
    assert "File exists" in reasons["5"]
    assert [r.finished for r in result.records] == [False, False, True, True, False]
    assert stand_in.seeds("started") == [1, 2, 2, 3, 3, 4]  # a lost run is begun once more
    assert all(gone(row["pid"]) for row in stand_in.rows("started"))
    assert {tuple(row["threads"]) for row in stand_in.rows("started")} == {("2", "2")}


def test_stopping_lets_runs_save_and_the_queue_stays(tmp_path, place, address):
    four = grid(tmp_path, 1, 2, 3, 4)
    stand_in = StandIn(place, four, seed_1="hang", seed_2="hang", seed_3="hang", seed_4="hang")
    sender = signal_when(lambda: len(stand_in.rows("started")) == 2, signal.SIGINT)
    result, text = run_sweep(four, stand_in, jobs=2, cluster=address)
    sender.join()
    assert result.interrupted
    assert result.failed == []
    assert len(stand_in.rows("started")) == 2
    assert stand_in.seeds("saved") == stand_in.seeds("started")
    assert stand_in.rows("told twice") == []
    assert "0 done · 0 running · 0 failed · 4 left" in text


def test_a_run_that_does_not_stop_is_killed(tmp_path, place, address):
    one = grid(tmp_path)
    stand_in = StandIn(place, one, seed_1="stubborn")
    sender = signal_when(lambda: stand_in.rows("started"), signal.SIGINT)
    began = time.monotonic()
    result, _ = run_sweep(one, stand_in, cluster=address, patience=0.5)
    sender.join()
    assert result.interrupted
    assert time.monotonic() - began < 20
    wait_for(lambda: gone(stand_in.rows("started")[0]["pid"]), 10)


def test_a_connection_that_was_there_is_used_and_kept(tmp_path, place, address):
    """And a run on cuda is given a GPU."""
    ray.init(address, log_to_driver=False, logging_level="error")
    try:
        one = grid(tmp_path, device="cuda")
        stand_in = StandIn(place, one)
        result, _ = run_sweep(one, stand_in, cluster="auto")
        assert result.records[0].finished
        assert [row["gpu"] for row in stand_in.rows("started")] == ["0"]
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_a_server_that_is_not_ray_is_an_error(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("not Ray")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(RunError, match=r"cannot join the Ray cluster at auto: not Ray.*ray start"):
        executors.Cluster("auto", 1)
