"""DQN through the command line, on a real game: kill, interrupt, resume."""

import json
import signal

import pytest
import torch

from commands import HANGS, outcome, run_folder, same, started, wait_for, weightnorm
from weightnorm.lab.cli import main
from weightnorm.lab.records import load_record

TINY = (
    "run", "dqn", "--preset", "demo", "--game", "breakout", "--width", 0.125, "--batch-size", 8,
    "--epochs", 2, "--train-steps", 200, "--test-steps", 100, "--replay-start", 40,
    "--replay-size", 60, "--init-states", 20,
)  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run, uninterrupted."""
    runs = tmp_path_factory.mktemp("reference")
    code, out, err = weightnorm(*TINY, "--out", runs)
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


def test_killed_in_training_and_interrupted_in_evaluation_it_resumes_bit_exactly(
    tmp_path, reference
):
    """Replay buffer, games and random states are restored."""
    command = (*TINY, "--out", tmp_path, "--checkpoint-seconds", 0)

    def stopped(how, first, last):
        """Run until the step of a checkpoint is in [first, last), and stop by a signal."""
        process = started(*command)

        def reached():
            files = list(tmp_path.rglob("checkpoint-previous.pt"))
            return files and torch.load(files[0], weights_only=True)["step"] > first

        wait_for(lambda: process.poll() is not None or reached())
        process.send_signal(how)
        _, err = process.communicate(timeout=HANGS)
        step = torch.load(run_folder(tmp_path) / "checkpoint.pt", weights_only=True)["step"]
        assert first < step < last, err
        return process.returncode, err

    assert stopped(signal.SIGKILL, 50, 200)[0] == -9
    code, err = stopped(signal.SIGINT, 200, 300)
    assert code == 130
    assert "everything is saved" in err
    assert weightnorm(*TINY, "--out", tmp_path)[0] == 0
    assert same(outcome(tmp_path), outcome(reference))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep", "dqn", "--games", "pong", "brakeout"], "breakout"),
        (["sweep", "dqn", "--game", "pong"], "a grid takes --games"),
    ],
)
def test_usage_errors_name_the_nearest_word(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err
