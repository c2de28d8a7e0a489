"""`weightnorm claims`: measured, resumed, reported; refused settings."""

import os
import signal
from pathlib import Path

import pytest

from commands import HANGS, started, wait_for, weightnorm
from weightnorm.lab.claims.runner import CLAIMS, latest_rows
from weightnorm.lab.records import load_record, read_rows

EXACT = {1, 2, 3, 7, 10, 11, 12, 13, 14, 17}


pytestmark = pytest.mark.xdist_group("claims")  # share one measurement


@pytest.fixture(scope="module")
def all_claims(tmp_path_factory):
    """All claims, measured once."""
    runs = tmp_path_factory.mktemp("runs")
    code, out, err = weightnorm("claims", "--quick", "--runs", runs, "--seeds", 1, 2)
    assert code == 0, err
    return runs, out, err


def test_every_claim_is_measured(all_claims):
    runs, out, err = all_claims
    assert set(CLAIMS) == set(range(1, 22))
    record = load_record(runs / "claims" / "quick")
    rows = latest_rows(record.folder)
    assert set(rows) == set(CLAIMS)
    assert {rows[n]["verdict"] for n in EXACT} == {"holds"}
    assert rows[4]["verdict"] in ("holds", "holds qualitatively")
    assert rows[18]["verdict"] == rows[20]["verdict"] == "not measured"
    assert record.finished
    assert sum(record.result.values()) == len(CLAIMS)
    assert f"claim 21 (21 of {len(CLAIMS)})" in err
    assert "(section 2.1)" in out


def test_only_claims_from_records_are_measured_again(all_claims):
    runs, _, _ = all_claims
    code, _, err = weightnorm("claims", "--quick", "--runs", runs, "--seeds", 1, 2)
    assert code == 0, err
    assert [line.split(" (")[0] for line in err.splitlines() if line.startswith("claim")] == [
        "claim 18",
        "claim 20",
    ]


def test_report_shows_every_figure(all_claims, tmp_path):
    runs, _, _ = all_claims
    code, _, err = weightnorm("report", runs, "--out", tmp_path)
    assert code == 0, err
    page = (tmp_path / "index.html").read_text()
    assert "s claims</h2>" in page
    figures = sum(len(row["figures"]) for row in latest_rows(runs / "claims" / "quick").values())
    assert page.count("<figure>") == figures == 14


def test_resume_after_kill_and_interrupt(tmp_path):
    """No part is computed twice, and workers end with their parent."""
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
    wait_for(lambda: not any(map(alive, children)))
    before = len(read_rows(parts))
    assert set(latest_rows(parts.parent)) == {4}
    process = started(*command)
    wait_for(lambda: process.poll() is not None or len(read_rows(parts)) > before)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130, err
    assert "everything is saved" in err
    assert "claim 4 " not in err
    names = [row["part"] for row in read_rows(parts)]
    assert len(names) == len(set(names)) > before


def workers_of(pid):
    """Worker processes of a process."""
    return [
        child
        for child in map(int, filter(str.isdigit, os.listdir("/proc")))
        if stat(child)[1:2] == [str(pid)] and b"spawn_main" in read_proc(child, "cmdline")
    ]


def alive(pid):
    return stat(pid)[:1] not in ([], ["Z"])


def stat(pid):
    """State, parent and other fields of a process; empty if it has ended."""
    return read_proc(pid, "stat").decode().rpartition(")")[2].split()


def read_proc(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", 99), "there is no claim 99"),
        (("--seeds", 5, 6), "other settings"),
        (("--seeds", 5), "two or more"),
        (("--seeds", 5, 5, 6), "each once"),
        (("--jobs", -1), "jobs is -1; expected 1 or more"),
        (("--jobs", 0), "jobs is 0; expected 1 or more"),
    ],
)
def test_impossible_settings_are_refused(all_claims, words, message):
    code, _, err = weightnorm("claims", "--quick", "--runs", all_claims[0], *words)
    assert code == 2
    assert message in err


def test_long_measurement_has_its_own_record(tmp_path):
    """On digits, in a few seconds; resumed without measuring anything again."""
    command = ("claims", "--long", "--quick", "--runs", tmp_path)
    for _ in range(2):
        code, _, err = weightnorm(*command)
        assert code == 0, err
    rows = latest_rows(tmp_path / "claims" / "long-quick")
    assert list(rows) == [6]
    assert rows[6]["n"] == 2
    assert [figure["title"] for figure in rows[6]["figures"]] == ["Adam", "momentum 0.9"]
    losses = rows[6]["numbers"]["Adam"]["losses"]
    assert {len(seeds) for seeds in losses.values()} == {2}
    parts = read_rows(tmp_path / "claims" / "long-quick" / "parts.jsonl")
    assert len(parts) == len({row["part"] for row in parts}) == 2 * 3 * 2 * 3
    code, _, err = weightnorm("report", tmp_path, "--out", tmp_path / "report")
    assert code == 0, err
    figures = [path.stem for path in (tmp_path / "report" / "figures").glob("*.png")]
    title = "final-training-loss-against-the-learning-rate-digits-ten-epochs"
    assert figures == [f"claim-long-quick-6-{title}"]  # one figure with two panels
