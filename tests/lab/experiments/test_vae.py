"""Experiment 2 without processes: its presets, data, objective and average, and a run on CIFAR-10
made up here."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from weightnorm import Parameterization, normalized_weights
from weightnorm.lab.cli import main
from weightnorm.lab.cli.experiments import parse_config
from weightnorm.lab.data import cifar10
from weightnorm.lab.data.labelled import Labelled
from weightnorm.lab.errors import ConfigError
from weightnorm.lab.experiments import vae
from weightnorm.lab.models.vae import Terms
from weightnorm.lab.runs.config import folder
from weightnorm.lab.runs.ranks import Ranks
from weightnorm.lab.sweeps.grid import flags

DEMO = vae.PRESETS["demo"]


def parsed(*words):
    return parse_config(vae, [*map(str, words)], "run vae")


# — settings —


def test_the_presets_keep_the_papers_settings():
    paper = vae.PRESETS["paper"]
    assert (paper.learning_rate, paper.batch_size, paper.average_epochs) == (0.002, 100, 10)
    assert (paper.data, paper.posterior, paper.flow_steps, paper.latents) == ("mnist", "iaf", 2, 32)
    assert (paper.width, paper.depth, paper.free_bits) == (1, 2, 0)
    assert paper.importance_samples >= 128
    colour = vae.PRESETS["paper cifar10"]
    assert (colour.latents, colour.depth, colour.flow_steps, colour.free_bits) == (32, 2, 1, 0.25)
    for name, preset in vae.PRESETS.items():
        assert name.split()[0] == preset.preset
        same = ("batch_size", "learning_rate", "average_epochs", "init_examples", "posterior")
        assert all(getattr(preset, field) == getattr(paper, field) for field in same)
    assert set(vae.SIZES) == set(vae.PRESETS)


def test_a_preset_has_its_own_settings_for_cifar10():
    assert parsed() == vae.PRESETS["cpu"]
    assert parsed("--data", "cifar10") == vae.PRESETS["cpu cifar10"]
    assert parsed("--preset=paper", "--data=cifar10") == vae.PRESETS["paper cifar10"]
    assert parsed("--preset", "demo", "--data", "mnist") == replace(DEMO, data="mnist")
    colour = parsed("--data", "cifar10", "--depth", 1)
    assert colour == replace(vae.PRESETS["cpu cifar10"], depth=1)


@pytest.mark.parametrize("preset", vae.PRESETS.values(), ids=vae.PRESETS)
@pytest.mark.parametrize("changes", [{}, {"depth": 1, "posterior": "diagonal"}], ids=["", "more"])
def test_the_command_of_a_sweep_means_the_same_config(preset, changes):
    config = replace(preset, parameterization=Parameterization.STANDARD, **changes)
    assert parsed(*flags(config, preset)) == config


def test_folders_name_the_data():
    where = folder("vae", vae.PRESETS["cpu cifar10"], vae.PRESETS)
    assert str(where) == "runs/vae/cpu/cifar10/weight-norm/lr-0.002/seed-1"
    where = folder("vae", replace(vae.PRESETS["cpu"], posterior="diagonal"), vae.PRESETS)
    assert str(where) == "runs/vae/cpu+posterior=diagonal/mnist/weight-norm/lr-0.002/seed-1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("depth", 0),
        ("latents", 0),
        ("flow_steps", 0),
        ("batch_size", 1),
        ("init_examples", 1),
        ("width", 0.0),
        ("average_epochs", 0.0),
        ("free_bits", -0.1),
        ("importance_samples", 0),
        ("importance_examples", 0),
        ("limit", 1),
        ("learning_rate", 0.0),
    ],
)
def test_impossible_values_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"{field.replace('_', '-')} is {value}; expected"):
        replace(vae.PAPER, **{field: value})


@pytest.mark.parametrize("how", sorted(set(Parameterization) - set(vae.COMPARED)))
def test_what_the_paper_does_not_compare_is_refused(how):
    with pytest.raises(ConfigError, match=f"is {how}; expected standard or weight-norm"):
        replace(vae.PAPER, parameterization=how)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--parameterization", "batch-norm"], "expected standard or weight-norm"),
        (["--data", "cifr10"], "did you mean --data cifar10?"),
    ],
)
def test_the_command_line_refuses_with_words(words, says, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["run", "vae", *words])
    assert stop.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


# — data —


def test_training_sees_new_pixels_at_every_use_and_testing_the_same_in_all_runs():
    train, test = vae.load(DEMO)
    assert train.dtype == torch.uint8
    assert train.shape[1:] == test.shape[1:] == (1, 16, 16)
    assert set(test.unique().tolist()) == {0, 1}
    torch.manual_seed(5)
    assert torch.equal(test, vae.load(DEMO)[1])
    some = train[:100]
    first, second = (vae.observe(some, DEMO) for _ in range(2))
    assert not torch.equal(first, second)
    often = torch.stack([vae.observe(some, DEMO) for _ in range(200)]).mean()
    assert often.item() == pytest.approx(some.float().mean().item() / 255, abs=0.003)
    assert len(vae.load(replace(DEMO, limit=50))[0]) == 50


# — training —


def terms(kl):
    return Terms(torch.zeros(len(kl), requires_grad=True), kl)


def run_of(batch):
    return SimpleNamespace(batch=batch, ranks=Ranks())


def test_free_bits_do_not_charge_what_is_below_them():
    kl = torch.tensor([[[0.1, 0.9]], [[0.3, 0.5]]], requires_grad=True)  # means 0.2 and 0.7
    vae.objective(terms(kl), 0.25, run_of(2)).backward()
    assert kl.grad.tolist() == [[[0.0, 0.5]], [[0.0, 0.5]]]
    clamped = kl.detach().clone().requires_grad_()
    clamped.mean(0).clamp_min(0.25).sum().backward()
    assert torch.equal(kl.grad, clamped.grad)


def test_without_free_bits_the_objective_is_the_bound():
    kl = torch.tensor([[[-0.1, 0.9]], [[-0.3, 0.5]]], requires_grad=True)
    got = terms(kl)
    loss = vae.objective(got, 0.0, run_of(2))
    assert loss.item() == pytest.approx(-got.elbo.mean().item())


def test_the_average_forgets_its_start_and_then_has_the_papers_decay():
    update = vae.moving_average(steps=6000)

    def decay(count):
        average = [torch.ones(1, dtype=torch.float64)]
        update(average, [torch.zeros(1, dtype=torch.float64)], torch.tensor(count))
        return average[0].item()

    assert decay(1) == pytest.approx(2 / 11)
    assert decay(90) == pytest.approx(91 / 100)
    assert decay(100_000) == pytest.approx(1 - 1 / 6000)


def test_averaged_v_and_g_make_a_model():
    """See Note [averaging v and g]."""
    config = replace(DEMO, width=0.1, latents=4)
    model = vae.build(config, 16)
    average = AveragedModel(model, multi_avg_fn=vae.moving_average(50))
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.01)
    x = torch.rand(20, 1, 16, 16).round()
    seen = []
    for _ in range(12):
        optimizer.zero_grad()
        (-model(x).elbo.mean()).backward()
        optimizer.step()
        average.update_parameters(model)
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    expected = dict(seen[0])
    for count, now in enumerate(seen[1:], 1):
        rate = max(1 / 50, 9 / (10 + count))
        expected = {name: p.lerp(now[name], rate) for name, p in expected.items()}
    for name, p in average.module.named_parameters():
        torch.testing.assert_close(p, expected[name])
    weights = dict(average.module.named_modules())
    for name, (v, g) in normalized_weights(average.module).items():
        layer = weights[name.removesuffix(".weight")]
        mask = getattr(layer, "mask", torch.ones(()))
        axis = [d for d in range(v.dim()) if g.shape[d] == 1]
        length = (v * mask).square().sum(axis, keepdim=True).sqrt()
        composed = g * (v * mask) / length.clamp_min(1e-12)
        torch.testing.assert_close(layer.weight, composed)
    with torch.no_grad():
        start, now = vae.build(config, 16)(x).elbo.mean(), average.module(x).elbo.mean()
    assert now > start
    model.load_state_dict(average.module.state_dict())


# — a whole run —


@pytest.fixture
def made_up_cifar10(monkeypatch):
    """Forty blurs in place of CIFAR-10."""
    generator = torch.Generator().manual_seed(1)
    small = torch.rand(40, 3, 4, 4, generator=generator)
    images = (torch.nn.functional.interpolate(small, scale_factor=8.0) * 255).to(torch.uint8)
    labels = torch.zeros(40, dtype=torch.long)
    data = Labelled(images[:30], labels[:30], images[30:], labels[30:], ("blur",))
    monkeypatch.setattr(cifar10, "load", lambda _: data)


@pytest.mark.parametrize("how", vae.COMPARED)
def test_a_run_on_cifar10(made_up_cifar10, tmp_path, how):
    config = replace(
        vae.PRESETS["cpu cifar10"],
        parameterization=how,
        width=0.1,
        depth=1,
        latents=2,
        epochs=3,
        batch_size=10,
        importance_samples=20,
        runs=tmp_path,
    )
    record = vae.run(config)
    bound = record.column("test_negative_elbo")
    assert bound[-1] < bound[0]
    row, result = record.metrics[-1], record.result
    assert row["test_bits_per_dim"] == pytest.approx(bound[-1] / (3072 * np.log(2)))
    assert {f"test_kl_{i}" for i in (1, 2, 3)} <= set(row)
    assert result["test_negative_elbo"] == bound[-1]
    assert (
        result["importance_negative_log_likelihood"]
        < result["importance_negative_elbo"]
        == pytest.approx(bound[-1], rel=0.05)
    )
    with np.load(record.folder / "pictures.npz") as kept:
        assert kept["samples"].shape == (40, 32, 32, 3)
        assert kept["originals"].shape == kept["reconstructions"].shape == (10, 32, 32, 3)
        assert kept["originals"].dtype == np.uint8
    assert vae.run(config).result == result  # not run again
