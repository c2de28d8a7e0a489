"""DQN through the command line, on a real game: kill and resume, interrupt, sweep, report."""

import json
import random
import signal
import time

import pytest
import torch

from commands import HANGS, outcome, run_folder, same, started, wait_for, weightnorm
from weightnorm.lab.cli import main
from weightnorm.lab.records import find_records, load_record
from weightnorm.lab.reports import report
from weightnorm.lab.run import load_checkpoint

TINY = (
    "run", "dqn", "--preset", "demo", "--game", "breakout", "--width", 0.125, "--batch-size", 8,
    "--epochs", 2, "--train-steps", 200, "--test-steps", 100, "--replay-start", 40,
    "--replay-size", 60, "--init-states", 20,
)  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The same run, uninterrupted."""
    runs = tmp_path_factory.mktemp("reference")
    code, out, err = weightnorm(*TINY, "--runs", runs)
    assert code == 0, err
    assert "best score" in out
    return runs


def test_run_writes_its_record(reference):
    record = load_record(run_folder(reference))
    assert record.folder.relative_to(reference).parts[2:] == (
        "breakout", "weight-norm", "lr-0.001", "seed-1"
    )  # fmt: skip
    assert set(record.result) == {"best_score", "score", "mean_q", "random_score", "seconds"}
    assert record.result["best_score"] == max(record.column("score"))
    assert [row["epsilon"] for row in record.metrics] == pytest.approx([0.904, 0.784])
    assert not list(record.folder.glob("replay*"))
    assert json.loads((record.folder / "initialization.json").read_text())["layers"] == 5


def test_resume_after_kill_is_bit_exact(tmp_path, reference):
    """Killed in training or evaluation: replay buffer, games and random states are restored."""
    chance = random.Random(1)
    command = (*TINY, "--runs", tmp_path, "--checkpoint-seconds", 0.02)
    kills, steps = 0, set()
    while kills < 2:
        process = started(*command)
        try:
            wait_for(lambda p=process: p.poll() is not None or [*tmp_path.rglob("checkpoint.pt")])
            time.sleep(chance.uniform(0, 0.6))
            process.kill()
        finally:
            process.communicate()
        if process.returncode == 0:  # it finished first
            break
        kills += 1
        state = load_checkpoint(run_folder(tmp_path) / "checkpoint.pt")
        steps.add((state["epoch"], state["step"]))
    assert kills
    assert weightnorm(*command)[0] == 0
    assert same(outcome(tmp_path), outcome(reference)), steps


def test_interrupt_during_evaluation_saves_a_checkpoint(tmp_path, reference):
    command = (*TINY, "--runs", tmp_path, "--checkpoint-seconds", 0)
    process = started(*command)

    def evaluating():
        files = list(tmp_path.rglob("checkpoint-previous.pt"))
        return files and torch.load(files[0], weights_only=True)["step"] > 200

    wait_for(lambda: process.poll() is not None or evaluating())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130, err
    assert "everything is saved" in err
    state = torch.load(run_folder(tmp_path) / "checkpoint.pt", weights_only=True)
    assert 200 < state["step"] < 300
    assert weightnorm(*TINY, "--runs", tmp_path)[0] == 0
    assert same(outcome(tmp_path), outcome(reference))


def test_sweep_over_games_and_report(tmp_path, capsys):
    settings = [str(word) for word in TINY[4:] if word not in ("--game", "breakout")]
    grid = ["--games", "breakout", "space-invaders", "--parameterizations", "standard"]
    where = ["--preset", "demo", "--runs", str(tmp_path / "runs")]
    assert main.main(["sweep", "dqn", *where, *grid, *settings, "--epochs", "1"]) == 0
    out = capsys.readouterr().out
    records, problems = find_records(tmp_path / "runs")
    assert [record.config["game"] for record in records] == ["breakout", "space-invaders"]
    assert not problems
    for record in records:
        (row,) = (line for line in out.splitlines() if record.config["game"] in line)
        assert f" {record.result['best_score']:.4g} " in row
        assert "best" in row
    files = report(tmp_path / "runs", tmp_path / "report")
    assert not files.problems
    assert {path.suffix for path in files.figures} == {".png", ".svg", ".gif"}
    assert "Space Invaders" in files.page.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep", "dqn", "--games", "pong", "brakeout"], "breakout"),
        (["sweep", "dqn", "--game", "pong"], "a grid takes --games"),
    ],
)
def test_usage_errors_name_the_nearest_word(words, message, capsys):
    assert main.main(words) == 2
    assert message in capsys.readouterr().err
