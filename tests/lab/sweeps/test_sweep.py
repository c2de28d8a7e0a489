"""Sweeps: grids, their execution with a stub in place of real runs, and summaries."""

import fcntl
import io
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from commands import HANGS, wait_for
from weightnorm import Parameterization
from weightnorm.lab import classify, dqn
from weightnorm.lab.cli import main
from weightnorm.lab.config import RunConfig, folder, scientific_fields
from weightnorm.lab.errors import ConfigError, RunError
from weightnorm.lab.records import RunRecord, append_row, write_json
from weightnorm.lab.sweeps import executors
from weightnorm.lab.sweeps import grid as sweeps_grid
from weightnorm.lab.sweeps.grid import Grid, epochs, flags, sweep
from weightnorm.lab.sweeps.summary import GridCell, SweepResult, render, summarize

WN, STANDARD = Parameterization.WEIGHT_NORM, Parameterization.STANDARD
DEMO = classify.PRESETS["demo"]


def grid(runs, *seeds, rates=(0.003,), ways=(WN,), **changes):
    return Grid("classify", replace(DEMO, runs=runs, **changes), ways, rates, seeds or (1,))


def after(words, flag):
    return words[words.index(flag) + 1]


# — the grid —


def test_plan_has_every_combination_seed_by_seed(tmp_path):
    plan = grid(tmp_path, 1, 2, rates=(0.001, 0.01), ways=(STANDARD, WN)).plan()
    assert [job.label for job in plan] == [
        f"{how} lr {rate} seed {seed}"
        for seed in (1, 2)
        for how in ("standard", "weight-norm")
        for rate in (0.001, 0.01)
    ]
    for job in plan:
        assert job.folder == folder("classify", job.config, classify.PRESETS)
        assert job.log == job.folder / "output.log"
        assert job.label == (
            f"{job.config.parameterization} lr {job.config.learning_rate} seed {job.config.seed}"
        )
    assert len({job.folder for job in plan}) == 8


@pytest.mark.parametrize("preset", classify.PRESETS)
def test_default_learning_rates_are_the_presets(tmp_path, preset):
    plan = Grid("classify", replace(classify.PRESETS[preset], runs=tmp_path)).plan()
    rates = {str(job.config.parameterization): job.config.learning_rate for job in plan}
    standard = 0.003 if preset == "demo" else 0.0003
    assert rates.pop("standard") == standard
    assert rates == dict.fromkeys(map(str, list(Parameterization)[1:]), 0.003)
    assert [job.config.seed for job in plan] == [1] * 5


def test_job_command(tmp_path):
    (job,) = grid(tmp_path, 7, rates=(0.01,), epochs=3).plan()
    assert list(job.words) == [
        *(sys.executable, "-m", "weightnorm", "run", "classify", "--preset", "demo"),
        *("--parameterization", "weight-norm", "--learning-rate", "0.01", "--seed", "7"),
        *("--runs", str(tmp_path), "--epochs", "3"),
    ]
    (other,) = grid(tmp_path).plan(["nice", "run"])
    assert other.words[:3] == ("nice", "run", "classify")


def test_flags_of_all_value_types():
    @dataclass(frozen=True)
    class Config(RunConfig):
        limit: int | None = 5
        fast: bool = True

    changed = replace(Config(), limit=None, fast=False, compile=True, data_dir=Path("/d"))
    assert flags(changed, Config())[8:] == [
        *("--data-dir", "/d", "--compile", "--limit", "None", "--no-fast")
    ]
    assert len(flags(Config(), Config())) == 8  # preset and the grid's three are always given


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parameterization": STANDARD},  # its learning rate is not the preset's
        {"learning_rate": 1e-05, "seed": 3},
        {"learning_rate": 0.1 + 0.2},
        {"compile": True, "device": "cpu", "data_dir": Path("some where"), "limit": 20},
        {"runs": Path("elsewhere"), "checkpoint_seconds": 0.5, "precision": "bfloat16"},
        {"width": 0.3, "noise": 0.0, "dropout": 0.25, "batch_size": 10, "data": "cifar10"},
    ],
)
@pytest.mark.parametrize("preset", classify.PRESETS)
def test_flags_parse_to_the_same_config(preset, changes, monkeypatch):
    seen = []

    def run(config, console):
        """Run."""
        seen.append(config)
        return RunRecord(Path("x"), "classify", preset, {})

    monkeypatch.setattr(classify, "run", run)
    start = classify.PRESETS[preset]
    config = replace(start, **changes)
    assert main(["run", "classify", *flags(config, start)]) == 0
    assert seen == [config]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rates": (0.003, -1.0)}, "learning-rate is -1.0; expected a positive number"),
        ({"ways": ()}, "parameterizations is empty; expected one or more"),
        ({"rates": (0.003, 0.003)}, "give each value once"),
        ({"rates": (0.003, 0.0030000001)}, "give each value once"),  # one folder for both
    ],
)
def test_invalid_grid_is_refused_before_any_run(tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        sweep(grid(tmp_path / "runs", **wrong))
    assert not (tmp_path / "runs").exists()


def test_invalid_seeds_and_jobs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="seeds is empty"):
        replace(grid(tmp_path), seeds=()).plan()
    with pytest.raises(ConfigError, match="two runs of the grid"):
        grid(tmp_path, 1, 2, 1).plan()
    with pytest.raises(ConfigError, match="jobs is 0; expected 1 or more"):
        sweep(grid(tmp_path), jobs=0)


def test_with_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moved = grid(Path("runs"), data_dir=Path("data")).with_absolute_paths().base
    assert (moved.runs, moved.data_dir) == (tmp_path / "runs", tmp_path / "data")
    assert grid(Path("runs")).with_absolute_paths().base.data_dir is None


# — summaries —


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


# — processes: a stand-in for runs —

STUB = """
import json, os, shlex, signal, sys, time
from pathlib import Path

jobs = json.loads(Path(__file__).with_suffix(".json").read_text())
job = jobs[shlex.join(sys.argv[1:])]
folder, seed, behaviour = Path(job["folder"]), job["config"]["seed"], job["behaviour"]

def note(name, **what):
    row = {"seed": seed, "pid": os.getpid(), "time": time.monotonic(), **what}
    with Path(__file__).with_name(name).open("a") as file:
        file.write(json.dumps(row) + "\\n")

signals = []
def on_sigint(number, frame):
    signals.append(number)
    if len(signals) > 1:
        note("interrupted twice")

signal.signal(signal.SIGINT, on_sigint)
note("started", threads=[os.environ.get(f"{x}_NUM_THREADS") for x in ("OMP", "MKL")],
     gpu=os.environ.get("CUDA_VISIBLE_DEVICES"), parent=os.getppid())
print("hello from", seed, flush=True)
if behaviour == "fail":
    print("\\n".join(f"line {i}" for i in range(9)), "\\n[red]out of luck[/]", file=sys.stderr)
    sys.exit(1)
if behaviour == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "silent":
    sys.exit(0)
if behaviour == "diverge":
    head = {"experiment": "classify", "preset": "demo", "config": job["config"]}
    (folder / "config.json").write_text(json.dumps(head))
    place = {"epoch": 1, "step": 4, "message": "diverged at epoch 1, step 4: loss nan.\\nMore"}
    (folder / "result.json").write_text(json.dumps({"test_error": None, "diverged": place}))
    sys.exit(1)
lost = folder / "lost"
if behaviour == "lose worker" or (behaviour == "lose worker once" and not lost.exists()):
    lost.touch()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
if behaviour == "hang":
    while not signals:
        time.sleep(0.01)
    time.sleep(0.3)  # a second signal would be noted
    note("saved")
    sys.exit(130)
if behaviour == "finish after a signal":
    while not signals:
        time.sleep(0.01)
if behaviour == "finish beside another":
    started, end = Path(__file__).with_name("started"), time.monotonic() + 600
    while started.read_text().count("\\n") < 2 and time.monotonic() < end:
        time.sleep(0.01)
if behaviour == "stubborn":
    while True:
        time.sleep(0.01)
head = {"experiment": "classify", "preset": "demo", "config": job["config"]}
(folder / "config.json").write_text(json.dumps(head))
for epoch in range(3):
    time.sleep(job["seconds"] / 3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"epoch": epoch + 1}) + "\\n")
(folder / "result.json").write_text(json.dumps({"test_error": seed / 100}))
note("ended")
"""


class StubRuns:
    """A command in place of the runs of a grid, with a behaviour for each seed."""

    def __init__(self, place, grid, seconds=0.0, **behaviours):
        place.mkdir(exist_ok=True)
        self.place, self.script = place, place / "stub.py"
        self.command = [sys.executable, "-S", str(self.script)]
        self.script.write_text(STUB)
        jobs = {
            " ".join(job.words): {
                "folder": str(job.folder),
                "config": scientific_fields(job.config),
                "behaviour": behaviours.get(f"seed_{job.config.seed}", "finish"),
                "seconds": seconds,
            }
            for job in grid.plan(())
        }
        self.script.with_suffix(".json").write_text(json.dumps(jobs))

    def rows(self, name):
        path = self.place / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def seeds(self, name):
        return sorted(row["seed"] for row in self.rows(name))


def run_sweep(grid, stub, **options):
    console = options.pop("console", None) or Console(file=io.StringIO(), width=200)
    result = sweep(grid, console=console, command=stub.command, **options)
    return result, console.file.getvalue()


@pytest.fixture
def place(tmp_path):
    return tmp_path / "stub runs"


def most_concurrent(stub):
    events = [(row["time"], 1) for row in stub.rows("started")]
    events += [(row["time"], -1) for row in stub.rows("ended")]
    here = most = 0
    for _, change in sorted(events):
        here += change
        most = max(most, here)
    return most


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_number_of_concurrent_runs(tmp_path, place, jobs, monkeypatch):
    monkeypatch.setattr(executors, "cores", lambda: 5)
    many = grid(tmp_path, *range(1, 7))
    stub = StubRuns(place, many, seconds=0.3 * jobs)
    result, _ = run_sweep(many, stub, jobs=jobs)
    assert (result.failed, result.interrupted) == ([], False)
    assert [r.result for r in result.records] == [{"test_error": s / 100} for s in range(1, 7)]
    assert most_concurrent(stub) == jobs
    share = {1: "5", 2: "2", 3: "1"}[jobs]
    assert {tuple(row["threads"]) for row in stub.rows("started")} == {(share, share)}


def test_threads_per_job(monkeypatch):
    monkeypatch.setattr(executors, "cores", lambda: 2)
    assert executors.LocalExecutor(8).threads == 1
    monkeypatch.undo()
    assert executors.LocalExecutor(1).threads == len(os.sched_getaffinity(0))


def test_finished_runs_are_not_repeated(tmp_path, place):
    some, all_ = grid(tmp_path, 1, 3), grid(tmp_path, 1, 2, 3)
    stub = StubRuns(place, all_)
    run_sweep(some, stub)
    assert stub.seeds("started") == [1, 3]
    result, text = run_sweep(all_, stub)
    assert stub.seeds("started") == [1, 2, 3]
    assert "3 runs, 2 of them finished before" in text
    assert [r.result["test_error"] for r in result.records] == [0.01, 0.02, 0.03]
    _, text = run_sweep(all_, stub, cluster="127.0.0.1:1")  # nothing to do: no connection
    assert stub.seeds("started") == [1, 2, 3]


def test_finished_run_of_other_settings_is_not_used(tmp_path, place):
    """As after a preset has changed: same folder, other settings."""
    one = grid(tmp_path)
    (job,) = one.plan()
    old = scientific_fields(replace(job.config, width=0.5))
    job.folder.mkdir(parents=True)
    head = {"experiment": "classify", "preset": "demo", "config": old}
    write_json(job.folder / "config.json", head)
    write_json(job.folder / "result.json", {"test_error": 0.9})
    result, _ = run_sweep(one, StubRuns(place, one, seed_1="fail"))
    assert [label for label, _ in result.failed] == [job.label]
    assert not result.records[0].finished


def test_failed_run_does_not_stop_the_others(tmp_path, place):
    five = grid(tmp_path, 1, 2, 3, 4, 5)
    stub = StubRuns(place, five, seed_1="fail", seed_2="die", seed_4="silent")
    result, text = run_sweep(five, stub)
    assert [r.finished for r in result.records] == [False, False, True, False, True]
    assert not result.interrupted
    reasons = {label.removeprefix("weight-norm lr 0.003 "): why for label, why in result.failed}
    assert list(reasons) == ["seed 1", "seed 2", "seed 4"]
    tail = [*(f"line {i}" for i in range(5, 9)), "[red]out of luck[/]"]
    assert [line.strip() for line in reasons["seed 1"].splitlines()] == ["exit code 1", *tail]
    assert reasons["seed 2"] == "killed by signal 9 (Killed)\nhello from 2"
    assert reasons["seed 4"] == "ended without a result\nhello from 4"
    for line in (
        "failed   weight-norm lr 0.003 seed 1",
        "[red]out of luck[/]",
        "2 done · 0 running",
    ):
        assert line in text
    (cell,) = summarize(result.records)
    assert (cell.n, cell.unfinished) == (2, 3)


def test_diverged_run_is_neither_done_nor_failed(tmp_path, place):
    three = grid(tmp_path, 1, 2, rates=(0.003, 0.01))
    stub = StubRuns(place, three, seed_2="diverge")
    for start in ("4 runs, 0 of them finished before", "4 runs, 4 of them finished before"):
        result, text = run_sweep(three, stub)
        assert (result.failed, result.interrupted) == ([], False)
        assert [r.diverged is not None for r in result.records] == [False, False, True, True]
        cells = summarize(result.records)
        assert [(c.n, c.diverged, c.unfinished) for c in cells] == [(1, 1, 0), (1, 1, 0)]
        if "0 of them" in start:
            assert text.startswith(start)
            line = "diverged weight-norm lr 0.003 seed 2  diverged at epoch 1, step 4: loss nan.\n"
            assert line in text
            assert "2 done · 2 diverged · 0 running · 0 failed · 0 left" in text
    assert stub.seeds("started") == [1, 1, 2, 2]  # not repeated


def test_log_has_every_start_and_failure_only_the_last(tmp_path, place):
    one = grid(tmp_path)
    (job,) = one.plan()
    run_sweep(one, StubRuns(place, one, seed_1="fail"))
    stub = StubRuns(place, one, seed_1="die")
    result, _ = run_sweep(one, stub)
    assert "line" not in result.failed[0][1]
    lines = job.log.read_text().splitlines()
    starts = [line for line in lines if line.startswith("$ ")]
    assert len(starts) == 2
    assert starts[0].startswith(f"$ {sys.executable} -S '{stub.script}' classify --preset demo")
    assert lines.count("hello from 1") == 2


def test_run_that_cannot_be_started_fails(tmp_path, place):
    two = grid(tmp_path / "runs", 1, 2)
    blocked, _ = two.plan()
    blocked.folder.parent.mkdir(parents=True)
    blocked.folder.write_text("a file where a folder should be")
    result, _ = run_sweep(two, StubRuns(place, two))
    assert [label for label, _ in result.failed] == [blocked.label]
    assert "File exists" in result.failed[0][1]
    assert result.records[1].finished
    result = sweep(
        grid(tmp_path / "other"), console=Console(file=io.StringIO()), command=["/no/such/program"]
    )
    assert "/no/such/program" in result.failed[0][1] or "No such file" in result.failed[0][1]


def test_unknown_metric_is_refused_before_any_run(tmp_path, place):
    two = grid(tmp_path, 1, 2)
    stub = StubRuns(place, two)
    run_sweep(grid(tmp_path, 1), stub)
    with pytest.raises(ConfigError, match="metric is test_eror; expected one of test_error"):
        run_sweep(two, stub, metric="test_eror")
    assert stub.seeds("started") == [1]


# — progress —


def test_output_in_a_pipe(tmp_path, place, monkeypatch):
    monkeypatch.setattr(sweeps_grid, "STATUS_SECONDS", 0.0)
    monkeypatch.setattr(sweeps_grid, "LIVE_SECONDS", 0.0)
    two = grid(tmp_path, 1, 2)
    _, text = run_sweep(two, StubRuns(place, two, seconds=1.5))
    lines = text.splitlines()
    name = "weight-norm lr 0.003 seed"
    events = [line for line in lines if "done ·" not in line]
    assert events == [
        "2 runs, 0 of them finished before",
        f"started  {name} 1",
        f"done     {name} 1  test error 0.01",
        f"started  {name} 2",
        f"done     {name} 2  test error 0.02",
    ]
    assert lines[-1] == "2 done · 0 running · 0 failed · 0 left"
    assert f"0 done · 1 running · 0 failed · 1 left, {name} 1 at epoch 2" in lines
    assert f"1 done · 1 running · 0 failed · 0 left, {name} 2 at epoch 1" in lines
    assert "\x1b" not in text


def test_output_in_a_terminal(tmp_path, place, monkeypatch):
    monkeypatch.setattr(sweeps_grid, "LIVE_SECONDS", 0.0)
    two = grid(tmp_path, 1, 2)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    _, text = run_sweep(two, StubRuns(place, two, seconds=1.5), jobs=2, console=console)
    assert f"2/{DEMO.epochs}" in text
    assert "━" in text
    assert "0 done · 2 running · 0 failed · 0 left" in text
    assert text.rstrip().endswith("2 done · 0 running · 0 failed · 0 left")


def test_epochs_of_a_config_without_epochs(tmp_path):
    job = executors.Job("x", "x", RunConfig(), (), tmp_path)
    append_row(tmp_path / "metrics.jsonl", {"epoch": 1})
    assert epochs(job) == (1, None)


# — stopping —


def signal_when(condition, *numbers, pause=0.5):
    """Send signals to this process, the first when a condition holds."""

    def wait():
        wait_for(condition)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def gone(pid):
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_sweep_is_resumed(tmp_path, place, number):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    four = grid(tmp_path, 1, 2, 3, 4)
    stub = StubRuns(place, four, seed_2="hang", seed_3="hang")
    sender = signal_when(lambda: stub.seeds("started") == [1, 2, 3], number)
    result, text = run_sweep(four, stub, jobs=2)
    sender.join()
    assert result.interrupted
    assert result.failed == []
    assert [r.finished for r in result.records] == [True, False, False, False]
    assert stub.seeds("saved") == [2, 3]
    assert stub.seeds("interrupted twice") == []
    assert "stopping" in text
    assert "stopped  weight-norm lr 0.003 seed 2" in text
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers

    stub = StubRuns(place, four)
    result, _ = run_sweep(four, stub, jobs=2)
    assert not result.interrupted
    assert all(r.finished for r in result.records)


@pytest.mark.parametrize(
    ("signals", "grace_seconds"), [((signal.SIGINT, signal.SIGINT), 60), ((signal.SIGINT,), 0.5)]
)
def test_run_that_does_not_stop_is_killed(tmp_path, place, signals, grace_seconds):
    """After a second signal, or after the grace period."""
    two = grid(tmp_path, 1, 2)
    stub = StubRuns(place, two, seed_1="stubborn")
    sender = signal_when(lambda: stub.rows("started"), *signals)
    result, _ = run_sweep(two, stub, grace_seconds=grace_seconds)
    sender.join()
    assert result.interrupted
    (run,) = stub.rows("started")
    assert time.monotonic() - run["time"] < 50
    assert gone(run["pid"])


def test_run_that_finishes_after_a_signal_is_done(tmp_path, place):
    one = grid(tmp_path)
    stub = StubRuns(place, one, seed_1="finish after a signal")
    sender = signal_when(lambda: stub.rows("started"), signal.SIGINT)
    result, _ = run_sweep(one, stub)
    sender.join()
    assert not result.interrupted
    assert result.records[0].finished


def test_sweep_in_a_thread(tmp_path, place):
    one, results = grid(tmp_path), []
    stub = StubRuns(place, one)
    thread = threading.Thread(target=lambda: results.append(run_sweep(one, stub)[0]))
    thread.start()
    thread.join()
    assert results[0].records[0].finished


def test_error_in_the_sweep_kills_its_runs(tmp_path, place, monkeypatch):
    two = grid(tmp_path, 1, 2)
    stub = StubRuns(place, two, seed_1="hang", seed_2="hang")

    def broken(*_):
        wait_for(lambda: len(stub.rows("started")) == 2)
        raise BrokenPipeError("the screen is gone")

    monkeypatch.setattr(sweeps_grid.SweepProgress, "update", broken)
    with pytest.raises(BrokenPipeError):
        run_sweep(two, stub, jobs=2)
    wait_for(lambda: all(gone(row["pid"]) for row in stub.rows("started")))


DRIVER = """
import sys
from dataclasses import replace
from pathlib import Path
from weightnorm import Parameterization
from weightnorm.lab import classify
from weightnorm.lab.sweeps.grid import Grid, sweep

base = replace(classify.PRESETS["demo"], runs=Path(sys.argv[1]))
grid = Grid("classify", base, (Parameterization.WEIGHT_NORM,), (0.003,), (1, 2))
result = sweep(grid, jobs=2, command=[sys.executable, "-S", sys.argv[2]])
sys.exit(130 if result.interrupted else 1 if result.failed else 0)
"""


@pytest.fixture
def driven(tmp_path, place):
    """A sweep in a separate process, as from a terminal, with two runs that hang."""
    two = grid(tmp_path, 1, 2)
    stub = StubRuns(place, two, seed_1="hang", seed_2="hang")
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), str(stub.script)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: len(stub.rows("started")) == 2)
    yield process, stub
    process.kill()
    process.communicate()


def test_ctrl_c_interrupts_each_run_once(driven):
    """A terminal signals the whole foreground group; a second signal would cost a run its save."""
    process, stub = driven
    os.killpg(process.pid, signal.SIGINT)
    _, text = process.communicate(timeout=HANGS)
    assert process.returncode == 130
    assert stub.seeds("saved") == [1, 2]
    assert stub.seeds("interrupted twice") == []
    assert "0 done · 0 running · 0 failed · 2 left" in text


def test_killed_sweep_kills_its_runs(driven):
    process, stub = driven
    process.kill()
    wait_for(lambda: all(gone(row["pid"]) for row in stub.rows("started")))
    assert stub.rows("saved") == []


def test_run_receives_sigint_that_its_parent_ignores(tmp_path):
    """Ray blocks SIGINT; a shell ignores it in background jobs."""
    code = """
import signal, sys, time
from pathlib import Path
from weightnorm.lab.sweeps.executors import RunProcess

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
signal.signal(signal.SIGINT, signal.SIG_IGN)
log = Path(sys.argv[1])
wait = "import time; print('here', flush=True); time.sleep(60)"
process = RunProcess([sys.executable, "-c", wait], log, 1)
while "\\nhere" not in log.read_text():
    time.sleep(0.01)
process.interrupt()
print(process.failure)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "output.log")],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )
    assert done.stdout.startswith("killed by signal 2"), done.stderr
    assert done.stdout.endswith("KeyboardInterrupt\n")


# — a cluster that does not exist —


def test_missing_ray_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray is missing: pip install 'weightnorm\[ray\]'"):
        sweep(grid(tmp_path), cluster="auto")


@pytest.mark.parametrize("address", ["nonsense", "host:", ":6379", "host:port", "ray://host"])
def test_invalid_address_is_refused(address):
    with pytest.raises(ConfigError, match=f"cluster is {address}; expected auto or HOST:PORT"):
        executors.check_reachable(address)


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "[::1]:{}"])
def test_unreachable_address_is_refused(address, free_port):
    address = address.format(free_port)
    with pytest.raises(RunError, match="there is no Ray cluster at") as caught:
        executors.check_reachable(address)
    assert address in str(caught.value)
    assert "ray start --head" in str(caught.value)


@pytest.fixture
def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


# — the real command —


def test_real_runs_are_interrupted_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "cores", lambda: 1)
    short = {"epochs": 2, "limit": 200, "batch_size": 10, "device": "cpu"}
    two = grid(tmp_path, rates=(), ways=(STANDARD, WN), **short)
    first, second = two.plan()
    sender = signal_when(lambda: (first.folder / "sessions.jsonl").exists(), signal.SIGINT)
    console = Console(file=io.StringIO(), width=200)
    result = sweep(two, console=console, grace_seconds=HANGS)
    sender.join()
    assert result.interrupted
    assert result.failed == []
    assert (first.folder / "checkpoint.pt").exists()
    assert "to resume:" in first.log.read_text()
    assert not second.folder.exists()

    result = sweep(two, console=console)
    assert (result.failed, result.interrupted) == ([], False)
    for run in result.records:
        assert 0 <= run.result["test_error"] <= 1
        assert [row["epoch"] for row in run.metrics] == [1, 2]
        assert {session["threads"] for session in run.sessions} == {1}
    assert [len(run.sessions) for run in result.records] == [2, 1]
    assert [(c.learning_rate, c.n) for c in summarize(result.records)] == [(0.003, 1), (0.003, 1)]

    again = sweep(two, console=console)
    assert again.records == result.records  # no session more: nothing was started


def test_failure_of_a_real_run_is_reported(tmp_path):
    one = grid(tmp_path)
    (job,) = one.plan()
    job.folder.mkdir(parents=True)
    with (job.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = sweep(one, console=Console(file=io.StringIO()))
    ((label, reason),) = result.failed
    assert label == job.label
    assert reason.startswith("exit code 1\n")
    assert "another process is running in" in reason
