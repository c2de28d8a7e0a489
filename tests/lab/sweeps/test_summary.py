"""Summaries of sweeps: mean and deviation over seeds, best learning rates, the table."""

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from weightnorm import Parameterization
from weightnorm.lab import dqn
from weightnorm.lab.config import scientific_fields
from weightnorm.lab.errors import ConfigError
from weightnorm.lab.records import RunRecord
from weightnorm.lab.sweep import Grid
from weightnorm.lab.sweeps.summary import GridCell, SweepResult, render, summarize

WN = Parameterization.WEIGHT_NORM


def after(words, flag):
    return words[words.index(flag) + 1]


def record(how="weight-norm", rate=0.003, seed=1, **result):
    config = {"parameterization": how, "learning_rate": rate, "seed": seed}
    return RunRecord(Path("x"), "classify", "demo", config, result=result or None)


def test_cell_has_mean_and_sample_deviation_over_seeds():
    values = [0.1, 0.2, 0.6]
    (cell,) = summarize([record(seed=i, test_error=v) for i, v in enumerate(values)])
    assert (cell.parameterization, cell.learning_rate, cell.n) == ("weight-norm", 0.003, 3)
    assert cell.mean == pytest.approx(0.3)
    assert cell.std == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2))
    assert cell.best
    assert (cell.diverged, cell.unfinished) == (0, 0)


def test_best_learning_rate_of_each_parameterization():
    cells = summarize(
        [
            record("weight-norm", 0.01, test_error=0.3),
            record("weight-norm", 0.001, test_error=0.2),
            record("standard", 0.001, test_error=0.5),
            record("standard", 0.01, test_error=0.4),
        ]
    )
    assert [(c.parameterization, c.learning_rate, c.best) for c in cells] == [
        ("weight-norm", 0.001, True),
        ("weight-norm", 0.01, False),
        ("standard", 0.001, False),
        ("standard", 0.01, True),
    ]


def test_metric_decides_the_best_rate():
    records = [
        record(rate=0.001, test_error=0.1, test_loss=9),
        record(rate=0.01, test_error=0.2, test_loss=1),
    ]
    assert [c.best for c in summarize(records)] == [True, False]
    assert [c.best for c in summarize(records, "test_loss")] == [False, True]


def test_highest_metric_is_best_if_asked():
    records = [
        record(rate=0.001, score=100.0),
        record(rate=0.01, score=300.0),
        record(rate=0.1, score=900.0),
        record(rate=0.1, seed=2, score=None),  # diverged
    ]
    cells = summarize(records, "score", highest=True)
    assert [cell.best for cell in cells] == [False, True, False]
    table = render(SweepResult(records, metric="score", highest=True))
    assert [row.style for row in table.rows] == ["", "bold", ""]


def test_further_axes_are_compared_separately(tmp_path):
    axes = {"game": ("pong", "breakout")}
    base = replace(dqn.PRESETS["demo"], runs=tmp_path)
    plan = Grid("dqn", base, (WN,), (0.001, 0.01), axes=axes).plan()
    labels = [job.label for job in plan]
    assert labels == [
        f"{game} weight-norm lr {rate} seed 1"
        for game in ("pong", "breakout")
        for rate in (0.001, 0.01)
    ]
    assert [after(job.words, "--game") for job in plan] == ["pong"] * 2 + ["breakout"] * 2
    records = [
        RunRecord(job.folder, "dqn", "demo", scientific_fields(job.config), result={"score": score})
        for job, score in zip(plan, (1.0, 2.0, 400.0, 300.0), strict=True)
    ]
    cells = summarize(records, "score", highest=True, axes=tuple(axes))
    assert [(c.parameterization, c.learning_rate) for c in cells if c.best] == [
        ("pong weight-norm", 0.01),
        ("breakout weight-norm", 0.001),
    ]


def best(records):
    return [cell.learning_rate for cell in summarize(records) if cell.best]


def test_ties_are_decided_by_runs_then_smaller_rate():
    tie = [record(rate=0.01, test_error=0.25), record(rate=0.001, test_error=0.25)]
    assert best(tie) == [0.001]
    assert best([*tie, record(rate=0.01, seed=2, test_error=0.25)]) == [0.01]


def test_unfinished_runs_are_counted_separately():
    cells = summarize(
        [record(rate=0.001), record(rate=0.01, test_error=0.5), record(rate=0.01, seed=2)]
    )
    assert cells[0] == GridCell("weight-norm", 0.001, 0, None, None, unfinished=1)
    assert cells[1] == GridCell("weight-norm", 0.01, 1, 0.5, None, unfinished=1, best=True)
    assert best([record(), record(rate=0.01)]) == []


def test_rate_with_a_diverged_run_is_not_best():
    shaky = [record(rate=0.01, test_error=0.1), record(rate=0.01, seed=2, test_error=None)]
    steady = record(rate=0.001, test_error=0.4)
    assert best([*shaky, steady]) == [0.001]
    assert best(shaky) == [0.01]
    assert best([record(test_error=None)]) == []
    assert summarize(shaky)[0].diverged == 1


def test_unknown_metric_of_results_is_refused():
    with pytest.raises(ConfigError, match=r"one of test_error, test_loss$"):
        summarize([record(test_error=1, test_loss=2, note="text")], "loss")
    with pytest.raises(ConfigError, match="metric is note"):
        summarize([record(test_error=1, note="text")], "note")
    assert summarize([], "loss") == []


def test_table_shows_every_cell():
    records = [
        record("standard", 0.001, test_error=0.25),
        record("standard", 0.01, test_error=None),
        record("weight-norm", 0.001, seed=1, test_error=0.1),
        record("weight-norm", 0.001, seed=2, test_error=0.2),
        record("weight-norm", 0.01),
    ]
    console = Console(file=io.StringIO(), width=100)
    console.print(render(SweepResult(records)))
    rows = [re.split(r"  +", line.strip()) for line in console.file.getvalue().splitlines()[1:]]
    assert rows == [
        ["standard", "0.001", "0.25", "1", "best"],
        ["0.01", "–", "0", "1 diverged"],
        ["weight-norm", "0.001", "0.15 ± 0.071", "2", "best"],
        ["0.01", "–", "0", "1 unfinished"],
    ]
    assert "test error" in console.file.getvalue()
