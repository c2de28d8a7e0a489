"""DRAW: presets, data, initial g, and runs through the command line."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from commands import kill_at_second_checkpoint, outcome, run_folder, same, spread, weightnorm
from weightnorm import Parameterization, normalized_weights, parts
from weightnorm.lab import draw
from weightnorm.lab.errors import ConfigError
from weightnorm.lab.models.draw import DRAW
from weightnorm.lab.records import load_record

TINY = ("run", "draw", "--preset", "demo", "--epochs", 4, "--limit", 90, "--batch-size", 20)
TINY = (*TINY, "--steps", 3, "--hidden", 6, "--latent", 2)


def tiny(runs, *more):
    return (*TINY, "--runs", runs, *more)


def test_presets_have_the_implementations_settings():
    paper = draw.PRESETS["paper"]
    assert (paper.steps, paper.hidden, paper.latent) == (64, 256, 100)
    assert (paper.read_size, paper.write_size, paper.attention) == (2, 5, True)
    assert (paper.batch_size, paper.epochs, paper.clip) == (100, 100, 10.0)
    assert paper.data == draw.PRESETS["cpu"].data == "binarized-mnist"
    for name, preset in draw.PRESETS.items():
        assert preset.preset == name
        assert (preset.attention, preset.clip) == (True, 10.0)


def test_both_parameterizations_have_the_same_learning_rate():
    """As in the paper: the rate tuned for the standard parameterization."""
    for name, preset in draw.PRESETS.items():
        rates = {replace(preset, parameterization=how).rate for how in draw.Config.COMPARED}
        assert rates == {{"paper": 0.0003, "cpu": 0.001, "demo": 0.003}[name]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("read_size", 1),
        ("write_size", 1),
        ("parameterization", Parameterization.BATCH_NORM),
        ("parameterization", Parameterization.MEAN_ONLY_BATCH_NORM),
        ("parameterization", Parameterization.WEIGHT_NORM_MEAN_ONLY),
    ],
)
def test_out_of_range_values_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"{field.replace('_', '-')} is {value}; expected"):
        replace(draw.PAPER, **{field: value})


def test_command_line_names_the_valid_parameterizations():
    code, _, err = weightnorm("run", "draw", "--parameterization", "batch-norm")
    assert code == 2
    assert "expected standard or weight-norm" in err


def test_digits_are_binary():
    train, test = draw.load(draw.PRESETS["demo"])
    assert train.unique().tolist() == test.unique().tolist() == [0, 1]
    assert 0.1 < train.float().mean().item() < 0.5
    limited, same_test = draw.load(replace(draw.PRESETS["demo"], limit=30))
    assert torch.equal(limited, train[:30])
    assert torch.equal(same_test, test)


WINDOWS = ("read_window.weight", "write_window.weight")


def small_model(attention=True, initial_g="norm"):
    torch.manual_seed(0)
    model = DRAW(side=6, hidden=5, latent=3, write_size=3, attention=attention)
    draw.normalize(model, initial_g)
    return model


def norms(model):
    return {name: p.v.norm(dim=1, keepdim=True) for name, p in normalized_weights(model).items()}


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("initial_g", ["norm", "one", "one-except-windows"])
def test_initial_g_has_the_configured_value(initial_g, attention):
    model = small_model(attention, initial_g)
    before = norms(small_model(attention))
    assert len(before) == (9 if attention else 7)
    assert set(WINDOWS) <= set(before) or not attention
    for name, (v, g) in normalized_weights(model).items():
        keeps_norm = initial_g == "norm" or (initial_g == "one-except-windows" and name in WINDOWS)
        torch.testing.assert_close(g, before[name] if keeps_norm else torch.ones_like(g))
        torch.testing.assert_close(v.norm(dim=1, keepdim=True), before[name])
    model = small_model(attention, "one-except-windows")
    norm = model.decoder.input.weight.norm(dim=1)
    torch.testing.assert_close(norm, torch.ones_like(norm))


@pytest.mark.parametrize("attention", [True, False])
def test_initial_g_of_norm_leaves_the_function_unchanged(attention):
    torch.manual_seed(0)
    plain = DRAW(side=6, hidden=5, latent=3, write_size=3, attention=attention)
    normalized = small_model(attention)
    x, noise = torch.rand(4, 36).round(), torch.randn(7, 4, 3)
    torch.testing.assert_close(normalized(x, noise), plain(x, noise))
    normalized = small_model(attention, "one")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(normalized(x, noise), plain(x, noise))


@pytest.mark.parametrize("value", ["two", "", None, 1.0])
def test_unknown_initial_g_is_refused(value):
    with pytest.raises(
        ConfigError, match=r"initial-g is .*; expected one of norm, one, one-except"
    ):
        replace(draw.PAPER, initial_g=value)


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("initial_g", ["one", "one-except-windows"])
def test_run_with_initial_g(tmp_path, initial_g, attention):
    config = replace(
        draw.PRESETS["demo"], epochs=1, limit=20, steps=2, hidden=6, latent=2, runs=tmp_path,
        initial_g=initial_g, attention=attention, device="cpu",
    )  # fmt: skip
    record = draw.run(config)
    assert record.config["initial_g"] == initial_g
    assert f"initial-g={initial_g}" in str(record.folder)
    assert record.metrics[0]["w_norm"] > 0.5  # N(0, 0.01²) has norms below 0.1


def test_mean_norms_are_over_all_units():
    model = small_model()
    expected = torch.cat([v.flatten() for v in norms(model).values()]).mean().item()
    assert draw.mean_norms(model) == pytest.approx({"w_norm": expected, "v_norm": expected})
    model = small_model(initial_g="one")
    assert draw.mean_norms(model) == pytest.approx({"w_norm": 1.0, "v_norm": expected})
    with torch.no_grad():
        parts(model.mean).g.fill_(3.0)
    units = sum(len(v) for v in norms(model).values())
    assert draw.mean_norms(model)["w_norm"] == pytest.approx(1 + 2 * 3 / units)
    assert draw.mean_norms(DRAW(side=6, hidden=5, latent=3)).keys() == {"w_norm"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """An uninterrupted run."""
    runs = tmp_path_factory.mktemp("reference")
    code, out, err = weightnorm(*tiny(runs))
    assert code == 0, err
    assert "test negative elbo" in out
    return runs


def test_run_writes_its_record_and_samples(reference):
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


def test_resume_after_kill_is_bit_exact(tmp_path, reference):
    command = tiny(tmp_path)
    kill_at_second_checkpoint(tmp_path, *command)
    assert weightnorm(*command)[0] == 0
    assert len(load_record(run_folder(tmp_path)).sessions) == 2
    assert same(outcome(tmp_path), outcome(reference))


def test_two_ranks_equal_one_process(tmp_path):
    """Including their noise: each rank draws that of the whole batch. Batches have an odd size."""
    words = ("--epochs", 2, "--limit", 55, "--batch-size", 11)
    spread(2, *tiny(tmp_path / "two", *words))
    assert weightnorm(*tiny(tmp_path / "one", *words))[0] == 0
    one, two = (load_record(run_folder(tmp_path / name)) for name in ("one", "two"))
    assert (one.environment["ranks"], two.environment["ranks"]) == (1, 2)
    for name in one.metrics[0]:
        if name != "seconds":
            assert two.column(name) == pytest.approx(one.column(name), rel=1e-4)
    states = [outcome(tmp_path / name)[2]["model"] for name in ("one", "two")]
    for name in states[0]:
        torch.testing.assert_close(states[0][name], states[1][name], atol=1e-4, rtol=1e-3)


def test_experiment_is_listed():
    code, out, _ = weightnorm("list")
    assert code == 0
    assert draw.TITLE in out


def test_without_weight_norm_the_initial_g_is_no_setting():
    plain = replace(draw.PRESETS["demo"], parameterization=Parameterization.STANDARD)
    assert replace(plain, initial_g="one") == plain
    normalized = replace(plain, parameterization=Parameterization.WEIGHT_NORM, initial_g="one")
    assert normalized.initial_g == "one"
