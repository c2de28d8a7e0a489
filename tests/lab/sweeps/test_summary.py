"""Summaries of sweeps: mean and deviation over seeds, best learning rates, the table."""

import io
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
from weightnorm.lab.sweep_summary import SweepResult, render

WN = Parameterization.WEIGHT_NORM


def after(words, flag):
    return words[words.index(flag) + 1]


def record(how="weight-norm", rate=0.003, seed=1, **result):
    config = {"parameterization": how, "learning_rate": rate, "seed": seed}
    return RunRecord(Path("x"), "classify", "demo", config, result=result or None)


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
    result = SweepResult(records, metric="score", highest=True, axes=tuple(axes))
    assert result.comparison().best == {"pong weight-norm": 0.01, "breakout weight-norm": 0.001}


def table(records, **how):
    """The cells of the table, and the style of each row."""
    console = Console(file=io.StringIO(), width=100)
    rendered = render(SweepResult(records, **how))
    console.print(rendered)
    lines = console.file.getvalue().splitlines()
    return [re.split(r"  +", line.strip()) for line in lines], [row.style for row in rendered.rows]


def test_table_shows_every_rate_and_marks_the_best():
    records = [
        record("standard", 0.001, test_error=0.25),
        record("standard", 0.01, test_error=None),  # diverged
        record("weight-norm", 0.01),
        record("weight-norm", 0.001, seed=1, test_error=0.1),
        record("weight-norm", 0.001, seed=2, test_error=0.2),
        record("batch-norm", 0.001),
    ]
    (head, *rows), styles = table(records)
    assert head[:3] == ["parameterization", "lr", "test error"]
    assert rows == [
        ["standard", "0.001", "0.25", "1", "best"],
        ["0.01", "–", "0", "1 diverged"],
        ["weight-norm", "0.001", "0.15 ± 0.071", "2", "best"],
        ["0.01", "–", "0", "1 unfinished"],
        ["batch-norm", "0.001", "–", "0", "1 unfinished"],
    ]
    assert styles == ["bold", "", "bold", "", ""]


def test_the_chosen_metric_comes_first_and_decides():
    records = [
        record(rate=0.001, test_error=0.1, score=9),
        record(rate=0.01, test_error=0.2, score=7),
    ]
    (head, *_), styles = table(records, metric="score", highest=True)
    assert head == ["parameterization", "lr", "score", "test error", "n"]
    assert styles == ["bold", ""]
    assert table(records, metric="score")[1] == ["", "bold"]


def test_unknown_metric_of_results_is_refused():
    with pytest.raises(ConfigError, match=r"one of test_error, test_loss$"):
        table([record(test_error=1, test_loss=2, note="text")], metric="loss")
    with pytest.raises(ConfigError, match="metric is note"):
        table([record(test_error=1, note="text")], metric="note")
