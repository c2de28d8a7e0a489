"""`weightnorm bench`: every benchmark runs, the record is complete, two records are compared.

Nothing here depends on how long anything takes.
"""

import copy
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from commands import weightnorm
from weightnorm.lab.bench.benchmark import Settings
from weightnorm.lab.bench.cases import optimizer_step
from weightnorm.lab.bench.cases.op import FORMULA, OURS, TORCH, cases
from weightnorm.lab.bench.cases.vocoder import Residuals
from weightnorm.lab.bench.compare import compare, load
from weightnorm.lab.bench.registry import BENCHMARKS
from weightnorm.lab.bench.runner import run, write
from weightnorm.lab.bench.statistics import Rounds
from weightnorm.lab.cli import main
from weightnorm.lab.errors import RecordError, RunError
from weightnorm.lab.files import lock_folder
from weightnorm.lab.reports import report
from weightnorm.lab.reports.bench import details, goals, summary

QUICK = Settings(torch.device("cpu"), quick=True, rounds=2)


# DQN's agents have processes of their own: test_dqn_steps.
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "dqn"])
@pytest.mark.xdist_group("bench")
def test_every_case_is_well_defined_and_runs(name):
    for case in BENCHMARKS[name].cases(QUICK):
        assert case.base in case.peers
        if case.work is not None:
            assert case.work.peer in case.peers
            assert case.work.limit in {"memory", "matrix", "convolution", *case.peers}
        assert case.goals
        ones = Rounds({peer: np.ones(2) for peer in case.peers})
        for goal in case.goals:
            assert set(goal.peers) <= set(case.peers)
            assert np.isfinite(goal.value(ones))
        for line in case.summary:
            columns = (line.ours, line.torch_parametrization, line.torch_hook, line.batch_norm)
            assert {name for name in columns if name} <= set(case.peers)
            assert line.goal < len(case.goals)
        assert set(case.at_least_base) <= set(case.peers)
        for call in case.peers.values():
            value = call()
            assert value is None or value > 0
            assert case.unit == "s" or value is not None


def test_all_peers_compute_the_same_operation(monkeypatch):
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


def test_the_kernels_only_peer_of_the_optimizer_form_moves_weights_like_it():
    models = []
    for name in (optimizer_step.OPTIMIZER, optimizer_step.BARE):
        torch.manual_seed(0)
        models.append(Residuals(2))
        optimizer = optimizer_step.optimizer_of(name, models[-1])
        for i in range(3):
            for p in models[-1].parameters():
                p.grad = torch.cos(3 * p.detach() + i)
            optimizer.step()
    for ours, bare in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, bare)


def test_summary_lines_are_unique():
    texts = [
        line.work
        for name, benchmark in BENCHMARKS.items()
        if name != "dqn"
        for case in benchmark.cases(QUICK)
        for line in case.summary
    ]
    assert len(texts) == len(set(texts)) > 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A record of three benchmarks, made by the command."""
    out = tmp_path_factory.mktemp("bench")
    assert main.main(["bench", "acting", "mean-only", "op", "--quick", "--out", str(out)]) == 0
    return out


def test_record(folder):
    record = load(folder / "result.json")
    assert record["settings"]["quick"]
    assert record["settings"]["rounds"] == 2
    environment = record["environment"]
    assert {"machine", "torch", "threads", "device"} <= environment.keys()
    assert {"model", "cores", "instruction_sets", "torch_uses"} == environment["cpu"].keys()
    assert set(record["limits"]) == {"memory", "matrix", "convolution"}
    assert [benchmark["name"] for benchmark in record["benchmarks"]] == [
        "acting",
        "mean-only",
        "op",
    ]
    for benchmark in record["benchmarks"]:
        for case in benchmark["cases"]:
            assert case["rounds"] == 2
            assert all(len(samples) == 2 for samples in case["samples"].values())
            for result in case["results"].values():
                assert result["low"] <= result["value"] <= result["high"]
            for goal in case["goals"]:
                assert goal["met"] == (goal["verdict"] == "met")


def test_tables_and_report(folder, tmp_path):
    record = load(folder / "result.json")
    count = sum(len(c["goals"]) for benchmark in record["benchmarks"] for c in benchmark["cases"])
    assert len(goals(record).rows) == count
    assert [row[0].replace("\N{NO-BREAK SPACE}", " ") for row in summary(record).rows] == [
        "agent acting, folded",
        "mean-only BN, NCHW",
        "mean-only BN, channels-last",
    ]
    files = report(folder, tmp_path / "report")
    page = files.page.read_text()
    assert "Mean-only batch norm after a convolution" in page


def shifted(record, shift):
    other = copy.deepcopy(record)
    for benchmark in other["benchmarks"]:
        for case in benchmark["cases"]:
            for goal in case["goals"]:
                for key in ("value", "low", "high"):
                    goal[key] = None if goal[key] is None else goal[key] + shift
    return other


def test_only_disjoint_intervals_are_changes(folder):
    record = load(folder / "result.json")
    same = compare(record, record)
    assert same.changes
    assert not same.slower
    assert not same.faster
    far = compare(record, shifted(record, 1000.0))
    assert all(change.slower for change in far.changes if change.old.high < 1000)
    assert len(compare(shifted(record, 1000.0), record).faster) == len(far.slower) > 0


def test_exit_code_of_compare(folder, tmp_path, capsys):
    record = load(folder / "result.json")
    better = tmp_path / "better.json"
    better.write_text(json.dumps(shifted(record, -1000.0)))
    words = ["bench", "acting", "--quick", "--out", str(tmp_path / "new"), "--compare"]
    assert main.main([*words, str(better)]) == 3
    out = capsys.readouterr().out
    assert "slower: acting, batch of 1: weight norm, folded ≤ 1 × plain: was -99" in out
    worse = tmp_path / "worse.json"
    worse.write_text(json.dumps(shifted(record, 1000.0)))
    assert main.main([*words, str(worse)]) == 0
    assert "faster: acting" in capsys.readouterr().out


def test_a_record_keeps_the_benchmarks_that_are_not_measured_again(folder, tmp_path):
    out, words = tmp_path / "bench", ["bench", "acting", "--quick", "--rounds", "1", "--out"]
    shutil.copytree(folder, out)
    before = load(out / "result.json")
    assert main.main([*words, str(out)]) == 0
    after = load(out / "result.json")
    assert after["benchmarks"][0]["cases"][0]["rounds"] == 1
    assert after["benchmarks"][1:] == before["benchmarks"][1:]
    config = json.loads((out / "config.json").read_text())["config"]
    assert config["benchmarks"] == ["acting", "mean-only", "op"]
    sessions = [json.loads(line) for line in (out / "sessions.jsonl").read_text().splitlines()]
    assert {row["started"] for row in sessions} == {
        benchmark["started"] for benchmark in after["benchmarks"]
    }


def test_a_record_of_other_conditions_is_not_mixed(folder, tmp_path, capsys):
    record = load(folder / "result.json")
    record["environment"]["machine"] = "another one"
    (tmp_path / "result.json").write_text(json.dumps(record))
    assert main.main(["bench", "acting", "--quick", "--out", str(tmp_path)]) == 1
    assert "measured under other conditions: machine" in " ".join(capsys.readouterr().err.split())
    assert load(tmp_path / "result.json") == record


def test_other_conditions_are_named_and_other_sizes_refused(folder):
    record = load(folder / "result.json")
    other = copy.deepcopy(record)
    other["environment"]["threads"] = 77
    assert compare(other, record).caution.startswith("other threads (77, now ")
    other["settings"]["quick"] = False
    with pytest.raises(RecordError, match="--quick"):
        compare(other, record)
    other["settings"]["quick"], other["benchmarks"] = True, []
    with pytest.raises(RecordError, match="no goal in common"):
        compare(other, record)


@pytest.mark.parametrize("text", ["", "[]", '{"benchmarks": []}', '{"settings": 1}'])
def test_other_files_are_refused(text, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"not a record of weightnorm bench"):
        load(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mean-onyl"], "there is no benchmark 'mean-onyl'; did you mean 'mean-only'?"),
        (["op", "--rounds", "0"], "rounds is 0; expected 1 or more"),
        (["op", "--seconds", "-1"], "seconds is -1.0; expected 0 or more"),
        (["op", "--threads", "0"], "threads is 0; expected 1 or more"),
    ],
)
def test_bad_options_are_refused_before_measuring(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(["bench", "--quick", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


def test_a_missing_record_is_an_error(capsys, tmp_path):
    old = str(tmp_path / "old.json")
    assert main.main(["bench", "op", "--quick", "--compare", old]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_list(capsys):
    assert main.main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in BENCHMARKS)


def test_infinite_values_are_no_bound(tmp_path):
    goal = {"goal": "g", "value": 1.0, "low": 0.5, "high": None}
    record = {
        "environment": {"machine": "m"},
        "settings": {"quick": True, "rounds": 1},
        "limits": {},
        "benchmarks": [{"name": "b", "cases": [{"case": "c", "goals": [goal]}]}],
    }
    write(record, tmp_path)
    found = compare(load(tmp_path / "result.json"), shifted(record, 1000.0))
    assert not found.slower


def test_progress_is_printed_as_lines_without_a_terminal(tmp_path):
    printed = io.StringIO()
    run([BENCHMARKS["acting"]], QUICK, Console(file=printed), tmp_path)
    assert "acting: batch of 1" in printed.getvalue()


def test_the_profiler_prints_nothing(tmp_path):
    code, _, err = weightnorm("bench", "memory", "--quick", "--out", tmp_path)
    assert code == 0, err
    assert err.splitlines() == [
        "limits of the machine",
        "memory: passes of a training step, batch of 100",
    ]


def test_the_committed_record_is_readable():
    record = load(Path(__file__).parents[3] / "docs" / "results" / "bench" / "result.json")
    assert not record["settings"]["quick"]
    assert len(summary(record).rows) >= 15
    assert all(table.rows for table in details(record))


def test_a_folder_takes_one_command_at_a_time(tmp_path):
    with lock_folder(tmp_path), pytest.raises(RunError, match="another process is running"):
        run([BENCHMARKS["low-rank-norm"]], QUICK, Console(file=io.StringIO()), tmp_path)
