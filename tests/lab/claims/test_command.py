"""`weightnorm claims` as a user runs it: all of them, stopped, killed, refused, reported."""

import os
import signal
from pathlib import Path

import pytest

from commands import started, wait_for, weightnorm
from weightnorm.lab.claims.runner import CLAIMS, newest
from weightnorm.lab.runs.records import load_record, read_rows

EXACT = {1, 2, 3, 7, 10, 11, 12, 13, 14, 17}


pytestmark = pytest.mark.xdist_group("claims")  # one worker measures them all, once


@pytest.fixture(scope="module")
def all_claims(tmp_path_factory):
    """Every claim, once."""
    runs = tmp_path_factory.mktemp("runs")
    code, out, err = weightnorm("claims", "--quick", "--runs", runs, "--seeds", 1, 2)
    assert code == 0, err
    return runs, out, err


def test_every_claim_is_measured(all_claims):
    runs, out, err = all_claims
    assert set(CLAIMS) == set(range(1, 22))
    record = load_record(runs / "claims" / "quick")
    rows = newest(record.folder)
    assert set(rows) == set(CLAIMS)
    assert {rows[n]["verdict"] for n in EXACT | {4}} == {"holds"}
    assert rows[18]["verdict"] == rows[20]["verdict"] == "not measured"
    assert record.finished
    assert sum(record.result.values()) == len(CLAIMS)
    assert f"claim 21 (21 of {len(CLAIMS)})" in err
    assert "the paper says" in out


def test_what_is_measured_is_not_measured_again(all_claims):
    runs, _, _ = all_claims
    code, _, err = weightnorm("claims", "--quick", "--runs", runs, "--seeds", 1, 2)
    assert code == 0, err
    assert [line.split(" (")[0] for line in err.splitlines() if line.startswith("claim")] == [
        "claim 18",
        "claim 20",
    ]


def test_its_page_shows_every_figure_beside_its_row(all_claims, tmp_path):
    runs, _, _ = all_claims
    code, _, err = weightnorm("report", runs, "--out", tmp_path)
    assert code == 0, err
    page = (tmp_path / "index.html").read_text()
    assert "s claims</h2>" in page
    figures = sum(len(row["figures"]) for row in newest(runs / "claims" / "quick").values())
    assert page.count("<figure>") == figures == 14


def test_killed_within_a_claim_it_goes_on_there(tmp_path):
    """And the workers go with the one who started them."""
    command = ("claims", "--quick", "--runs", tmp_path, "--seeds", 1, 2, "--only", 4, 6)
    parts = tmp_path / "claims" / "quick" / "parts.jsonl"
    process = started(*command, "--jobs", 2)
    try:
        wait_for(lambda: process.poll() is not None or len(read_rows(parts)) > 12)
        children = workers_of(process.pid)
        process.kill()
    finally:
        process.communicate()
    assert len(children) == 2
    assert process.returncode == -signal.SIGKILL
    wait_for(lambda: not any(map(alive, children)), 20)
    before = len(read_rows(parts))
    assert set(newest(parts.parent)) == {4}
    process = started(*command)
    wait_for(lambda: process.poll() is not None or len(read_rows(parts)) > before)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "everything is saved" in err
    assert "claim 4 " not in err
    names = [row["part"] for row in read_rows(parts)]
    assert len(names) == len(set(names)) > before


def workers_of(pid):
    """Worker processes that it started."""
    return [
        child
        for child in map(int, filter(str.isdigit, os.listdir("/proc")))
        if stat(child)[1:2] == [str(pid)] and b"spawn_main" in told(child, "cmdline")
    ]


def alive(pid):
    return stat(pid)[:1] not in ([], ["Z"])


def stat(pid):
    """A process's state, its parent and more; nothing if it is gone."""
    return told(pid, "stat").decode().rpartition(")")[2].split()


def told(pid, what):
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--only", 99), "there is no claim 99"),
        (("--seeds", 5, 6), "other settings"),
        (("--seeds", 5), "two or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(all_claims, words, says):
    code, _, err = weightnorm("claims", "--quick", "--runs", all_claims[0], *words)
    assert code == 2
    assert says in err
