"""Sweeps: the grid, its execution by processes that stand in for runs, and what came out."""

import fcntl
import io
import json
import math
import os
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

from commands import wait_for
from weightnorm import Parameterization
from weightnorm.lab.cli import main
from weightnorm.lab.errors import ConfigError, RunError
from weightnorm.lab.experiments import classify, dqn
from weightnorm.lab.runs.config import RunConfig, folder, what
from weightnorm.lab.runs.records import RunRecord, append_row, write_json
from weightnorm.lab.sweeps import executors
from weightnorm.lab.sweeps import grid as sweeps_grid
from weightnorm.lab.sweeps.grid import Grid, flags
from weightnorm.lab.sweeps.summary import Cell, SweepResult, render, summarize

WN, STANDARD = Parameterization.WEIGHT_NORM, Parameterization.STANDARD
DEMO = classify.PRESETS["demo"]


def grid(runs, *seeds, rates=(0.003,), ways=(WN,), **changes):
    return Grid("classify", replace(DEMO, runs=runs, **changes), ways, rates, seeds or (1,))


def after(words, flag):
    return words[words.index(flag) + 1]


# — the grid —


def test_a_grid_is_every_combination_seed_by_seed(tmp_path):
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
def test_without_learning_rates_the_presets_are_taken(tmp_path, preset):
    plan = Grid("classify", replace(classify.PRESETS[preset], runs=tmp_path)).plan()
    assert {job.config.parameterization: job.config.learning_rate for job in plan} == (
        classify.LEARNING_RATES[preset]
    )
    assert [job.config.seed for job in plan] == [1] * 5


def test_a_job_is_the_command_a_person_would_type(tmp_path):
    (job,) = grid(tmp_path, 7, rates=(0.01,), epochs=3).plan()
    assert list(job.words) == [
        *(sys.executable, "-m", "weightnorm", "run", "classify", "--preset", "demo"),
        *("--parameterization", "weight-norm", "--learning-rate", "0.01", "--seed", "7"),
        *("--runs", str(tmp_path), "--epochs", "3"),
    ]
    (other,) = grid(tmp_path).plan(["nice", "run"])
    assert other.words[:3] == ("nice", "run", "classify")


def test_flags_of_every_kind_of_value():
    @dataclass(frozen=True)
    class Config(RunConfig):
        limit: int | None = 5
        fast: bool = True

    changed = replace(Config(), limit=None, fast=False, compile=True, data_dir=Path("/d"))
    assert flags(changed, Config())[8:] == [
        *("--data-dir", "/d", "--compile", "--limit", "None", "--no-fast")
    ]
    assert len(flags(Config(), Config())) == 8  # preset and the grid's three are always said


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parameterization": STANDARD},  # whose learning rate is not the preset's
        {"learning_rate": 1e-05, "seed": -3},
        {"learning_rate": 0.1 + 0.2},
        {"compile": True, "device": "cpu", "data_dir": Path("some where"), "limit": 20},
        {"runs": Path("elsewhere"), "checkpoint_seconds": 0.5, "precision": "bfloat16"},
        {"width": 0.3, "noise": 0.0, "dropout": 0.25, "batch_size": 10, "data": "cifar10"},
    ],
)
@pytest.mark.parametrize("preset", classify.PRESETS)
def test_the_command_line_reads_the_flags_as_the_same_config(preset, changes, monkeypatch):
    seen = []

    def run(config, console):
        """Run."""
        seen.append(config)
        return RunRecord(Path("x"), "classify", preset, {})

    monkeypatch.setattr(classify, "run", run)
    start = classify.PRESETS[preset]
    config = replace(start, **changes)
    assert main.main(["run", "classify", *flags(config, start)]) == 0
    assert seen == [config]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rates": (0.003, -1.0)}, "learning-rate is -1.0; expected a positive number"),
        ({"ways": ()}, "parameterizations is empty; expected one or more"),
        ({"rates": (0.003, 0.003)}, "name each value once"),
        ({"rates": (0.003, 0.0030000001)}, "name each value once"),  # one folder for both
    ],
)
def test_an_impossible_grid_is_refused_before_any_work(tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        grid.sweep(grid(tmp_path / "runs", **wrong))
    assert not (tmp_path / "runs").exists()


def test_seeds_and_jobs_are_checked(tmp_path):
    with pytest.raises(ConfigError, match="seeds is empty"):
        replace(grid(tmp_path), seeds=()).plan()
    with pytest.raises(ConfigError, match="two runs of the grid"):
        grid(tmp_path, 1, 2, 1).plan()
    with pytest.raises(ConfigError, match="jobs is 0; expected 1 or more"):
        grid.sweep(grid(tmp_path), jobs=0)


def test_anywhere_makes_paths_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moved = grid(Path("runs"), data_dir=Path("data")).anywhere().base
    assert (moved.runs, moved.data_dir) == (tmp_path / "runs", tmp_path / "data")
    assert grid(Path("runs")).anywhere().base.data_dir is None


# — what came out —


def record(how="weight-norm", rate=0.003, seed=1, **result):
    config = {"parameterization": how, "learning_rate": rate, "seed": seed}
    return RunRecord(Path("x"), "classify", "demo", config, result=result or None)


def test_a_cell_is_mean_and_sample_deviation_over_seeds():
    values = [0.1, 0.2, 0.6]
    (cell,) = summarize([record(seed=i, test_error=v) for i, v in enumerate(values)])
    assert (cell.parameterization, cell.learning_rate, cell.n) == ("weight-norm", 0.003, 3)
    assert cell.mean == pytest.approx(0.3)
    assert cell.std == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2))
    assert cell.best
    assert (cell.diverged, cell.unfinished) == (0, 0)


def test_each_parameterization_has_its_best_learning_rate():
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


def test_the_metric_decides():
    records = [
        record(rate=0.001, test_error=0.1, test_loss=9),
        record(rate=0.01, test_error=0.2, test_loss=1),
    ]
    assert [c.best for c in summarize(records)] == [True, False]
    assert [c.best for c in summarize(records, "test_loss")] == [False, True]


def test_the_highest_may_be_the_best():
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


def test_what_a_grid_ranges_over_besides_is_compared_apart(tmp_path):
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
        RunRecord(job.folder, "dqn", "demo", what(job.config), result={"score": score})
        for job, score in zip(plan, (1.0, 2.0, 400.0, 300.0), strict=True)
    ]
    cells = summarize(records, "score", highest=True, axes=tuple(axes))
    assert [(c.parameterization, c.learning_rate) for c in cells if c.best] == [
        ("pong weight-norm", 0.01),
        ("breakout weight-norm", 0.001),
    ]


def best(records):
    return [cell.learning_rate for cell in summarize(records) if cell.best]


def test_of_equal_means_more_runs_win_then_the_smaller_rate():
    tie = [record(rate=0.01, test_error=0.25), record(rate=0.001, test_error=0.25)]
    assert best(tie) == [0.001]
    assert best([*tie, record(rate=0.01, seed=2, test_error=0.25)]) == [0.01]


def test_unfinished_runs_count_for_nothing_but_are_shown():
    cells = summarize(
        [record(rate=0.001), record(rate=0.01, test_error=0.5), record(rate=0.01, seed=2)]
    )
    assert cells[0] == Cell("weight-norm", 0.001, 0, None, None, unfinished=1)
    assert cells[1] == Cell("weight-norm", 0.01, 1, 0.5, None, unfinished=1, best=True)
    assert best([record(), record(rate=0.01)]) == []


def test_a_rate_at_which_a_run_diverged_is_not_best_while_another_holds():
    shaky = [record(rate=0.01, test_error=0.1), record(rate=0.01, seed=2, test_error=None)]
    steady = record(rate=0.001, test_error=0.4)
    assert best([*shaky, steady]) == [0.001]
    assert best(shaky) == [0.01]
    assert best([record(test_error=None)]) == []
    assert summarize(shaky)[0].diverged == 1


def test_a_metric_that_results_do_not_have_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"one of test_error, test_loss$"):
        summarize([record(test_error=1, test_loss=2, note="text")], "loss")
    with pytest.raises(ConfigError, match="metric is note"):
        summarize([record(test_error=1, note="text")], "note")
    assert summarize([], "loss") == []


def test_the_table_shows_every_cell_with_its_n():
    records = [
        record("standard", 0.001, test_error=0.25),
        record("standard", 0.01, test_error=None),
        record("weight-norm", 0.001, seed=1, test_error=0.1),
        record("weight-norm", 0.001, seed=2, test_error=0.2),
        record("weight-norm", 0.01),
    ]
    console = Console(file=io.StringIO(), width=100)
    console.print(render(SweepResult(records)))
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in console.file.getvalue().splitlines()
        if "│" in line
    ]
    assert rows == [
        ["standard", "0.001", "0.25 ± –", "1", "best"],
        ["", "0.01", "–", "0", "1 diverged"],
        ["weight-norm", "0.001", "0.15 ± 0.071", "2", "best"],
        ["", "0.01", "–", "0", "1 unfinished"],
    ]
    assert "test error" in console.file.getvalue()


# — processes: a stand-in for runs —

STAND_IN = """
import json, os, shlex, signal, sys, time
from pathlib import Path

jobs = json.loads(Path(__file__).with_suffix(".json").read_text())
job = jobs[shlex.join(sys.argv[1:])]
folder, seed, manner = Path(job["folder"]), job["config"]["seed"], job["manner"]

def note(name, **what):
    row = {"seed": seed, "pid": os.getpid(), "time": time.monotonic(), **what}
    with Path(__file__).with_name(name).open("a") as file:
        file.write(json.dumps(row) + "\\n")

signals = []
def on_sigint(number, frame):
    signals.append(number)
    if len(signals) > 1:
        note("told twice")

signal.signal(signal.SIGINT, on_sigint)
note("started", threads=[os.environ.get(f"{x}_NUM_THREADS") for x in ("OMP", "MKL")],
     gpu=os.environ.get("CUDA_VISIBLE_DEVICES"), parent=os.getppid())
print("hello from", seed, flush=True)
if manner == "fail":
    print("\\n".join(f"line {i}" for i in range(9)), "\\n[red]out of luck[/]", file=sys.stderr)
    sys.exit(1)
if manner == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if manner == "silent":
    sys.exit(0)
lost = folder / "lost"
if manner == "lose worker" or (manner == "lose worker once" and not lost.exists()):
    lost.touch()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
if manner == "hang":
    while not signals:
        time.sleep(0.01)
    time.sleep(0.3)  # another signal now would be one too many
    note("saved")
    sys.exit(130)
if manner == "stubborn":
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


class StandIn:
    """A command that behaves like runs of a grid, each in the manner its seed is given."""

    def __init__(self, place, grid, seconds=0.0, **manners):
        place.mkdir(exist_ok=True)
        self.place, self.script = place, place / "stand_in.py"
        self.command = [sys.executable, "-S", str(self.script)]
        self.script.write_text(STAND_IN)
        jobs = {
            " ".join(job.words): {
                "folder": str(job.folder),
                "config": json.loads(json.dumps(what(job.config), default=str)),
                "manner": manners.get(f"seed_{job.config.seed}", "finish"),
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


def run_sweep(grid, stand_in, **options):
    console = options.pop("console", None) or Console(file=io.StringIO(), width=200)
    result = grid.sweep(grid, console=console, command=stand_in.command, **options)
    return result, console.file.getvalue()


@pytest.fixture
def place(tmp_path):
    return tmp_path / "stand in"


def most_at_a_time(stand_in):
    events = [(row["time"], 1) for row in stand_in.rows("started")]
    events += [(row["time"], -1) for row in stand_in.rows("ended")]
    here = most = 0
    for _, change in sorted(events):
        here += change
        most = max(most, here)
    return most


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_so_many_runs_at_a_time_and_no_more(tmp_path, place, jobs, monkeypatch):
    monkeypatch.setattr(executors, "cores", lambda: 5)
    many = grid(tmp_path, *range(1, 7))
    stand_in = StandIn(place, many, seconds=0.3 * jobs)
    result, _ = run_sweep(many, stand_in, jobs=jobs)
    assert (result.failed, result.interrupted) == ([], False)
    assert [r.result for r in result.records] == [{"test_error": s / 100} for s in range(1, 7)]
    assert most_at_a_time(stand_in) == jobs
    share = {1: "5", 2: "2", 3: "1"}[jobs]
    assert {tuple(row["threads"]) for row in stand_in.rows("started")} == {(share, share)}


def test_more_jobs_than_cores_have_one_thread_each(monkeypatch):
    monkeypatch.setattr(executors, "cores", lambda: 2)
    assert executors.Local(8).threads == 1
    monkeypatch.undo()
    assert executors.Local(1).threads == len(os.sched_getaffinity(0))


def test_finished_runs_are_not_run_again(tmp_path, place):
    some, all_ = grid(tmp_path, 1, 3), grid(tmp_path, 1, 2, 3)
    stand_in = StandIn(place, all_)
    run_sweep(some, stand_in)
    assert stand_in.seeds("started") == [1, 3]
    result, text = run_sweep(all_, stand_in)
    assert stand_in.seeds("started") == [1, 2, 3]
    assert "3 runs, 2 of them finished before" in text
    assert [r.result["test_error"] for r in result.records] == [0.01, 0.02, 0.03]
    _, text = run_sweep(all_, stand_in, cluster="127.0.0.1:1")  # nothing to do: nobody is called
    assert stand_in.seeds("started") == [1, 2, 3]


def test_a_finished_run_of_other_settings_is_not_taken_for_this_one(tmp_path, place):
    """As after a preset has changed: the folder's name is the same, what is in it is not."""
    one = grid(tmp_path)
    (job,) = one.plan()
    old = json.loads(json.dumps(what(replace(job.config, width=0.5)), default=str))
    job.folder.mkdir(parents=True)
    head = {"experiment": "classify", "preset": "demo", "config": old}
    write_json(job.folder / "config.json", head)
    write_json(job.folder / "result.json", {"test_error": 0.9})
    result, _ = run_sweep(one, StandIn(place, one, seed_1="fail"))
    assert [label for label, _ in result.failed] == [job.label]
    assert not result.records[0].finished


def test_a_failing_run_is_reported_and_does_not_stop_the_others(tmp_path, place):
    five = grid(tmp_path, 1, 2, 3, 4, 5)
    stand_in = StandIn(place, five, seed_1="fail", seed_2="die", seed_4="silent")
    result, text = run_sweep(five, stand_in)
    assert [r.finished for r in result.records] == [False, False, True, False, True]
    assert not result.interrupted
    reasons = {label.removeprefix("weight-norm lr 0.003 "): why for label, why in result.failed}
    assert list(reasons) == ["seed 1", "seed 2", "seed 4"]
    tail = [*(f"line {i}" for i in range(5, 9)), "[red]out of luck[/]"]
    assert [line.strip() for line in reasons["seed 1"].splitlines()] == ["exit code 1", *tail]
    assert reasons["seed 2"] == "killed by signal 9 (Killed)\nhello from 2"
    assert reasons["seed 4"] == "ended without a result\nhello from 4"
    for line in (
        "failed  weight-norm lr 0.003 seed 1",
        "[red]out of luck[/]",
        "2 done · 0 running",
    ):
        assert line in text
    (cell,) = summarize(result.records)
    assert (cell.n, cell.unfinished) == (2, 3)


def test_the_log_keeps_every_start_but_a_reason_only_the_last(tmp_path, place):
    one = grid(tmp_path)
    (job,) = one.plan()
    run_sweep(one, StandIn(place, one, seed_1="fail"))
    stand_in = StandIn(place, one, seed_1="die")
    result, _ = run_sweep(one, stand_in)
    assert "line" not in result.failed[0][1]
    lines = job.log.read_text().splitlines()
    starts = [line for line in lines if line.startswith("$ ")]
    assert len(starts) == 2
    assert starts[0].startswith(f"$ {sys.executable} -S '{stand_in.script}' classify --preset demo")
    assert lines.count("hello from 1") == 2


def test_what_cannot_be_started_is_a_failure(tmp_path, place):
    two = grid(tmp_path / "runs", 1, 2)
    blocked, _ = two.plan()
    blocked.folder.parent.mkdir(parents=True)
    blocked.folder.write_text("a file where a folder should be")
    result, _ = run_sweep(two, StandIn(place, two))
    assert [label for label, _ in result.failed] == [blocked.label]
    assert "File exists" in result.failed[0][1]
    assert result.records[1].finished
    result = grid.sweep(
        grid(tmp_path / "other"), console=Console(file=io.StringIO()), command=["/no/such/program"]
    )
    assert "/no/such/program" in result.failed[0][1] or "No such file" in result.failed[0][1]


def test_a_metric_nobody_has_is_refused_before_more_is_run(tmp_path, place):
    two = grid(tmp_path, 1, 2)
    stand_in = StandIn(place, two)
    run_sweep(grid(tmp_path, 1), stand_in)
    with pytest.raises(ConfigError, match="metric is test_eror; expected one of test_error"):
        run_sweep(two, stand_in, metric="test_eror")
    assert stand_in.seeds("started") == [1]


# — what is seen —


def test_a_pipe_gets_a_line_for_each_event_and_now_and_then_one(tmp_path, place, monkeypatch):
    monkeypatch.setattr(sweeps_grid, "LINE_SECONDS", 0.0)
    two = grid(tmp_path, 1, 2)
    _, text = run_sweep(two, StandIn(place, two, seconds=1.5))
    lines = text.splitlines()
    name = "weight-norm lr 0.003 seed"
    events = [line for line in lines if "done ·" not in line]
    assert events == [
        "2 runs, 0 of them finished before",
        f"started {name} 1",
        f"done    {name} 1  test error 0.01",
        f"started {name} 2",
        f"done    {name} 2  test error 0.02",
    ]
    assert lines[-1] == "2 done · 0 running · 0 failed · 0 left"
    assert f"0 done · 1 running · 0 failed · 1 left, {name} 1 at epoch 2" in lines
    assert f"1 done · 1 running · 0 failed · 0 left, {name} 2 at epoch 1" in lines
    assert "\x1b" not in text


def test_a_terminal_gets_live_bars(tmp_path, place, monkeypatch):
    monkeypatch.setattr(sweeps_grid, "LIVE_SECONDS", 0.0)
    two = grid(tmp_path, 1, 2)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    _, text = run_sweep(two, StandIn(place, two, seconds=1.5), jobs=2, console=console)
    assert f"epoch 2/{DEMO.epochs}" in text
    assert "━" in text
    assert "0 done · 2 running · 0 failed · 0 left" in text
    assert text.rstrip().endswith("2 done · 0 running · 0 failed · 0 left")


def test_epochs_of_a_config_that_has_none(tmp_path):
    job = executors.Job("x", "x", RunConfig(), (), tmp_path)
    append_row(tmp_path / "metrics.jsonl", {"epoch": 1})
    assert grid.epochs(job) == (1, None)


# — stopping —


def signal_when(condition, *numbers, pause=0.5):
    """Send this very process signals, the first when a condition holds."""

    def wait():
        wait_for(condition, 30)
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
def test_stopping_lets_runs_save_and_the_same_sweep_goes_on(tmp_path, place, number):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    four = grid(tmp_path, 1, 2, 3, 4)
    stand_in = StandIn(place, four, seed_2="hang", seed_3="hang")
    sender = signal_when(lambda: stand_in.seeds("started") == [1, 2, 3], number)
    result, text = run_sweep(four, stand_in, jobs=2)
    sender.join()
    assert result.interrupted
    assert result.failed == []
    assert [r.finished for r in result.records] == [True, False, False, False]
    assert stand_in.seeds("saved") == [2, 3]
    assert stand_in.seeds("told twice") == []
    assert "stopping" in text
    assert "stopped weight-norm lr 0.003 seed 2" in text
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers

    stand_in = StandIn(place, four)
    result, _ = run_sweep(four, stand_in, jobs=2)
    assert not result.interrupted
    assert all(r.finished for r in result.records)


@pytest.mark.parametrize(
    ("signals", "patience"), [((signal.SIGINT, signal.SIGINT), 60), ((signal.SIGINT,), 0.5)]
)
def test_a_run_that_does_not_stop_is_killed(tmp_path, place, signals, patience):
    """When asked again, or when patience is over."""
    two = grid(tmp_path, 1, 2)
    stand_in = StandIn(place, two, seed_1="stubborn")
    sender = signal_when(lambda: stand_in.rows("started"), *signals)
    began = time.monotonic()
    result, _ = run_sweep(two, stand_in, patience=patience)
    sender.join()
    assert time.monotonic() - began < 20
    assert result.interrupted
    (run,) = stand_in.rows("started")
    assert gone(run["pid"])


def test_a_run_that_finishes_although_asked_to_stop_is_done(tmp_path, place):
    one = grid(tmp_path)
    stand_in = StandIn(place, one, seconds=1)
    sender = signal_when(lambda: stand_in.rows("started"), signal.SIGINT)
    result, _ = run_sweep(one, stand_in)
    sender.join()
    assert not result.interrupted
    assert result.records[0].finished


def test_a_sweep_in_a_thread_runs_without_signals(tmp_path, place):
    one, results = grid(tmp_path), []
    stand_in = StandIn(place, one)
    thread = threading.Thread(target=lambda: results.append(run_sweep(one, stand_in)[0]))
    thread.start()
    thread.join()
    assert results[0].records[0].finished


def test_an_error_in_the_sweep_itself_leaves_no_runs_behind(tmp_path, place, monkeypatch):
    two = grid(tmp_path, 1, 2)
    stand_in = StandIn(place, two, seed_1="hang", seed_2="hang")

    def broken(*_):
        wait_for(lambda: len(stand_in.rows("started")) == 2, 30)
        raise BrokenPipeError("the screen is gone")

    monkeypatch.setattr(sweeps_grid.Board, "show", broken)
    with pytest.raises(BrokenPipeError):
        run_sweep(two, stand_in, jobs=2)
    wait_for(lambda: all(gone(row["pid"]) for row in stand_in.rows("started")), 10)


DRIVER = """
import sys
from dataclasses import replace
from pathlib import Path
from weightnorm import Parameterization
from weightnorm.lab.experiments import classify
from weightnorm.lab.sweeps.grid import Grid, sweep

base = replace(classify.PRESETS["demo"], runs=Path(sys.argv[1]))
grid = Grid("classify", base, (Parameterization.WEIGHT_NORM,), (0.003,), (1, 2))
result = sweep(grid, jobs=2, command=[sys.executable, "-S", sys.argv[2]])
sys.exit(130 if result.interrupted else 1 if result.failed else 0)
"""


@pytest.fixture
def driven(tmp_path, place):
    """A sweep in a process of its own, as from a terminal, with two runs that hang."""
    two = grid(tmp_path, 1, 2)
    stand_in = StandIn(place, two, seed_1="hang", seed_2="hang")
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), str(stand_in.script)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: len(stand_in.rows("started")) == 2, 60)
    yield process, stand_in
    process.kill()
    process.communicate()


def test_ctrl_c_in_a_terminal_reaches_each_run_once(driven):
    """A terminal signals the whole foreground group; a second signal would cost a run its save."""
    process, stand_in = driven
    os.killpg(process.pid, signal.SIGINT)
    _, text = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stand_in.seeds("saved") == [1, 2]
    assert stand_in.seeds("told twice") == []
    assert "0 done · 0 running · 0 failed · 2 left" in text


def test_runs_do_not_outlive_a_killed_sweep(driven):
    process, stand_in = driven
    process.kill()
    wait_for(lambda: all(gone(row["pid"]) for row in stand_in.rows("started")), 10)
    assert stand_in.rows("saved") == []


def test_a_run_hears_ctrl_c_though_its_parent_does_not(tmp_path):
    """As under Ray, which blocks SIGINT, or in a shell's background, which ignores it."""
    code = """
import signal, sys, time
from pathlib import Path
from weightnorm.lab.sweeps.executors import Process

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
signal.signal(signal.SIGINT, signal.SIG_IGN)
log = Path(sys.argv[1])
process = Process([sys.executable, "-c", "import time; print('here', flush=True); time.sleep(60)"],
                  log, 1)
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
        timeout=30,
    )
    assert done.stdout.startswith("killed by signal 2"), done.stderr
    assert done.stdout.endswith("KeyboardInterrupt\n")


# — a cluster that is not there —


def test_without_ray_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray is missing: pip install 'weightnorm\[ray\]'"):
        grid.sweep(grid(tmp_path), cluster="auto")


@pytest.mark.parametrize("address", ["nonsense", "host:", ":6379", "host:port", "ray://host"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match=f"cluster is {address}; expected auto or HOST:PORT"):
        executors.check_reachable(address)


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "[::1]:{}"])
def test_an_address_where_nobody_listens_is_refused_at_once(address, free_port):
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


def test_real_runs_are_interrupted_and_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "cores", lambda: 1)
    short = {"epochs": 2, "limit": 200, "batch_size": 10, "device": "cpu"}
    two = grid(tmp_path, rates=(), ways=(STANDARD, WN), **short)
    first, second = two.plan()
    sender = signal_when(lambda: (first.folder / "sessions.jsonl").exists(), signal.SIGINT)
    console = Console(file=io.StringIO(), width=200)
    result = grid.sweep(two, console=console)
    sender.join()
    assert result.interrupted
    assert result.failed == []
    assert (first.folder / "checkpoint.pt").exists()
    assert "to resume:" in first.log.read_text()
    assert not second.folder.exists()

    result = grid.sweep(two, console=console)
    assert (result.failed, result.interrupted) == ([], False)
    for run in result.records:
        assert 0 <= run.result["test_error"] <= 1
        assert [row["epoch"] for row in run.metrics] == [1, 2]
        assert {session["threads"] for session in run.sessions} == {1}
    assert [len(run.sessions) for run in result.records] == [2, 1]
    assert [(c.learning_rate, c.n) for c in summarize(result.records)] == [(0.003, 1), (0.003, 1)]

    again = grid.sweep(two, console=console)
    assert again.records == result.records  # no session more: nothing was started


def test_a_real_run_that_fails_says_why(tmp_path):
    one = grid(tmp_path)
    (job,) = one.plan()
    job.folder.mkdir(parents=True)
    with (job.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = grid.sweep(one, console=Console(file=io.StringIO()))
    ((label, reason),) = result.failed
    assert label == job.label
    assert reason.startswith("exit code 1\n")
    assert "another process is running in" in reason
