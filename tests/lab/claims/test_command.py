"""`weightnorm claims`: measured, recorded, resumed; refused settings."""

import signal
from pathlib import Path

import pytest
from rich.console import Console

from commands import HANGS, started, wait_for, weightnorm
from weightnorm.lab.claims import norm_growth
from weightnorm.lab.claims.claim import CLAIMS
from weightnorm.lab.claims.rows import NEEDED, latest_rows
from weightnorm.lab.claims.runner import listing, measure
from weightnorm.lab.cli import main
from weightnorm.lab.errors import RunError
from weightnorm.lab.files import lock_folder
from weightnorm.lab.records import append_row, load_record, read_rows

IDENTITIES = {1, 2, 3, 7, 10, 11, 13, 14, 17}
RESULTS = Path(__file__).parents[3] / "docs" / "results"

pytestmark = pytest.mark.xdist_group("claims")  # share one measurement


def rows_of(folder):
    return latest_rows(read_rows(folder / "metrics.jsonl"))


@pytest.fixture(scope="module")
def all_claims(tmp_path_factory):
    """All claims, measured once; the benchmark and the experiments are those of the documents."""
    runs = tmp_path_factory.mktemp("runs")
    words = ("claims", "--quick", "--out", runs, "--seeds", 1, 2, "--records", RESULTS)
    code, out, err = weightnorm(*words)
    assert code == 0, err
    return runs, out, words


def test_every_claim_is_measured_and_printed_once(all_claims):
    runs, out, _ = all_claims
    assert {*CLAIMS} == {*range(1, 26)}
    record = load_record(runs / "claims" / "quick")
    rows = rows_of(record.folder)
    assert [row["id"] for row in rows] == [id for _, c in sorted(CLAIMS.items()) for id in c.ids()]
    assert {row["number"] for row in rows if row["kind"] == "identity"} == IDENTITIES
    for row in rows:
        expected = {"holds"} if row["kind"] == "identity" else {
            "reproduced", "not reproduced", "not shown", "not measured"
        }  # fmt: skip
        assert row["verdict"] in expected, row["id"]
        assert sum(line.startswith(f"{row['id']:>5}  ") for line in out.splitlines()) == 1
    assert max(map(len, out.splitlines()[:-1])) < 80
    found = {row["id"]: row["verdict"] for row in rows}
    assert found["4.1"] == found["12.1"] == "reproduced"
    assert not {found[id] for id in ("16.1", "18.1", "20.1", "22")} & {"not measured"}
    assert record.finished
    assert sum(record.result.values()) == len(rows)


def test_recorded_claims_are_not_measured_again_unless_the_code_changed(all_claims):
    """Those that read other records are."""
    runs, out, words = all_claims
    folder = runs / "claims" / "quick"
    before = len(read_rows(folder / "metrics.jsonl"))
    parts = len(read_rows(folder / "parts.jsonl"))
    code, again, err = weightnorm(*words)
    assert code == 0, err
    assert again == out
    added = read_rows(folder / "metrics.jsonl")[before:]
    assert {row["number"] for row in added} == {16, 18, 20, 22, 24}
    assert len(read_rows(folder / "parts.jsonl")) == parts
    row = next(row for row in added if row["id"] == "24")
    append_row(folder / "metrics.jsonl", {**row, "id": "3", "number": 3, "code": "older"})
    code, _, err = weightnorm(*words[:-2], "--only", 3)
    assert code == 0, err
    assert rows_of(folder)[2]["value"] == "1.7e-16"


def test_report_shows_every_figure(all_claims, tmp_path):
    runs, _, _ = all_claims
    code, _, err = weightnorm("report", runs, "--out", tmp_path)
    assert code == 0, err
    page = (tmp_path / "index.html").read_text()
    figures = [x for row in rows_of(runs / "claims" / "quick") for x in row["figures"]]
    together = {figure["panels"] or figure["title"] for figure in figures}
    assert page.count("<figure") == len(together) > 15


def test_resume_after_kill_and_interrupt(tmp_path):
    """No part is computed twice."""
    command = ("claims", "--quick", "--out", tmp_path, "--seeds", 1, 2, "--only", 4, 6)
    parts = tmp_path / "claims" / "quick" / "parts.jsonl"
    before = 0
    for words, sent, code in (
        (("--jobs", 2), signal.SIGKILL, -signal.SIGKILL),
        ((), signal.SIGINT, 130),
    ):
        process = started(*command, *words)
        wait_for(lambda: process.poll() is not None or len(read_rows(parts)) > before + 7)  # noqa: B023
        process.send_signal(sent)
        _, err = process.communicate(timeout=HANGS)
        assert process.returncode == code, err
        assert {row["number"] for row in rows_of(parts.parent)} == {4}
        before = len(read_rows(parts))
    assert "everything is saved" in err
    keys = [row["key"] for row in read_rows(parts)]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--only", 99), "there is no claim 99"),
        (("--seeds", 5, 6), "other settings"),
        (("--seeds", 5, 5, 6), "two or more, for an interval, each once"),
        (("--jobs", 0), "jobs is 0; expected 1 or more"),
    ],
)
def test_impossible_settings_are_refused(all_claims, words, message, capsys):
    assert main(["claims", "--quick", "--out", *map(str, (all_claims[0], *words))]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_list_names_every_statement():
    lines = listing().splitlines()
    assert lines[0] == "Identities"
    assert max(map(len, lines)) < 80
    assert sum(line[:5].strip().replace(".", "").isdigit() for line in lines) == sum(
        len(claim.statements) for claim in CLAIMS.values()
    )


def test_a_failed_claim_does_not_stop_the_others(monkeypatch, tmp_path):
    monkeypatch.setitem(norm_growth.QUICK_RATES, "gradient descent", 1e30)
    settings = {"quick": True, "seeds": (1, 2), "runs": tmp_path, "console": Console(quiet=True)}
    with pytest.raises(RunError, match=r"claim 5: .* diverged at step .* The others are in"):
        measure(**settings, only=(2, 5, 10))
    folder = tmp_path / "claims" / "quick"
    assert [row["number"] for row in rows_of(folder)] == [2, 10]
    with lock_folder(folder), pytest.raises(RunError, match="another process is running in"):
        measure(**settings, only=[1])


def test_a_claim_measured_again_replaces_all_its_statements():
    row = {**dict.fromkeys(NEEDED, ""), "number": 18, "n": 1}
    first, second = ([{**row, "id": f"18.{i}", "measured_at": at} for i in (1, 2)] for at in "ab")
    damaged = {"id": "18.1", "number": 18, "measured_at": "c"}
    assert latest_rows([*first, *second, damaged]) == second
