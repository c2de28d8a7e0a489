"""Runs: killed, interrupted, damaged, diverged, on several ranks.

What depends on processes and signals goes through the real command line; the rest calls the
experiment in this process, which is much faster.
"""

import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commands import (
    HANGS,
    outcome,
    run_folder,
    same,
    spread,
    started,
    wait_for,
    weightnorm,
)
from weightnorm.init_report import InitReport, LayerInit
from weightnorm.lab import classify
from weightnorm.lab.cli import main
from weightnorm.lab.environment import Ranks
from weightnorm.lab.errors import (
    ConfigError,
    Diverged,
    Interrupted,
    RunError,
)
from weightnorm.lab.files import load_state, save_state
from weightnorm.lab.records import load_record
from weightnorm.lab.run import Run

TINY = ("run", "classify", "--preset", "demo", "--epochs", 4, "--limit", 300, "--batch-size", 20)
DEMO = classify.PRESETS["demo"]


def tiny(runs, *more):
    return (*TINY, "--out", runs, *more)


def config(runs, **changes):
    """The same run as `tiny`, but shorter."""
    return replace(DEMO, out=runs, **{"epochs": 2, "limit": 100, "batch_size": 20, **changes})


def run(runs, **changes):
    """Run in this process; returns the record and what was printed."""
    console = Console(file=io.StringIO(), width=200)
    return classify.run(config(runs, **changes), console), console.file.getvalue()


@contextmanager
def bare(runs, **changes):
    """A run without an experiment."""
    console = Console(file=io.StringIO(), width=200)
    with Run("classify", config(runs, **changes), classify.PRESETS, console) as this:
        this.restore()
        yield this


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """An undisturbed run of the command line in a narrow pipe: its folder and its lines."""
    runs = tmp_path_factory.mktemp("command")
    code, out, err = weightnorm(*tiny(runs), COLUMNS="80")
    assert code == 0, err
    assert "test error" in out
    assert "\x1b" not in out + err
    return runs, err.splitlines()


@pytest.fixture(scope="module")
def command_reference(command):
    return command[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An undisturbed run in this process."""
    runs = tmp_path_factory.mktemp("reference")
    run(runs)
    return runs


# — the record —


def test_record_of_a_run(command_reference):
    folder = run_folder(command_reference)
    assert folder.relative_to(command_reference).parts[0] == "classify"
    record = load_record(folder)
    assert [row["epoch"] for row in record.metrics] == [1, 2, 3, 4]
    assert record.config["limit"] == 300
    assert record.result["test_error"] == record.metrics[-1]["test_error"]
    assert set(record.result) == {*classify.RESULTS, "seconds"}
    (session,) = record.sessions
    assert {"commit", "torch", "python", "device", "threads", "machine"} <= set(session)
    assert all(row["seconds"] > 0 for row in record.metrics)
    assert {"flush_denormal", "keeps_freed_memory"} <= set(session)
    events = EventAccumulator(str(folder / "events")).Reload()
    assert [event.step for event in events.Scalars("test_error")] == [1, 2, 3, 4]


def test_finished_run_is_not_repeated_and_keeps_one_checkpoint(reference):
    folder = run_folder(reference)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != "lock"}
    record, text = run(reference)
    assert "had finished before" in text
    assert 0 <= record.result["test_error"] <= 1
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != "lock"} == before
    assert [p.name for p in folder.glob("*.pt")] == ["checkpoint.pt"]


def test_tensor_metrics_are_recorded_as_numbers(tmp_path):
    with bare(tmp_path) as this:
        for _ in this.epochs(1):
            this.log(a=torch.tensor(0.5), b=np.float32(0.25), c=torch.ones(1, 1), d=3)
        record = this.finish({"a": torch.tensor(2.0), "b": np.int64(3)})
    (row,) = record.metrics
    assert [row[name] for name in "abcd"] == [0.5, 0.25, 1.0, 3]
    assert (record.result["a"], record.result["b"]) == (2.0, 3.0)


# — killed and interrupted —


def test_killed_run_resumes_bit_exactly(tmp_path, command_reference):
    """Killed at random moments, with a checkpoint at each step or at each epoch."""
    chance = random.Random(0)
    killed = 0
    for seconds in (0, 60, 0):
        process = started(*tiny(tmp_path, "--checkpoint-seconds", seconds))
        try:
            wait_for(lambda p=process: p.poll() is not None or [*tmp_path.rglob("sessions.jsonl")])
            time.sleep(chance.uniform(0, 0.5))
            process.kill()
        finally:
            process.communicate()
        killed += process.returncode != 0
    assert killed
    assert weightnorm(*tiny(tmp_path))[0] == 0
    assert same(outcome(tmp_path), outcome(command_reference))


def test_interrupted_run_saves_and_prints_the_command(tmp_path, command_reference):
    process = started(*tiny(tmp_path))
    wait_for(lambda: list(tmp_path.rglob("checkpoint.pt")))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130, err
    assert "everything is saved" in err
    words = shlex.split(re.search(r"to resume:\s+weightnorm (.*)", err).group(1))
    assert weightnorm(*words)[0] == 0
    assert same(outcome(tmp_path), outcome(command_reference))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run interrupted in one of its 50 epochs, with two generations of checkpoints."""
    runs = tmp_path_factory.mktemp("interrupted")

    def interrupt():
        wait_for(lambda: [p for p in runs.rglob("metrics.jsonl") if p.stat().st_size])
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted):
        run(runs, checkpoint_seconds=0, epochs=50)
    thread.join()
    place = run_folder(runs)
    assert load_state(place / "checkpoint.pt")["epoch"] < 50
    assert (place / "checkpoint-previous.pt").exists()
    return runs


@pytest.fixture
def stopped(tmp_path, interrupted):
    """A copy of the interrupted run."""
    return shutil.copytree(interrupted, tmp_path / "runs")


@pytest.fixture(scope="module")
def long_reference(tmp_path_factory):
    runs = tmp_path_factory.mktemp("long")
    run(runs, epochs=50)
    return runs


# — damaged folders —


def damaged(content):
    half = bytearray(content)
    half[len(half) // 2] ^= 1
    return {"cut": content[: len(content) // 2], "flipped": bytes(half)}


@pytest.mark.parametrize("how", ["cut", "flipped"])
def test_damaged_folder_resumes_from_what_is_intact(stopped, long_reference, how):
    """A damaged checkpoint, metrics, sessions and config, and files of a killed writer."""
    place = run_folder(stopped)
    for name in ("checkpoint.pt", "metrics.jsonl", "sessions.jsonl", "config.json"):
        path = place / name
        path.write_bytes(damaged(path.read_bytes())[how])
    if how == "flipped":  # in an intact JSON file it may be another setting, which is refused
        (place / "config.json").unlink()
    (place / ".checkpoint.pt.0123.tmp").write_bytes(b"half")
    run(stopped, epochs=50)
    assert same(outcome(stopped), outcome(long_reference))
    assert not list(place.glob(".*"))
    assert not (place / "checkpoint-previous.pt").exists()


def test_what_cannot_be_resumed_is_refused(stopped):
    """A checkpoint of another version, of other settings, and damaged ones."""
    place = run_folder(stopped)
    state = load_state(place / "checkpoint.pt")
    optimizer = state["states"].pop("optimizer")
    save_state(place / "checkpoint.pt", state)
    with pytest.raises(RunError, match=r"was written by another version .*'optimizer'"):
        run(stopped, epochs=50)
    state["states"]["optimizer"], state["config"]["noise"] = optimizer, 0.5
    save_state(place / "checkpoint.pt", state)
    (place / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds a run with other settings \(noise\)"):
        run(stopped, epochs=50)
    for path in place.glob("checkpoint*.pt"):
        path.write_bytes(b"not a checkpoint")
    with pytest.raises(RunError, match=r"is damaged or was written by .*digest.*delete the folder"):
        run(stopped, epochs=50)


@pytest.mark.parametrize(("name", "problem"), [("result", "damaged"), ("config", "missing")])
def test_damaged_record_of_a_finished_run_is_refused(tmp_path, reference, name, problem):
    shutil.copytree(reference, tmp_path, dirs_exist_ok=True)
    path = run_folder(tmp_path) / f"{name}.json"
    path.unlink() if problem == "missing" else path.write_bytes(b"{")
    with pytest.raises(RunError, match=rf"{name}\.json is {problem}.*; delete .* to run it again"):
        run(tmp_path)


def test_finished_run_of_other_settings_is_refused_unless_they_are_new(tmp_path, reference):
    """A field that did not exist yet had its default value."""
    shutil.copytree(reference, tmp_path, dirs_exist_ok=True)
    path = run_folder(tmp_path) / "config.json"
    head = json.loads(path.read_text())
    del head["config"]["precision"]
    path.write_text(json.dumps(head))
    assert run(tmp_path)[0].finished
    head["config"]["precision"] = "bfloat16"
    path.write_text(json.dumps(head))
    with pytest.raises(ConfigError, match=r"holds a run with other settings \(precision\)"):
        run(tmp_path)


def test_full_disk_loses_nothing(stopped, long_reference):
    place = run_folder(stopped)
    before = (place / "checkpoint.pt").read_bytes()
    limit = ("bash", "-c", 'ulimit -f 8; exec "$@"', "limited")  # 8 KiB a file
    words = ("run", "classify", "--preset", "demo", "--epochs", 50, "--limit", 100)
    words = (*words, "--batch-size", 20, "--out", stopped, "--checkpoint-seconds", 0)
    code, _, err = weightnorm(*words, prefix=limit)
    assert code == 1
    assert "Nothing already written is lost" in err
    assert "Traceback" not in err
    assert (place / "checkpoint.pt").read_bytes() == before
    assert not list(place.glob(".*"))
    run(stopped, epochs=50)
    assert same(outcome(stopped), outcome(long_reference))


# — divergence —


def test_diverged_run_is_recorded_and_reported_every_time(tmp_path, capsys):
    words = ["run", "classify", "--preset", "demo", "--epochs", "2", "--limit", "100"]
    words += ["--batch-size", "20", "--parameterization", "standard", "--checkpoint-seconds", "0"]
    words += ["--learning-rate", "1e30", "--out", str(tmp_path)]
    assert main(words) == 1
    err = capsys.readouterr().err
    assert re.search(r"failed: diverged at epoch 1, step \d+: .*loss nan", err)
    assert re.search(r"largest norm of a unit: .*\d\.weight", err)
    place = run_folder(tmp_path)
    record = load_record(place)
    assert record.finished
    assert record.diverged["epoch"] == 1
    assert {name: record.result[name] for name in classify.RESULTS} == dict.fromkeys(
        classify.RESULTS
    )
    state, before = (
        torch.load(place / name, weights_only=True) for name in ("diverged.pt", "checkpoint.pt")
    )
    assert state["step"] == before["step"] + 1 == record.diverged["step"]
    assert not state["totals"][0]["loss"].isfinite()
    assert before["totals"][0]["loss"].isfinite()

    files = {p: p.stat().st_mtime_ns for p in place.rglob("*") if p.name != "lock"}
    for _ in range(2):
        assert main(words) == 1
        again = capsys.readouterr().err
        assert re.search(r"failed: diverged at epoch 1, step \d+: .*loss nan", again)
        assert f"Delete {place} to run it again" in again
    assert {p: p.stat().st_mtime_ns for p in place.rglob("*") if p.name != "lock"} == files


def test_non_finite_result_is_divergence(tmp_path):
    expected = "the result is not finite after epoch 1: test_loss inf"
    with pytest.raises(Diverged, match=expected), bare(tmp_path) as this:  # noqa: PT012
        for _ in this.epochs(1):
            this.log(test_loss=float("inf"), test_error=0.5)
        this.finish({"test_loss": this.last["test_loss"], "test_error": 0.5})
    with pytest.raises(Diverged, match=expected):
        assert this.finished
    record = load_record(this.folder)
    assert (record.result["test_loss"], record.result["test_error"]) == (None, 0.5)
    assert record.diverged["epoch"] == 1


# — progress —


def test_plain_lines_in_a_pipe(command):
    _, *rows = command[1]  # the first line is the folder
    assert re.match(r"epoch +loss +error +loss +error", rows[1])
    assert re.match(r"  1/4 +[\d.]+ +[\d.]+ ", rows[2])
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= 80


def test_bars_in_a_terminal(tmp_path):
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    classify.run(config(tmp_path, limit=300), console)
    text = console.file.getvalue()
    assert "━" in text
    assert re.search(r"epochs .*1/2", text)
    assert re.search(r"steps .*/15", text)


def test_steps_are_saved_as_often_as_asked(tmp_path, monkeypatch):
    with bare(tmp_path) as this:
        saved, save = [], this.save
        monkeypatch.setattr(
            this, "save", lambda *path: (saved.append((this.epoch, this.step)), save())
        )
        for _ in this.epochs(2):
            assert list(this.steps(5, save_every=2)) == [0, 1, 2, 3, 4]
            this.log()
    assert saved == [(0, 2), (0, 4), (1, 0), (1, 2), (1, 4), (2, 0)]
    with bare(tmp_path) as this:
        this.epoch, this.step = 1, 3
        assert [list(this.steps(5)) for _ in this.epochs(2)] == [[3, 4]]


def test_a_signal_in_the_last_step_stops_after_the_evaluation(tmp_path):
    with pytest.raises(Interrupted), bare(tmp_path, checkpoint_seconds=0.0) as this:  # noqa: PT012
        for _ in this.epochs(2):
            for step in this.steps(3):
                if step == 2:
                    os.kill(os.getpid(), signal.SIGINT)
            assert load_state(this.checkpoint)["step"] == 2  # not after the last one
            this.log()
    state = load_state(this.checkpoint)
    assert (state["epoch"], state["step"], len(state["metrics"])) == (1, 0, 1)


def test_a_signal_stops_work_after_the_last_epoch(tmp_path):
    done = []
    with pytest.raises(Interrupted), bare(tmp_path) as this:  # noqa: PT012
        list(this.epochs(0))
        for part in this.parts(range(5), "importance sampling"):
            done.append(part)
            if part == 1:
                os.kill(os.getpid(), signal.SIGINT)
    assert done == [0, 1]
    assert "importance sampling: 5 parts" in this.console.file.getvalue()


# — precision and ranks —


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_learns(tmp_path, precision):
    record, _ = run(tmp_path, precision=precision, limit=300, epochs=4)
    loss = record.column("train_loss")
    assert loss[-1] < loss[0]


def test_two_ranks_match_one_process(tmp_path):
    quiet = ("--parameterization", "weight-norm-mean-only", "--noise", 0, "--dropout", 0)
    quiet = (*quiet, "--epochs", 1, "--limit", 111, "--init-examples", 51)
    spread(2, *tiny(tmp_path / "two", *quiet))
    two = load_record(run_folder(tmp_path / "two"))
    assert weightnorm(*tiny(tmp_path / "one", *quiet))[0] == 0
    one = load_record(run_folder(tmp_path / "one"))
    assert two.environment["ranks"] == 2
    for name in ("train_loss", "test_loss", "v_norm", "effective_step"):
        assert two.column(name) == pytest.approx(one.column(name), rel=1e-4)


# — refusals and reports —


def test_ranks_that_read_different_checkpoints_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "gather", lambda self, value=None: [value, value and (0, 7)])
    with pytest.raises(RunError, match=r"\[\(0, 0\), \(0, 7\)\]"), bare(tmp_path):
        pass


def test_units_that_initialization_leaves_out_are_recorded(tmp_path):
    layers = (
        LayerInit("a", "Linear", units=3, dead=(0, 2)),
        LayerInit("b", "Linear", skipped="it did not run"),
        LayerInit("c", "Linear", units=3),
    )
    with bare(tmp_path) as run:
        run.record_initialization(InitReport(layers))
        run.record_initialization(InitReport(()))  # when resumed
    found = json.loads((run.folder / "initialization.json").read_text())
    assert found == {"layers": 2, "dead_units": {"a": 2}, "skipped": {"b": "it did not run"}}
    text = run.console.file.getvalue()
    assert "not initialized on data: 2 constant units of a, b (it did not run)" in text


# — the loop —


def orders(runs, seed):
    """The rows of each of two epochs, in the order of the batches."""
    found = []
    with bare(runs, seed=seed) as this:
        for _ in this.epochs(2):
            batches = [(this.batch, batch.tolist()) for batch in this.batches(10, 4)]
            assert [size for size, _ in batches] == [4, 4, 2]
            found.append([row for _, rows in batches for row in rows])
            this.log()
    return found


def test_batches_are_a_permutation_that_depends_on_seed_and_epoch(tmp_path):
    found = [*orders(tmp_path, 1), *orders(tmp_path, 2)]
    assert all(sorted(order) == list(range(10)) for order in found)
    assert len({tuple(order) for order in found}) == 4
    assert orders(tmp_path / "again", 1) == found[:2]


def test_time_is_that_of_all_sessions_without_checkpoints(tmp_path, monkeypatch):
    with bare(tmp_path, checkpoint_seconds=0.0) as this:
        monkeypatch.setattr(this, "save", lambda: time.sleep(0.5))
        for _ in this.epochs(2):
            this.seconds = 100.0  # before the run was stopped in this epoch
            list(this.steps(4))
            assert 100 < this.seconds < 101
            this.log()
        record = this.finish({"test_error": 0.5})
    assert record.result["seconds"] == pytest.approx(sum(record.column("seconds")), abs=0.01)
