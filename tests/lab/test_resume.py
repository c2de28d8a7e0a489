"""Every experiment through the command line: its record, kill -9 and resume, two ranks.

classify is in runs/test_runs.py.
"""

import signal
from itertools import pairwise

import pytest
import torch

from commands import HANGS, outcome, run_folder, same, spread, started, wait_for
from weightnorm.lab.cli import main
from weightnorm.lab.records import load_record

TINY = {
    "vae": "--preset demo --width 0.2 --latents 6 --epochs 2 --limit 200 --batch-size 20 "
    "--importance-samples 8",
    "draw": "--preset demo --epochs 2 --limit 55 --batch-size 11 --steps 3 --hidden 6 --latent 2 "
    "--initial-g one-except-windows",
    "dqn": "--preset demo --game breakout --width 0.125 --batch-size 8 --epochs 1 "
    "--train-steps 200 --test-steps 100 --replay-start 40 --replay-size 60 --init-states 20",
    # At higher rates ranks differ by more: Muon rounds to bfloat16.
    "language": "--preset demo --optimizer muon --learning-rate 0.02 --epochs 2 --steps 8 "
    "--batch-size 3 --context 16 --width 16 --depth 1 --heads 2 --eval-texts 7",
}
PLACES = {"dqn": [(0, 50), (0, 210)]}
"""Epochs and steps after which a run is killed: DQN also in evaluation, the others once."""
RELATIVE = {"vae": 0.1, "draw": 1e-4, "language": 1e-3}
"""Difference of metrics between two ranks and one process; those of a VAE draw their own noise."""


def command(name, runs):
    return ["run", name, *TINY[name].split(), "--out", str(runs)]


@pytest.fixture(scope="module", params=TINY)
def reference(request, tmp_path_factory):
    """Name of an experiment, and the folder of an uninterrupted run."""
    runs = tmp_path_factory.mktemp(request.param)
    torch.set_num_threads(1)  # as in the processes that are killed
    assert main(command(request.param, runs)) == 0
    return request.param, runs


def killed(words, runs, after):
    """Start a command and kill it when it has written a checkpoint of a later place than this."""
    process = started(*words, "--checkpoint-seconds", 0)

    def place():
        for path in runs.rglob("checkpoint-previous.pt"):
            state = torch.load(path, weights_only=True)
            return state["epoch"], state["step"]
        return 0, 0

    try:
        wait_for(lambda: process.poll() is not None or place() > after)
    finally:
        process.kill()
        _, err = process.communicate(timeout=HANGS)
    assert process.returncode == -signal.SIGKILL, err


def test_killed_run_resumes_bit_exactly(reference, tmp_path):
    name, runs = reference
    places = PLACES.get(name, [(0, 0)])
    for after in places:
        killed(command(name, tmp_path), tmp_path, after)
    assert main(command(name, tmp_path)) == 0
    record = load_record(run_folder(tmp_path))
    assert len(record.sessions) == len(places) + 1
    assert same(outcome(tmp_path), outcome(runs))


def test_record_of_a_run(reference):
    name, runs = reference
    record = load_record(run_folder(runs))
    assert record.finished
    assert [row["epoch"] for row in record.metrics] == [*range(1, record.config["epochs"] + 1)]
    bound = {"vae": "test_negative_elbo", "draw": "train_negative_elbo"}.get(name)
    if bound:
        assert all(later < before for before, later in pairwise(record.column(bound)))
    if name == "dqn":
        assert record.folder.relative_to(runs).parts[2:4] == ("breakout", "weight-norm")
        assert not list(record.folder.glob("replay*"))


@pytest.mark.parametrize("reference", RELATIVE, indirect=True)
def test_two_ranks_equal_one_process(reference, tmp_path):
    name, runs = reference
    spread(2, *command(name, tmp_path))
    one, two = (load_record(run_folder(each)) for each in (runs, tmp_path))
    assert (one.environment["ranks"], two.environment["ranks"]) == (1, 2)
    names = ["test_negative_elbo"] if name == "vae" else set(one.metrics[0]) - {"seconds"}
    for metric in names:
        assert two.column(metric) == pytest.approx(one.column(metric), rel=RELATIVE[name])
