"""The VAE experiment: presets, data, objective, parameter average, a run on synthetic images."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from weightnorm import Parameterization, normalized_weights
from weightnorm.lab import vae
from weightnorm.lab.cli import main, parse_config
from weightnorm.lab.config import folder
from weightnorm.lab.data import Labelled
from weightnorm.lab.environment import Ranks
from weightnorm.lab.sweep import flags
from weightnorm.lab.vae import ElboTerms

DEMO = vae.PRESETS["demo"]


def parsed(*words):
    return parse_config(vae, [*map(str, words)], "run vae")


# — settings —


def test_presets_have_the_papers_settings():
    paper = vae.PRESETS["paper"]
    assert (paper.rate, paper.batch_size, paper.average_epochs) == (0.002, 100, 10)
    assert (paper.data, paper.posterior, paper.flow_steps, paper.latents) == ("mnist", "iaf", 2, 32)
    assert (paper.width, paper.depth, paper.free_bits) == (1, 2, 0)
    assert paper.importance_samples >= 128
    colour = vae.PRESETS["paper cifar10"]
    assert (colour.latents, colour.depth, colour.flow_steps, colour.free_bits) == (32, 2, 1, 0.25)
    for name, preset in vae.PRESETS.items():
        assert name.split()[0] == preset.preset
        same = ("batch_size", "rate", "average_epochs", "init_examples", "posterior")
        assert all(getattr(preset, field) == getattr(paper, field) for field in same)


def test_presets_have_their_own_settings_for_cifar10():
    assert parsed() == vae.PRESETS["cpu"]
    assert parsed("--data", "cifar10") == vae.PRESETS["cpu cifar10"]
    assert parsed("--preset=paper", "--data=cifar10") == vae.PRESETS["paper cifar10"]
    assert parsed("--preset", "demo", "--data", "mnist") == replace(DEMO, data="mnist")
    colour = parsed("--data", "cifar10", "--depth", 1)
    assert colour == replace(vae.PRESETS["cpu cifar10"], depth=1)


@pytest.mark.parametrize("preset", vae.PRESETS.values(), ids=vae.PRESETS)
@pytest.mark.parametrize("changes", [{}, {"depth": 1, "posterior": "diagonal"}], ids=["", "more"])
def test_flags_of_a_sweep_round_trip(preset, changes):
    config = replace(preset, parameterization=Parameterization.STANDARD, **changes)
    assert parsed(*flags(config, preset)) == config


def test_folder_names_the_data():
    where = folder("vae", vae.PRESETS["cpu cifar10"], vae.PRESETS)
    assert str(where) == "runs/vae/cpu/cifar10/weight-norm/lr-0.002/seed-1"
    where = folder("vae", replace(vae.PRESETS["cpu"], posterior="diagonal"), vae.PRESETS)
    assert str(where) == "runs/vae/cpu+posterior=diagonal/mnist/weight-norm/lr-0.002/seed-1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parameterization", "batch-norm"], "expected standard or weight-norm"),
        (["--data", "cifr10"], "invalid choice 'cifr10' for argument '--data'"),
    ],
)
def test_command_line_refuses_with_a_message(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "vae", *words])
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


# — data —


def test_training_pixels_are_resampled_and_test_pixels_are_fixed():
    train, test = vae.load(DEMO)
    assert train.dtype == torch.uint8
    assert train.shape[1:] == test.shape[1:] == (1, 16, 16)
    assert set(test.unique().tolist()) == {0, 1}
    torch.manual_seed(5)
    assert torch.equal(test, vae.load(DEMO)[1])
    some = train[:100]
    first, second = (vae.to_input(some, DEMO) for _ in range(2))
    assert not torch.equal(first, second)
    often = torch.stack([vae.to_input(some, DEMO) for _ in range(200)]).mean()
    assert often.item() == pytest.approx(some.float().mean().item() / 255, abs=0.003)
    assert len(vae.load(replace(DEMO, limit=50))[0]) == 50


# — training —


def terms(kl):
    return ElboTerms(torch.zeros(len(kl), requires_grad=True), kl)


def run_of(batch):
    return SimpleNamespace(batch=batch, ranks=Ranks())


def test_channels_below_free_bits_have_no_gradient():
    kl = torch.tensor([[[0.1, 0.9]], [[0.3, 0.5]]], requires_grad=True)  # means 0.2 and 0.7
    vae.objective(terms(kl), 0.25, run_of(2)).backward()
    assert kl.grad.tolist() == [[[0.0, 0.5]], [[0.0, 0.5]]]
    clamped = kl.detach().clone().requires_grad_()
    clamped.mean(0).clamp_min(0.25).sum().backward()
    assert torch.equal(kl.grad, clamped.grad)


def test_objective_without_free_bits_is_the_negative_elbo():
    kl = torch.tensor([[[-0.1, 0.9]], [[-0.3, 0.5]]], requires_grad=True)
    got = terms(kl)
    loss = vae.objective(got, 0.0, run_of(2))
    assert loss.item() == pytest.approx(-got.elbo.mean().item())


def test_decay_of_the_average_warms_up_to_the_papers():
    update = vae.moving_average(steps=6000)

    def decay(count):
        average = [torch.ones(1, dtype=torch.float64)]
        update(average, [torch.zeros(1, dtype=torch.float64)], torch.tensor(count))
        return average[0].item()

    assert decay(1) == pytest.approx(2 / 11)
    assert decay(90) == pytest.approx(91 / 100)
    assert decay(100_000) == pytest.approx(1 - 1 / 6000)


def test_averaged_model_has_averaged_v_and_g():
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
def synthetic_cifar10(monkeypatch):
    """Forty synthetic images in place of CIFAR-10."""
    generator = torch.Generator().manual_seed(1)
    small = torch.rand(40, 3, 4, 4, generator=generator)
    images = (torch.nn.functional.interpolate(small, scale_factor=8.0) * 255).to(torch.uint8)
    labels = torch.zeros(40, dtype=torch.long)
    data = Labelled(images[:30], labels[:30], images[30:], labels[30:], ("blur",))
    monkeypatch.setattr(vae, "load_cifar10", lambda _: data)


@pytest.mark.parametrize("how", vae.Config.COMPARED)
def test_run_on_cifar10(synthetic_cifar10, tmp_path, how):
    config = replace(
        vae.PRESETS["cpu cifar10"],
        parameterization=how,
        width=0.1,
        depth=1,
        latents=2,
        epochs=3,
        batch_size=10,
        importance_samples=20,
        out=tmp_path,
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


def test_estimates_from_importance_samples(monkeypatch):
    """log p(x) ≈ log mean w and ELBO ≈ mean log w, averaged over all examples."""
    examples = vae.EVAL_BATCH + 3
    logs = torch.randn(examples, 4, dtype=torch.float64)
    seen = []

    def log_weights(model, x, samples, *, each):
        seen.append((len(x), samples))
        return logs[x.flatten().long()]

    monkeypatch.setattr(vae, "log_importance_weights", log_weights)
    config = replace(DEMO, importance_samples=4, importance_examples=examples)
    run = SimpleNamespace(ranks=Ranks(), parts=iter)
    found = vae.estimate(torch.nn.Identity(), torch.arange(900.0), config, run)
    assert seen == [(500, 4), (3, 4)]
    assert found == pytest.approx(
        {
            "importance_negative_log_likelihood": -logs.exp().mean(1).log().mean().item(),
            "importance_negative_elbo": -logs.mean().item(),
        }
    )
