"""`weightnorm bench`: every row runs, the record says all, and two records can be compared.

Nothing here looks at how long anything took.
"""

import copy
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from weightnorm.lab.benchmarks.benchmark import Setting
from weightnorm.lab.benchmarks.cases.op import FORMULA, OURS, TORCH, cases
from weightnorm.lab.benchmarks.compare import compare, load
from weightnorm.lab.benchmarks.registry import ROWS
from weightnorm.lab.benchmarks.runner import bench, write
from weightnorm.lab.cli import main
from weightnorm.lab.cli.bench import BEGIN, END
from weightnorm.lab.errors import RecordError
from weightnorm.lab.reports import report
from weightnorm.lab.reports.bench import cells, markdown

QUICK = Setting(torch.device("cpu"), quick=True, rounds=2)


# DQN's agents live in processes of their own: test_dqn_steps.
@pytest.mark.parametrize("name", [name for name in ROWS if name != "dqn"])
@pytest.mark.xdist_group("bench")
def test_every_row_measures_its_goals(name):
    for case in ROWS[name].cases(QUICK):
        assert case.base in case.peers
        if case.work is not None:
            assert case.work.peer in case.peers
            assert case.work.limit in {"memory", "matrix", "convolution", *case.peers}
        assert case.goals
        ones = {peer: torch.ones(2) for peer in case.peers}
        for goal in case.goals:
            goal.value(ones)  # every peer it speaks of is there
        for call in case.peers.values():
            told = call()
            assert told is None or told > 0
            assert case.unit == "s" or told is not None


def test_the_operation_is_the_same_for_all_peers(monkeypatch):
    found, grad = [], torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda w, *rest: found.append((w.detach(), *grad(w, *rest)))
    )
    for case in cases(QUICK):
        for peer in (TORCH, OURS, FORMULA):
            case.peers[peer]()
        for other in found[1:]:
            torch.testing.assert_close(other, found[0])
        found.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A record of three rows, with charts and a page, by the command."""
    out = tmp_path_factory.mktemp("bench")
    page = out / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    words = ["acting", "mean-only", "op", "--quick", "--out", str(out), "--page", str(page)]
    assert main.main(["bench", *words]) == 0
    return out


def test_the_record_has_machine_settings_and_samples(folder):
    record = load(folder / "result.json")
    assert record["setting"] == {"quick": True, "rounds": 2}
    assert {"machine", "torch", "threads", "device"} <= record["environment"].keys()
    assert set(record["limits"]) == {"memory", "matrix", "convolution"}
    assert [row["name"] for row in record["rows"]] == ["acting", "mean-only", "op"]
    for row in record["rows"]:
        for case in row["cases"]:
            assert all(len(samples) == 2 for samples in case["samples"].values())
            assert set(case["ratios"]) == set(case["samples"]) - {case["base"]}


def test_charts_page_and_report(folder, tmp_path):
    for name in ("acting", "mean-only", "op"):
        for kind in ("png", "svg"):
            assert (folder / f"bench-{name}.{kind}").stat().st_size > 1000
    record = load(folder / "result.json")
    text = (folder / "page.md").read_text()
    assert text == f"before\n{BEGIN}\n\n{markdown(record)}\n\n{END}\nafter\n"
    goals = sum(len(case["goals"]) for row in record["rows"] for case in row["cases"])
    assert len(list(cells(record))) == goals
    files = report(folder, tmp_path / "report")
    page = files.page.read_text()
    assert "What it costs" in page
    assert "Mean-only batch norm at a convolution" in page
    assert {path.name for path in files.figures} >= {"bench-op.svg", "bench-op.png"}


def changed(record, shift):
    other = copy.deepcopy(record)
    for row in other["rows"]:
        for case in row["cases"]:
            for goal in case["goals"]:
                goal["value"] = [None if x is None else x + shift for x in goal["value"]]
    return other


def test_only_what_lies_beyond_noise_counts_as_slower(folder):
    record = load(folder / "result.json")
    same = compare(record, record)
    assert same.changes
    assert not same.slower
    assert not same.faster
    far = compare(record, changed(record, 1000.0))
    assert all(change.slower for change in far.changes if change.old.high < 1000)
    assert len(compare(changed(record, 1000.0), record).faster) == len(far.slower) > 0


def test_comparing_ends_with_a_code_of_its_own(folder, tmp_path, capsys):
    record = load(folder / "result.json")
    better = tmp_path / "better.json"
    better.write_text(json.dumps(changed(record, -1000.0)))
    words = ["bench", "acting", "--quick", "--out", str(tmp_path / "new"), "--compare"]
    assert main.main([*words, str(better)]) == 3
    out = capsys.readouterr().out
    assert "slower: acting, batch of 1: weight norm, folded ≤ 1 × plain: was -99" in out
    worse = tmp_path / "worse.json"
    worse.write_text(json.dumps(changed(record, 1000.0)))
    assert main.main([*words, str(worse)]) == 0
    assert "faster: acting" in capsys.readouterr().out


def test_other_conditions_are_named_and_other_sizes_refused(folder):
    record = load(folder / "result.json")
    other = copy.deepcopy(record)
    other["environment"]["threads"] = 77
    assert compare(other, record).caution.startswith("other threads (77, now ")
    other["setting"]["quick"] = False
    with pytest.raises(RecordError, match="--quick"):
        compare(other, record)
    other["setting"]["quick"], other["rows"] = True, []
    with pytest.raises(RecordError, match="no goal in common"):
        compare(other, record)


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', '{"setting": 1}'])
def test_what_is_no_record_is_refused(text, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"not a record of weightnorm bench"):
        load(path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mean-onyl"], "there is no row 'mean-onyl'; did you mean 'mean-only'?"),
        (["op", "--rounds", "0"], "rounds is 0; expected 1 or more"),
        (["op", "--threads", "0"], "threads is 0; expected 1 or more"),
        (["op", "--page", "nowhere.md"], "cannot read nowhere.md"),
        (["op", "--page", "README.md"], "README.md has no place for the table"),
    ],
)
def test_impossible_words_are_refused_before_any_work(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("no marks")
    assert main.main(["bench", "--quick", *words]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


def test_a_missing_record_is_an_error(capsys, tmp_path):
    old = str(tmp_path / "old.json")
    assert main.main(["bench", "op", "--quick", "--compare", old]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_it_lists_its_rows(capsys):
    assert main.main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ROWS)


def test_a_number_that_is_not_finite_is_no_bound(tmp_path):
    record = {
        "environment": {"machine": "m"},
        "setting": {"quick": True, "rounds": 1},
        "rows": [
            {
                "name": "r",
                "cases": [{"case": "c", "goals": [{"says": "g", "value": [1.0, 0.5, None]}]}],
            }
        ],
    }
    write(record | {"limits": {}}, tmp_path)
    found = compare(load(tmp_path / "result.json"), changed(record, 1000.0))
    assert not found.slower


def test_progress_is_told_in_lines_where_nobody_looks_on(tmp_path):
    told = io.StringIO()
    bench([ROWS["acting"]], QUICK, Console(file=told))
    assert "acting: An agent acts" in told.getvalue()


def test_the_page_has_the_records_table():
    docs = Path(__file__).parents[3] / "docs"
    written = (docs / "performance.md").read_text().split(BEGIN)[1].split(END)[0].strip()
    record = docs / "results" / "bench" / "result.json"
    if record.exists():
        assert written == markdown(load(record)), "make bench"
        assert not load(record)["setting"]["quick"]
    else:
        assert written == "Not measured on a quiet machine yet: `make bench`."
