"""Likelihoods and divergences against torch.distributions and 50-digit arithmetic."""

import itertools

import mpmath
import pytest
import torch
from torch.distributions import Bernoulli, Normal, kl_divergence

from weightnorm.lab.vae import (
    Gaussian,
    bernoulli_log_likelihood,
    discretized_logistic_log_likelihood,
    gaussian_kl,
)


def gaussian(*shape):
    return Gaussian(torch.randn(shape), torch.randn(shape))


def in_torch(g):
    return Normal(g.mean, g.log_std.exp())


def test_gaussian_matches_torch():
    q, p, z = gaussian(3, 5), gaussian(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(q.log_density(z), in_torch(q).log_prob(z))
    torch.testing.assert_close(gaussian_kl(q, p), kl_divergence(in_torch(q), in_torch(p)))
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


def test_bernoulli_matches_torch_and_is_stable_for_large_logits():
    x, logits = torch.rand(100).round(), 5 * torch.randn(100)
    torch.testing.assert_close(
        bernoulli_log_likelihood(x, logits), Bernoulli(logits=logits).log_prob(x)
    )
    great = bernoulli_log_likelihood(torch.tensor([1.0, 0.0]), torch.tensor([-1e4, -1e4]))
    assert great.tolist() == [-1e4, 0]


PIXELS = torch.arange(256.0)
LOG_SCALES = (-14.0, -7.0, -3.5, -1.0, 4.0, 20.0)
MEANS = (-0.5, 0.0, 0.333, 0.998, 1.5)
CASES = [*itertools.product(MEANS, LOG_SCALES)]


def exact(mean, log_scale):
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


@pytest.mark.parametrize(("mean", "log_scale"), CASES)
def test_discretized_logistic_is_exact_in_all_256_bins(mean, log_scale):
    mean, log_scale = torch.tensor(mean), torch.tensor(log_scale)
    got = discretized_logistic_log_likelihood(PIXELS, mean, log_scale)
    expected = exact(mean.item(), log_scale.item())
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)
    wide = discretized_logistic_log_likelihood(PIXELS.double(), mean.double(), log_scale.double())
    torch.testing.assert_close(wide, expected, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(("mean", "log_scale"), CASES)
def test_discretized_logistic_sums_to_1(mean, log_scale):
    log_mass = discretized_logistic_log_likelihood(
        PIXELS, torch.tensor(mean), torch.tensor(log_scale)
    )
    assert log_mass.logsumexp(0).item() == pytest.approx(0, abs=2e-5)


@pytest.mark.parametrize("log_scale", LOG_SCALES)
def test_discretized_logistic_has_finite_gradients(log_scale):
    mean = torch.full((256,), 0.4, requires_grad=True)
    scale = torch.full((256,), log_scale, requires_grad=True)
    discretized_logistic_log_likelihood(PIXELS, mean, scale).sum().backward()
    assert mean.grad.isfinite().all()
    assert scale.grad.isfinite().all()
    assert (mean.grad[:100] <= 0).all()  # the mean should be lower
    assert (mean.grad[-100:] >= 0).all()
