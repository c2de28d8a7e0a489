"""Networks of the VAE: likelihoods, the flow's dependencies and density, shapes, the bound."""

import math
from dataclasses import replace
from itertools import pairwise

import mpmath
import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from weightnorm import data_dependent_init, is_weight_normed, normalized_weights, parts
from weightnorm.lab import vae
from weightnorm.lab.vae_networks import (
    AutoregressiveStep,
    Gaussian,
    MaskedLinear,
    Posterior,
    degrees,
    discretized_logistic_log_likelihood,
    gaussian_kl,
    kernel_mask,
    mask_between,
)

# — likelihoods —


def test_gaussian_matches_torch():
    q, p = (Gaussian(torch.randn(3, 5), torch.randn(3, 5)) for _ in range(2))
    theirs = [Normal(each.mean, each.log_std.exp()) for each in (q, p)]
    z = torch.randn(3, 5)
    torch.testing.assert_close(q.log_density(z), theirs[0].log_prob(z))
    torch.testing.assert_close(gaussian_kl(q, p), kl_divergence(*theirs))
    assert (gaussian_kl(q, q) == 0).all()


def test_gaussian_samples_have_its_moments_and_gradients():
    mean, log_std = torch.tensor([3.0, -1.0]), torch.tensor([0.5, -2.0])
    z = Gaussian(mean.expand(20_000, 2), log_std.expand(20_000, 2)).sample()
    torch.testing.assert_close(z.mean(0), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(z.std(0).log(), log_std, atol=0.05, rtol=0)
    moved = [x.clone().requires_grad_() for x in (mean, log_std)]
    Gaussian(*moved).sample().sum().backward()
    assert (moved[0].grad == 1).all()
    assert (moved[1].grad != 0).all()


PIXELS = torch.arange(256.0)


def log_masses(mean, log_scale):
    """log-probability of each of the 256 bins, with 50 digits."""
    with mpmath.workdps(50):
        sigma = lambda x: 1 / (1 + mpmath.exp(-x))  # noqa: E731
        edges = [
            (mpmath.mpf(p) / 256 - mpmath.mpf(mean)) / mpmath.exp(log_scale) for p in range(1, 256)
        ]
        # From the tail nearer to 0, so that even 10⁻¹⁰⁰⁰⁰⁰⁰ keeps its digits.
        lows, highs = [-mpmath.inf, *edges], [*edges, mpmath.inf]
        masses = [
            sigma(-a) - sigma(-b) if a > 0 else sigma(b) - sigma(a)
            for a, b in zip(lows, highs, strict=True)
        ]
        return torch.tensor([float(mpmath.log(mass)) for mass in masses], dtype=torch.float64)


@pytest.mark.parametrize(
    ("mean", "log_scale"),
    [(-0.5, -7.0), (0.0, -14.0), (0.333, -3.5), (0.998, -1.0), (1.5, 4.0), (0.333, 20.0)],
)
def test_discretized_logistic_is_exact_in_all_256_bins(mean, log_scale):
    """So its probabilities sum to 1. Its gradients are finite, and move the mean to the pixel."""
    inputs = [torch.full((256,), x, requires_grad=True) for x in (mean, log_scale)]
    got = discretized_logistic_log_likelihood(PIXELS, *inputs)
    expected = log_masses(inputs[0][0].item(), inputs[1][0].item())
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)
    wide = [x.detach().double() for x in (PIXELS, *inputs)]
    found = discretized_logistic_log_likelihood(*wide)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)
    got.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)
    if 0.3 < mean < 0.4:
        assert (inputs[0].grad[:80] <= 0).all()
        assert (inputs[0].grad[-80:] >= 0).all()


# — the flow —

KINDS = [pytest.param(k, n, id=f"{k}-{n}") for k, n in [("vector", True), ("maps", False)]]
KINDS += [pytest.param("maps", True, id="maps-True")]
SHAPES = {"vector": (5,), "maps": (2, 3, 4)}
HIDDEN = {"vector": (15, 10), "maps": (6,)}


def posterior(kind, normalize, steps):
    kernel = None if kind == "vector" else 3
    flow = Posterior(steps, SHAPES[kind][0], HIDDEN[kind], kernel, normalize=normalize).double()
    for p in flow.parameters():
        nn.init.normal_(p, std=0.5)
    return flow


def context(kind):
    return torch.randn(1, HIDDEN[kind][0], *SHAPES[kind][1:], dtype=torch.float64)


def in_order(x, kind):
    """Elements in the order of the flow: pixel by pixel, and channel by channel at each."""
    return x.flatten() if kind == "vector" else x.movedim(0, -1).flatten()


def jacobian(fn, kind, z):
    """∂fn/∂z, rows and columns in the order of the flow."""
    order = in_order(torch.arange(z.numel()).view(z.shape), kind)
    full = torch.autograd.functional.jacobian(lambda z: fn(z[None])[0].flatten(), z).flatten(1)
    return full[order][:, order]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("kind", "normalize"), KINDS)
def test_m_and_s_depend_on_earlier_elements_only(kind, normalize, reverse):
    step, c = posterior(kind, normalize, 2).steps[reverse], context(kind)
    z = torch.randn(SHAPES[kind], dtype=torch.float64)
    slope = jacobian(lambda z: step(z, c)[1], kind, z)
    slope = slope.T if reverse else slope
    assert (slope.triu() == 0).all()
    if kind == "vector":  # and on all of the earlier elements
        assert (slope[torch.tril_indices(5, 5, -1).unbind()] != 0).all()
    else:  # and at least on the preceding element
        assert (slope.diagonal(-1)[1::2] != 0).sum() > 3


@pytest.mark.parametrize(("kind", "normalize"), KINDS)
def test_log_q_is_the_density_of_the_sample(kind, normalize):
    """log q(z) = log N(z₀) − log |det ∂z/∂z₀|."""
    flow, c = posterior(kind, normalize, 3), context(kind)
    base = Gaussian(*torch.randn(2, 1, *SHAPES[kind], dtype=torch.float64))
    flat = Gaussian(torch.zeros(()), torch.tensor(-0.5 * math.log(2 * math.pi)))  # log p ≈ const.
    torch.manual_seed(3)
    z, kl = flow(base, c, flat)
    torch.manual_seed(3)
    start = base.sample()

    def transformed(at):
        for step in flow.steps:
            at, _ = step(at, c)
        return at

    assert torch.equal(z, transformed(start))
    log_q = (kl + flat.log_density(z)).sum().item()
    slope = jacobian(transformed, kind, start[0])
    expected = base.log_density(start).sum() - torch.linalg.slogdet(slope).logabsdet
    assert log_q == pytest.approx(expected.item(), abs=1e-6)


def test_context_affects_every_element_but_the_first():
    step, z = posterior("vector", True, 1).steps[0], torch.randn(1, 5, dtype=torch.float64)
    one, other = (step(z, context("vector"))[0] for _ in range(2))
    assert (one != other).tolist() == [[False, True, True, True, True]]


def test_diagonal_of_the_mask_is_zero_in_exactly_one_layer():
    step = AutoregressiveStep(4, (8, 8), None, reverse=False, normalize=False)
    reached = [layer.mask for layer in step.layers]
    by_layer = [degrees(units, 4) for units in (4, 8, 8)] + [degrees(4, 4).repeat(2)]
    own = [
        mask[out[:, None] == into[None, :]].unique().tolist()
        for mask, (into, out) in zip(reached, pairwise(by_layer), strict=True)
    ]
    assert own == [[1.0], [1.0], [0.0]]


def test_kernel_mask_covers_earlier_pixels():
    channels = mask_between(degrees(2, 2), degrees(2, 2), diagonal=True)
    mask = kernel_mask(channels, 3)
    assert mask[0, 0].tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    assert mask[0, 1].tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    reverse = kernel_mask(channels.flip(0, 1), 3, reverse=True)
    assert torch.equal(reverse, mask.flip(0, 1, 2, 3))


@pytest.mark.parametrize("kernel", [None, 3])
def test_norm_is_that_of_the_masked_weight(kernel):
    step = AutoregressiveStep(4, (8,), kernel, reverse=False, normalize=True)
    for layer in step.layers:
        assert is_weight_normed(layer)
        v, g = parts(layer)
        assert (layer.weight[layer.mask == 0] == 0).all()
        seen = (v * layer.mask).flatten(1)
        expected = torch.where(seen.any(1), g.flatten().abs(), 0.0)
        torch.testing.assert_close(layer.weight.flatten(1).norm(dim=1), expected)


def test_posterior_without_steps_has_an_exact_kl():
    flow, prior = Posterior(0, 3, (), normalize=True), Gaussian(*torch.randn(2, 3))
    base = Gaussian(*torch.randn(2, 40_000, 3)[:, :1].expand(2, 40_000, 3))
    _, exact = flow(base, torch.zeros(0), prior)
    _, sampled = flow(base, torch.zeros(0), prior, at_sample=True)
    assert exact.std(0).max() < 1e-5
    torch.testing.assert_close(exact.mean(0), sampled.mean(0), atol=0.05, rtol=0.05)


def test_m_and_s_are_a_tenth_of_the_last_layers_output():
    step = posterior("vector", False, 1).steps[0]
    last = step.layers[-1]
    assert isinstance(last, MaskedLinear)
    nn.init.zeros_(last.weight)
    mean, log_scale = last.bias.detach().chunk(2)
    z = torch.randn(1, 5, dtype=torch.float64)
    moved, growth = step(z, context("vector"))
    torch.testing.assert_close(growth[0], 0.1 * log_scale)
    torch.testing.assert_close(moved[0], (z[0] - 0.1 * mean) / (0.1 * log_scale).exp())


# — the auto-encoders —

PRESETS = {
    "mnist": replace(vae.PRESETS["paper"], width=0.2, depth=1, latents=4),
    "cifar10": replace(vae.PRESETS["paper cifar10"], width=0.1, depth=1, latents=3),
}
NETWORKS = pytest.mark.parametrize("data", PRESETS)


def images(data, count=6):
    if data == "mnist":
        return torch.rand(count, 1, 8, 8).round()
    return torch.randint(0, 256, (count, 3, 32, 32)).float()


def small(data, how="weight-norm", **more):
    """A small network, initialized on data."""
    model = vae.build(replace(PRESETS[data], parameterization=how, **more), 8)
    data_dependent_init(model, images(data, 60), target_std=model.target_std)
    return model


def trained(data, steps=10, **more):
    """A small network after a few steps, its bound neither tight nor very loose, and its images."""
    model, x = small(data, **more), images(data, 10)
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        (-model(x).elbo.mean()).backward()
        optimizer.step()
    return model, x


def layer_shapes(model, x):
    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            module.register_forward_hook(
                lambda m, i, o, name=name: shapes.update({name: tuple(o.shape[1:])})
            )
    model(x)
    return shapes


def test_mnist_network_is_the_papers():
    model = vae.build(vae.PRESETS["paper"], 28)
    shapes = layer_shapes(model, torch.zeros(1, 1, 28, 28))

    def of(part):
        return [shape for name, shape in shapes.items() if name.startswith(part)]

    large, middle, low = (16, 28, 28), (32, 14, 14), (32, 7, 7)
    assert of("encoder") == [*[large] * 5, *[middle] * 5, *[low] * 5, (450,)]
    outputs = [*[low] * 4, *[middle] * 5, *[large] * 5, (1, 28, 28)]
    assert of("decoder") == [(450,), (1568,), *outputs]
    assert (shapes["posterior_base"], shapes["context"]) == ((64,), (320,))
    assert of("posterior.") == 2 * [(320,), (320,), (64,)]
    assert len(normalized_weights(model)) == len(shapes)


def test_cifar10_network_is_the_authors():
    model = vae.build(vae.PRESETS["paper cifar10"], 32)
    shapes = layer_shapes(model, torch.zeros(1, 3, 32, 32))
    assert shapes["enter"] == (64, 16, 16)
    assert shapes["leave"] == (3, 32, 32)
    sides = [16, 16, 8, 8, 4, 4]
    for i, side in enumerate(sides):
        up = 64 * (i < 5)  # the top layer has no output upwards
        assert shapes[f"layers.{i}.up1"] == (up + 2 * 32 + 64, side, side)
        assert shapes[f"layers.{i}.down1"] == (64 + 4 * 32 + 64, side, side)
        assert shapes[f"layers.{i}.posterior.steps.0.layers.0"] == (64, side, side)
        assert shapes[f"layers.{i}.posterior.steps.0.layers.1"] == (64, side, side)
        below = [16, *sides][i]
        assert shapes[f"layers.{i}.down2"] == (64, below, below)
    assert model(torch.zeros(2, 3, 32, 32)).kl.shape == (2, 6, 32)
    assert len(normalized_weights(model)) == len(shapes)


@NETWORKS
@pytest.mark.parametrize("posterior", ["iaf", "diagonal"])
def test_terms_images_and_gradients(data, posterior):
    model, x = trained(data, steps=2, posterior=posterior)  # `top` alone has a gradient at first
    terms = model(x)
    assert terms.log_likelihood.shape == (10,)
    assert terms.kl.shape == ((10, 1, 4) if data == "mnist" else (10, 3, 3))
    torch.testing.assert_close(terms.elbo, terms.log_likelihood - terms.kl.sum((1, 2)))
    for output in (model.decode(model.encode(x))[0], model.generate(10)):
        pictures = model.image(output)
        assert pictures.shape == x.shape
        assert 0 <= pictures.min() <= pictures.max() <= 1
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert (p.grad != 0).any(), name


@NETWORKS
def test_both_parameterizations_start_as_the_same_function_near_the_prior(data):
    x, found = images(data), []
    for how in ("standard", "weight-norm"):
        torch.manual_seed(1)
        model = small(data, how)
        assert bool(normalized_weights(model)) == (how == "weight-norm")
        torch.manual_seed(2)
        found.append(model(x))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)
    assert found[0].kl.sum((1, 2)).mean() < 0.1 * x[0].numel()


@NETWORKS
@pytest.mark.parametrize("posterior", ["iaf", "diagonal"])
def test_bound_is_below_the_importance_sampled_likelihood(data, posterior):
    model, x = trained(data, posterior=posterior)
    with torch.no_grad():
        logs = vae.log_importance_weights(model, x, 64)
        bound = torch.stack([model(x).elbo for _ in range(16)]).mean()
    estimates = [
        (logs.view(10, -1, k).logsumexp(2) - math.log(k)).mean().item() for k in (1, 4, 16, 64)
    ]
    assert estimates == sorted(estimates)
    assert estimates[-1] - estimates[0] > 0.1
    assert bound.item() == pytest.approx(estimates[0], rel=0.02)
