"""The VAE experiment: presets, data, objective, parameter average, importance sampling, a run."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributions import Normal
from torch.optim.swa_utils import AveragedModel

from ranks import on_ranks
from weightnorm import normalized_weights
from weightnorm.lab import vae
from weightnorm.lab.cli import parse_config
from weightnorm.lab.data import Labelled
from weightnorm.lab.environment import Ranks
from weightnorm.lab.run import Run
from weightnorm.lab.sweep import flags
from weightnorm.lab.vae_networks import VAE, ElboTerms, Gaussian, gaussian_kl

DEMO = vae.PRESETS["demo"]


def parsed(*words):
    return parse_config(vae, [*map(str, words)], "run vae")


def test_presets_have_the_papers_settings():
    paper, colour = vae.PRESETS["paper"], vae.PRESETS["paper cifar10"]
    assert (paper.rate, paper.batch_size, paper.average_epochs) == (0.002, 100, 10)
    assert (paper.data, paper.posterior, paper.flow_steps, paper.latents) == ("mnist", "iaf", 2, 32)
    assert (paper.width, paper.depth, paper.free_bits) == (1, 2, 0)
    assert (colour.latents, colour.depth, colour.flow_steps, colour.free_bits) == (32, 2, 1, 0.25)


def test_presets_have_their_own_settings_for_cifar10():
    assert parsed() == vae.PRESETS["cpu"]
    assert parsed("--preset=paper", "--data=cifar10") == vae.PRESETS["paper cifar10"]
    assert parsed("--preset", "demo", "--data", "mnist") == replace(DEMO, data="mnist")
    colour = replace(vae.PRESETS["cpu cifar10"], depth=1, posterior="diagonal")
    assert parsed("--data", "cifar10", "--depth", 1, "--posterior", "diagonal") == colour
    for preset in (vae.PRESETS["cpu cifar10"], DEMO):
        assert parsed(*flags(preset, preset)) == preset
    assert parsed(*flags(colour, vae.PRESETS["cpu cifar10"])) == colour


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


# — the objective —

KL = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.0, 0.0], [0.2, 0.4]]).unsqueeze(1)
"""Means 0.2 and 0.45; over the first half 0.3 and 0.7, over the second 0.1 and 0.2."""


def gradient_of_part(ranks):
    """The gradient of this rank's part of KL through the objective with free bits of 0.25."""
    kl = ranks.share(KL).clone().requires_grad_()
    terms = ElboTerms(torch.zeros(len(kl), requires_grad=True), kl)
    vae.objective(terms, 0.25, SimpleNamespace(batch=4, ranks=ranks)).backward()
    return kl.grad


def test_channels_below_free_bits_have_no_gradient():
    whole = KL.clone().requires_grad_()
    whole.mean(0).clamp_min(0.25).sum().backward()
    assert torch.equal(gradient_of_part(Ranks()), whole.grad)
    assert whole.grad[:, 0, 0].tolist() == [0.0] * 4


def gradient_on_rank(rank):
    return gradient_of_part(Ranks(rank, 2))


def test_free_bits_apply_to_the_mean_over_all_ranks():
    assert torch.equal(torch.cat(on_ranks(2, gradient_on_rank)), gradient_of_part(Ranks()))


def test_objective_without_free_bits_is_the_negative_elbo():
    terms = ElboTerms(torch.randn(4), KL)
    loss = vae.objective(terms, 0.0, SimpleNamespace(batch=4, ranks=Ranks()))
    assert loss.item() == pytest.approx(-terms.elbo.mean().item())


# — the average of the parameters —


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
    model = vae.build(replace(DEMO, width=0.1, latents=4), 16)
    average = AveragedModel(model, multi_avg_fn=vae.moving_average(50))
    seen = []
    for _ in range(4):
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
        average.update_parameters(model)
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    expected = dict(seen[0])
    for count, now in enumerate(seen[1:], 1):
        rate = max(1 / 50, 9 / (10 + count))
        expected = {name: p.lerp(now[name], rate) for name, p in expected.items()}
    torch.testing.assert_close(dict(average.module.named_parameters()), expected)
    layers = dict(average.module.named_modules())
    for name, (v, g) in normalized_weights(average.module).items():
        layer = layers[name.removesuffix(".weight")]
        masked = v * getattr(layer, "mask", torch.ones(()))
        axes = [d for d in range(v.dim()) if g.shape[d] == 1]
        length = masked.square().sum(axes, keepdim=True).sqrt()
        torch.testing.assert_close(layer.weight, g * masked / length.clamp_min(1e-12))


# — importance sampling —


class Line(VAE):
    """z ~ N(0, 1), x|z ~ N(z, 1), so x ~ N(0, 2); with an approximate posterior."""

    def __init__(self):
        super().__init__()
        self.decoded = []

    def encode(self, x):
        return (x,)

    def decode(self, code, *, at_sample=False):
        assert at_sample
        self.decoded.append(len(code[0]))
        q = Gaussian(0.3 * code[0], torch.full_like(code[0], -0.2))
        z = q.sample()
        prior = Gaussian(torch.zeros(1), torch.zeros(1))
        return z, (q.log_density(z) - prior.log_density(z)).unsqueeze(1)

    def log_likelihood(self, x, output):
        return Gaussian(output, torch.zeros(1)).log_density(x).sum(1)

    generate = image = None


def test_importance_sampling_converges_to_the_true_likelihood():
    x = torch.linspace(-2, 2, 5)[:, None]
    logs = vae.log_importance_weights(Line(), x, 20_000)
    estimate = logs.logsumexp(1) - math.log(20_000)
    truth = Normal(0, math.sqrt(2)).log_prob(x[:, 0])
    torch.testing.assert_close(estimate, truth, atol=0.02, rtol=0)
    q = Gaussian(0.3 * x, torch.tensor(-0.2))
    gap = gaussian_kl(q, Gaussian(x / 2, torch.tensor(-math.log(2) / 2)))[:, 0]
    torch.testing.assert_close(logs.mean(1), truth - gap, atol=0.03, rtol=0)


@pytest.mark.parametrize(("examples", "samples", "rows"), [(7, 50, 30), (40, 3, 40)])
def test_importance_sampling_has_bounded_memory(examples, samples, rows):
    x, model = torch.zeros(examples, 1), Line()
    logs = vae.log_importance_weights(model, x, samples, max_rows=30)
    assert logs.shape == (examples, samples)
    assert max(model.decoded) <= rows
    assert sum(model.decoded) == examples * samples


def test_estimates_from_importance_samples(monkeypatch):
    """log p(x) ≈ log mean w and ELBO ≈ mean log w, averaged over all examples."""
    examples = vae.EVAL_BATCH + 3
    logs = torch.randn(examples, 4, dtype=torch.float64)
    monkeypatch.setattr(vae, "log_importance_weights", lambda _, x, *__, **___: logs[x.long()])
    config = replace(DEMO, importance_samples=4, importance_examples=examples)
    run = Run("vae", config, vae.PRESETS)
    found = vae.estimate(torch.nn.Identity(), torch.arange(900.0), config, run)
    assert found == pytest.approx(
        {
            "importance_negative_log_likelihood": -logs.exp().mean(1).log().mean().item(),
            "importance_negative_elbo": -logs.mean().item(),
        }
    )


# — a whole run —


@pytest.mark.parametrize("how", vae.Config.COMPARED)
def test_run_on_cifar10(monkeypatch, tmp_path, how):
    """With forty synthetic images in place of CIFAR-10."""
    small = torch.rand(40, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    images = (torch.nn.functional.interpolate(small, scale_factor=8.0) * 255).to(torch.uint8)
    labels = torch.zeros(40, dtype=torch.long)
    data = Labelled(images[:30], labels[:30], images[30:], labels[30:], ("blur",))
    monkeypatch.setattr(vae, "load_cifar10", lambda _: data)
    config = replace(
        vae.PRESETS["cpu cifar10"], parameterization=how, width=0.1, depth=1, latents=2, epochs=3,
        batch_size=10, importance_samples=20, out=tmp_path,
    )  # fmt: skip
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
