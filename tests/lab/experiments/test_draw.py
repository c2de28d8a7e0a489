"""Experiment 3: its presets, its data, and its runs through the real command line."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from commands import outcome, run_folder, same, spread, started, wait_for, weightnorm
from weightnorm import Parameterization
from weightnorm.lab.errors import ConfigError
from weightnorm.lab.experiments import draw
from weightnorm.lab.runs.records import load_record

TINY = ("run", "draw", "--preset", "demo", "--epochs", 4, "--limit", 90, "--batch-size", 20)
TINY = (*TINY, "--steps", 3, "--hidden", 6, "--latent", 2)


def tiny(runs, *more):
    return (*TINY, "--runs", runs, *more)


def test_the_presets_keep_the_implementations_settings():
    paper = draw.PRESETS["paper"]
    assert (paper.steps, paper.hidden, paper.latent) == (64, 256, 100)
    assert (paper.read_size, paper.write_size, paper.attention) == (2, 5, True)
    assert (paper.batch_size, paper.epochs, paper.clip) == (100, 100, 10.0)
    assert paper.data == draw.PRESETS["cpu"].data == "binarized-mnist"
    for name, preset in draw.PRESETS.items():
        assert preset.preset == name
        assert (preset.attention, preset.clip) == (True, 10.0)


def test_one_learning_rate_for_both():
    """As the paper has it: the one that was tuned for the standard parameterization."""
    for preset, rates in draw.LEARNING_RATES.items():
        assert list(rates) == [Parameterization.STANDARD, Parameterization.WEIGHT_NORM]
        assert set(rates.values()) == {draw.PRESETS[preset].learning_rate}
    assert draw.LEARNING_RATES["paper"][Parameterization.STANDARD] == 0.0003


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("batch_size", 0),
        ("steps", 0),
        ("hidden", 0),
        ("latent", 0),
        ("read_size", 1),
        ("write_size", 1),
        ("clip", 0.0),
        ("limit", 0),
        ("parameterization", Parameterization.BATCH_NORM),
        ("parameterization", Parameterization.MEAN_ONLY_BATCH_NORM),
        ("parameterization", Parameterization.WEIGHT_NORM_MEAN_ONLY),
    ],
)
def test_impossible_values_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"{field.replace('_', '-')} is {value}; expected"):
        replace(draw.PAPER, **{field: value})


def test_the_refusal_names_the_two_that_there_are():
    code, _, err = weightnorm("run", "draw", "--parameterization", "batch-norm")
    assert code == 2
    assert "expected standard or weight-norm" in err


def test_digits_are_black_and_white():
    train, test = draw.load(draw.PRESETS["demo"])
    assert train.unique().tolist() == test.unique().tolist() == [0, 1]
    assert 0.1 < train.float().mean().item() < 0.5
    limited, same_test = draw.load(replace(draw.PRESETS["demo"], limit=30))
    assert torch.equal(limited, train[:30])
    assert torch.equal(same_test, test)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run, never disturbed."""
    runs = tmp_path_factory.mktemp("reference")
    code, out, err = weightnorm(*tiny(runs))
    assert code == 0, err
    assert "test negative elbo" in out
    return runs


def test_a_run_leaves_its_record_and_drawings(reference):
    folder = run_folder(reference)
    record = load_record(folder)
    assert [row["epoch"] for row in record.metrics] == [1, 2, 3, 4]
    assert record.result["test_negative_elbo"] == record.metrics[-1]["test_negative_elbo"]
    for row in record.metrics:
        assert 0 <= row["test_kl"] < row["test_negative_elbo"]
        assert row["train_gradient_norm"] > 0
    bound = record.column("train_negative_elbo")
    assert bound == sorted(bound, reverse=True)
    pixels = draw.load(draw.PRESETS["demo"])[0].shape[1]
    for epoch in (2, 4):
        with np.load(folder / f"epoch-{epoch}.npz") as arrays:
            kept = dict(arrays)
        side = kept["samples"].shape[1]
        assert kept["samples"].shape == (100, side, side)
        assert side * side == pixels
        assert kept["drawings"].shape == (3, 8, side, side)
        assert kept["boxes"].shape == (3, 8, 3)
        assert (kept["drawings"][-1] == kept["samples"][:8]).all()
        assert kept["samples"].dtype == np.uint8


def test_killed_it_ends_with_the_same_bits(tmp_path, reference):
    command = tiny(tmp_path, "--checkpoint-seconds", 0)
    process = started(*command)
    try:
        wait_for(lambda: process.poll() is not None or [*tmp_path.rglob("checkpoint-previous.pt")])
        process.kill()
    finally:
        process.communicate()
    assert process.returncode == -9
    assert weightnorm(*command)[0] == 0
    assert len(load_record(run_folder(tmp_path)).sessions) == 2
    assert same(outcome(tmp_path), outcome(reference))


def test_two_ranks_are_one_process(tmp_path):
    """Also in their noise: each rank draws that of the whole batch. Batches are of odd size."""
    words = ("--epochs", 2, "--limit", 55, "--batch-size", 11)
    spread(2, *tiny(tmp_path / "two", *words))
    assert weightnorm(*tiny(tmp_path / "one", *words))[0] == 0
    alone, together = (load_record(run_folder(tmp_path / name)) for name in ("one", "two"))
    assert (alone.environment["ranks"], together.environment["ranks"]) == (1, 2)
    for name in alone.metrics[0]:
        if name != "seconds":
            assert together.column(name) == pytest.approx(alone.column(name), rel=1e-4)
    one, two = (outcome(tmp_path / name)[2]["model"] for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-4, rtol=1e-3)


def test_it_is_listed():
    code, out, _ = weightnorm("list")
    assert code == 0
    assert draw.TITLE in out
