"""Sweeps: grids, and their execution with a stub in place of real runs."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from commands import HANGS, wait_for
from stub_runs import StubRuns
from weightnorm import Parameterization
from weightnorm.lab import classify, dqn, executors
from weightnorm.lab import sweep as sweeps
from weightnorm.lab.cli import main, parse_config
from weightnorm.lab.config import folder, scientific_fields
from weightnorm.lab.errors import ConfigError, RunError
from weightnorm.lab.files import lock_folder
from weightnorm.lab.records import RunRecord, write_json
from weightnorm.lab.sweep import Grid, SweepResult, flags, summary_table, sweep

WN, STANDARD = Parameterization.WEIGHT_NORM, Parameterization.STANDARD
DEMO = classify.PRESETS["demo"]


def grid(runs, *seeds, rates=(0.003,), ways=(WN,), **changes):
    return Grid("classify", replace(DEMO, out=runs, **changes), ways, rates, seeds or (1,))


def run_sweep(grid, stub, **options):
    console = options.pop("console", None) or Console(file=io.StringIO(), width=200)
    result = sweep(grid, console=console, command=stub.command, **options)
    return result, console.file.getvalue()


@pytest.fixture
def place(tmp_path):
    return tmp_path / "stub runs"


# — the grid —


def test_plan_has_every_combination_seed_by_seed(tmp_path):
    axes = {"game": ("pong", "breakout")}
    base = replace(dqn.PRESETS["demo"], out=tmp_path)
    plan = Grid("dqn", base, (STANDARD, WN), (0.001, 0.01), (1, 2), axes).plan()
    assert [job.label for job in plan] == [
        f"{game} {how} lr {rate} seed {seed}"
        for seed in (1, 2)
        for how in ("standard", "weight-norm")
        for game in ("pong", "breakout")
        for rate in (0.001, 0.01)
    ]
    assert len({job.folder for job in plan}) == 16
    (default,) = Grid("dqn", base, (WN,)).plan()
    assert default.config.learning_rate == base.default_rate
    for job in plan:
        assert job.folder == folder("dqn", job.config, dqn.PRESETS)
        assert job.label.startswith(job.words[job.words.index("--game") + 1])


def test_job_command(tmp_path):
    (job,) = grid(tmp_path, 7, rates=(0.01,), epochs=3).plan()
    assert list(job.words) == [
        *(sys.executable, "-m", "weightnorm", "run", "classify", "--preset", "demo"),
        *("--parameterization", "weight-norm", "--learning-rate", "0.01", "--seed", "7"),
        *("--out", str(tmp_path), "--epochs", "3"),
    ]


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("demo", {}),
        ("paper", {"parameterization": STANDARD, "learning_rate": 1e-05, "seed": 3}),
        ("cpu", {"learning_rate": 0.1 + 0.2, "compile": True, "device": "cpu", "limit": 20}),
        ("demo", {"out": Path("some where"), "data_dir": Path("x"), "checkpoint_seconds": 0.5}),
        ("cpu", {"width": 0.3, "noise": 0.0, "data": "cifar10", "precision": "bfloat16"}),
    ],
)
def test_flags_parse_to_the_same_config(preset, changes):
    start = classify.PRESETS[preset]
    config = replace(start, **{"learning_rate": 0.003, **changes})
    words = flags(config, start)
    assert parse_config(classify, words, "run") == config
    assert len(words) == 8 or changes  # preset and the grid's three are always given


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"learning_rates": (0.003, -1.0)}, "learning-rate is -1.0; expected a positive number"),
        ({"parameterizations": ()}, "parameterizations is empty; expected one or more"),
        ({"seeds": ()}, "seeds is empty"),
        ({"seeds": (1, 2, 1)}, "two runs of the grid are .*; give each value once"),
        ({"learning_rates": (0.003, 0.0030000001)}, "give each value once"),  # one folder for both
    ],
)
def test_invalid_grid_is_refused_before_any_run(tmp_path, wrong, message):
    with pytest.raises(ConfigError, match=message):
        sweep(replace(grid(tmp_path / "runs"), **wrong))
    assert not (tmp_path / "runs").exists()


# — execution —


def most_concurrent(stub):
    events = [(row["time"], 1) for row in stub.rows("started")]
    events += [(row["time"], -1) for row in stub.rows("ended")]
    here = most = 0
    for _, change in sorted(events):
        here += change
        most = max(most, here)
    return most


def test_number_of_concurrent_runs_and_their_threads(tmp_path, place, monkeypatch):
    monkeypatch.setattr(executors, "cores", lambda: 5)
    many = grid(tmp_path, *range(1, 5))
    stub = StubRuns(place, many, seconds=0.9)
    result, _ = run_sweep(many, stub, jobs=3)
    assert (result.failed, result.interrupted) == ({}, False)
    assert [r.result for r in result.records] == [{"test_error": s / 100} for s in range(1, 5)]
    assert most_concurrent(stub) == 3
    assert {tuple(row["threads"]) for row in stub.rows("started")} == {("1", "1")}
    assert executors.LocalExecutor(2).threads == 2


def test_finished_runs_are_not_repeated(tmp_path, place):
    some, all_ = grid(tmp_path, 1, 3), grid(tmp_path, 1, 2, 3)
    stub = StubRuns(place, all_)
    run_sweep(some, stub)
    result, text = run_sweep(all_, stub)
    assert stub.seeds("started") == [1, 2, 3]
    assert text.startswith("3 runs, 2 of them finished before")
    assert [r.result["test_error"] for r in result.records] == [0.01, 0.02, 0.03]
    run_sweep(all_, stub, cluster="127.0.0.1:1")  # nothing to do: no connection
    with pytest.raises(ConfigError, match="metric is test_eror; expected one of train_error"):
        run_sweep(grid(tmp_path, 1, 4), stub, metric="test_eror")
    assert stub.seeds("started") == [1, 2, 3]


def test_finished_run_of_other_settings_is_not_used(tmp_path, place):
    """As after a preset has changed: same folder, other settings."""
    one = grid(tmp_path)
    (job,) = one.plan()
    old = scientific_fields(replace(job.config, width=0.5))
    job.folder.mkdir(parents=True)
    write_json(
        job.folder / "config.json", {"experiment": "classify", "preset": "demo", "config": old}
    )
    write_json(job.folder / "result.json", {"test_error": 0.9})
    result, _ = run_sweep(one, StubRuns(place, one, seed_1="fail"))
    assert [*result.failed] == [job.label]
    assert not result.records[0].finished


def test_failed_and_diverged_runs_do_not_stop_the_others(tmp_path, place):
    all_ = grid(tmp_path, 1, 2, 3, 4, 5, 6)
    blocked = all_.plan()[-1].folder
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a folder should be")
    how = {"seed_1": "fail", "seed_2": "die", "seed_4": "silent", "seed_5": "diverge"}
    result, text = run_sweep(all_, StubRuns(place, all_, **how))
    assert [r.finished for r in result.records] == [False, False, True, False, True, False]
    assert [r.diverged is not None for r in result.records] == [False] * 4 + [True, False]
    assert not result.interrupted
    reasons = {label.removeprefix("weight-norm lr 0.003 "): x for label, x in result.failed.items()}
    tail = [*(f"line {i}" for i in range(5, 9)), "[red]out of luck[/]"]
    assert [line.strip() for line in reasons.pop("seed 1").splitlines()] == ["exit code 1", *tail]
    assert "File exists" in reasons.pop("seed 6")
    assert reasons == {
        "seed 2": "killed by signal 9 (Killed)\nhello from 2",
        "seed 4": "ended without a result\nhello from 4",
    }
    assert "failed   weight-norm lr 0.003 seed 1" in text
    assert "[red]out of luck[/]" in text
    line = "diverged weight-norm lr 0.003 seed 5  diverged at epoch 1, step 4: loss nan.\n"
    assert line in text
    assert "1 done · 1 diverged · 0 running · 4 failed · 0 left" in text
    # Failed runs are repeated, diverged ones are not; a failure shows only the last output.
    stub = StubRuns(place, all_, seed_1="die")
    again, _ = run_sweep(grid(tmp_path, 1, 5), stub)
    (reason,) = again.failed.values()
    assert "line" not in reason
    assert stub.seeds("started").count(5) == 1
    (job,) = grid(tmp_path, 1).plan()
    lines = job.log.read_text().splitlines()
    (first, _) = (line for line in lines if line.startswith("$ "))
    assert first.startswith(f"$ {sys.executable} -S")
    assert lines.count("hello from 1") == 2


# — progress —


def test_output_in_a_pipe(tmp_path, place):
    two = grid(tmp_path, 1, 2)
    _, text = run_sweep(two, StubRuns(place, two))
    name = "weight-norm lr 0.003 seed"
    assert text.splitlines() == [
        "2 runs, 0 of them finished before",
        f"started  {name} 1",
        f"done     {name} 1  test error 0.01",
        f"started  {name} 2",
        f"done     {name} 2  test error 0.02",
        "2 done · 0 running · 0 failed · 0 left",
    ]


def test_output_in_a_terminal(tmp_path, place, monkeypatch):
    monkeypatch.setattr(sweeps, "LIVE_SECONDS", 0.0)
    longest = grid(tmp_path, 1, 2, ways=(Parameterization.WEIGHT_NORM_MEAN_ONLY,))
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    _, text = run_sweep(longest, StubRuns(place, longest, seconds=1.5), jobs=2, console=console)
    bars = [line for line in re.split(r"[\n\r\x1b]", text) if f"2/{DEMO.epochs}" in line]
    assert bars
    assert all("weight-norm-mean-only lr 0.003 seed" in bar for bar in bars)
    assert max(map(len, bars)) <= 80
    assert "0 done · 2 running · 0 failed · 0 left" in text
    assert text.rstrip().endswith("2 done · 0 running · 0 failed · 0 left")


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


def test_stopped_sweep_is_resumed(tmp_path, place):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    five = grid(tmp_path, 1, 2, 3, 4)
    behaviours = {"seed_2": "hang", "seed_3": "finish after a signal"}
    stub = StubRuns(place, five, **behaviours)
    sender = signal_when(lambda: stub.seeds("started") == [1, 2, 3], signal.SIGTERM)
    result, text = run_sweep(five, stub, jobs=2)
    sender.join()
    assert (result.interrupted, result.failed) == (True, {})
    assert [r.finished for r in result.records] == [True, False, True, False]
    assert stub.seeds("saved") == [2]
    assert stub.seeds("interrupted twice") == []
    assert "stopping" in text
    assert "stopped  weight-norm lr 0.003 seed 2" in text
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers

    result, _ = run_sweep(five, StubRuns(place, five), jobs=2)
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


def test_sweep_in_a_thread(tmp_path, place):
    one, results = grid(tmp_path), []
    stub = StubRuns(place, one)
    thread = threading.Thread(target=lambda: results.append(run_sweep(one, stub)[0]))
    thread.start()
    thread.join()
    assert results[0].records[0].finished


DRIVER = """
import sys
from dataclasses import replace
from pathlib import Path
from weightnorm import Parameterization
from weightnorm.lab import classify
from weightnorm.lab.sweep import Grid, sweep

base = replace(classify.PRESETS["demo"], out=Path(sys.argv[1]))
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


# — the summary —


def record(how="weight-norm", rate=0.003, seed=1, **result):
    config = {"parameterization": how, "learning_rate": rate, "seed": seed}
    return RunRecord(Path("x"), "classify", "demo", config, result=result or None)


def table(records, **how):
    """The cells of the table, and the style of each row."""
    console = Console(file=io.StringIO(), width=100)
    rendered = summary_table(SweepResult(records, **how))
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


def test_further_axes_are_compared_separately():
    records = [
        record(rate=rate, score=score)
        for rate, score in ((0.001, 1.0), (0.01, 2.0), (0.001, 400.0), (0.01, 300.0))
    ]
    for one, game in zip(records, ("pong", "pong", "breakout", "breakout"), strict=True):
        one.config["game"] = game
    result = SweepResult(records, metric="score", highest=True, axes=("game",))
    assert result.comparison().best == {"pong weight-norm": 0.01, "breakout weight-norm": 0.001}


# — a cluster that does not exist —


def test_missing_ray_error_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["sweep", "classify", "--preset", "demo", "--out", str(tmp_path), "--cluster", "auto"]
    assert main(words) == 1
    assert "pip install 'weightnorm[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["nonsense", "ray://host", "127.0.0.1:{}", "[::1]:{}"])
def test_unreachable_address_is_refused(address):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        free_port = server.getsockname()[1]
    with pytest.raises(RunError, match=r"no Ray cluster at .*; expected auto or HOST:PORT"):
        executors.check_reachable(address.format(free_port))


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
    assert (result.interrupted, result.failed) == (True, {})
    assert (first.folder / "checkpoint.pt").exists()
    assert "to resume:" in first.log.read_text()
    assert not second.folder.exists()

    with lock_folder(second.folder):  # another process runs there
        ((label, reason),) = sweep(two, console=console).failed.items()
    assert label == second.label
    assert reason.startswith("exit code 1\n")
    assert "another process is running in" in reason

    result = sweep(two, console=console)
    assert (result.failed, result.interrupted) == ({}, False)
    for run in result.records:
        assert 0 <= run.result["test_error"] <= 1
        assert [row["epoch"] for row in run.metrics] == [1, 2]
        assert {session["threads"] for session in run.sessions} == {1}
    assert [len(run.sessions) for run in result.records] == [2, 1]
    assert sweep(two, console=console).records == result.records  # nothing was started
