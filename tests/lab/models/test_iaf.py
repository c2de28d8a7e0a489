"""Inverse autoregressive flow: dependencies between elements, and the density."""

import pytest
import torch
from torch import nn

from weightnorm import is_weight_normed, parts
from weightnorm.lab.vae import (
    AutoregressiveStep,
    Gaussian,
    MaskedConv2d,
    MaskedLinear,
    Posterior,
    degrees,
    kernel_mask,
    mask_between,
)

KINDS = [pytest.param(k, n, id=f"{k}-{n}") for k in ("vector", "maps") for n in (True, False)]
SHAPES = {"vector": (5,), "maps": (2, 3, 4)}
HIDDEN = {"vector": (15, 10), "maps": (6,)}


def posterior(kind, normalize, steps):
    kernel = None if kind == "vector" else 3
    built = Posterior(
        steps, SHAPES[kind][0], HIDDEN[kind], normalize=normalize, kernel=kernel
    ).double()
    for p in built.parameters():
        nn.init.normal_(p, std=0.5)
    return built


def context(kind):
    return torch.randn(1, HIDDEN[kind][0], *SHAPES[kind][1:], dtype=torch.float64)


def in_order(x, kind):
    """Elements in the order of the flow: pixel by pixel, and channel by channel at each."""
    return x.flatten() if kind == "vector" else x.movedim(0, -1).flatten()


def jacobian(fn, kind):
    """∂fn/∂z by central differences, rows and columns in the order of the flow."""
    z = torch.randn(SHAPES[kind], dtype=torch.float64)
    columns = []
    for i in in_order(torch.arange(z.numel()).view(z.shape), kind):
        nudge = torch.zeros(z.numel(), dtype=torch.float64)
        nudge[i] = 1e-5
        nudge = nudge.view(z.shape)
        difference = fn((z + nudge)[None]) - fn((z - nudge)[None])
        columns.append(in_order(difference[0] / 2e-5, kind))
    return torch.stack(columns, dim=1), z


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("kind", "normalize"), KINDS)
def test_m_and_s_depend_on_earlier_elements_only(kind, normalize, reverse):
    step, c = posterior(kind, normalize, 2).steps[reverse], context(kind)
    slope, _ = jacobian(lambda z: step(z, c)[1], kind)
    slope = slope.T if reverse else slope
    assert (slope.triu() == 0).all()
    if kind == "vector":  # and on all of the earlier elements
        assert (slope[torch.tril_indices(5, 5, -1).unbind()] != 0).all()
    else:  # and at least on the preceding element
        assert (slope.diagonal(-1)[1::2] != 0).sum() > 3


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(("kind", "normalize"), KINDS)
def test_log_q_increases_by_the_log_determinant(kind, normalize, steps):
    flow, c = posterior(kind, normalize, steps), context(kind)

    def forward(z):
        for step in flow.steps:
            z, _ = step(z, c)
        return z

    slope, z = jacobian(forward, kind)
    growth, at = 0.0, z[None]
    for step in flow.steps:
        at, s = step(at, c)
        growth += s.sum().item()
    assert growth == pytest.approx(-torch.linalg.slogdet(slope).logabsdet.item(), abs=1e-6)
    assert abs(growth) > 0.01


@pytest.mark.parametrize(("kind", "normalize"), KINDS)
def test_log_q_is_the_density_of_the_sample(kind, normalize):
    flow, c = posterior(kind, normalize, 2), context(kind)
    base = Gaussian(*torch.randn(2, 1, *SHAPES[kind], dtype=torch.float64))
    torch.manual_seed(3)
    z, log_q = flow.sample(base, c)
    torch.manual_seed(3)
    at = base.sample()
    total = base.log_density(at).sum()
    for step in flow.steps:
        at, s = step(at, c)
        total = total + s.sum()
    assert torch.equal(z, at)
    assert log_q.shape == z.shape
    assert log_q.sum().item() == pytest.approx(total.item())


def test_density_of_a_flow_integrates_to_1():
    """By quadrature over the plane, for a flow of two elements."""
    flow = Posterior(2, 2, (8,), normalize=True).double()
    for p in flow.parameters():
        nn.init.normal_(p, std=0.5)
    axis = torch.linspace(-9, 9, 301, dtype=torch.float64)
    z0 = torch.cartesian_prod(axis, axis)
    base = Gaussian(*torch.zeros(2, *z0.shape, dtype=torch.float64))
    z, log_q = z0, base.log_density(z0)
    c = torch.zeros(1, 8, dtype=torch.float64)
    for step in flow.steps:
        z, s = step(z, c)
        log_q = log_q + s
    mesh = z.view(301, 301, 2)
    down, right = mesh[1:, :-1] - mesh[:-1, :-1], mesh[:-1, 1:] - mesh[:-1, :-1]
    area = (down[..., 0] * right[..., 1] - down[..., 1] * right[..., 0]).abs()
    mass = (log_q.sum(1).exp().view(301, 301)[:-1, :-1] * area).sum()
    assert mass.item() == pytest.approx(1, abs=0.01)


def test_context_affects_every_element_but_the_first():
    flow = posterior("vector", True, 1)
    z = torch.randn(1, 5, dtype=torch.float64)
    moved = flow.steps[0](z, context("vector"))[0] - flow.steps[0](z, context("vector"))[0]
    assert (moved[0] != 0).tolist() == [False, True, True, True, True]


def test_mask_excludes_the_diagonal_in_the_last_layer_only():
    step = AutoregressiveStep(4, (8, 8), MaskedLinear, reverse=False, normalize=True)
    diagonals = []
    for layer in step.layers:
        rows, columns = degrees(layer.out_features, 4), degrees(layer.in_features, 4)
        if layer is step.layers[-1]:
            rows = degrees(4, 4).repeat(2)
        same = rows[:, None] == columns[None, :]
        diagonals.append(set(layer.mask[same].tolist()))
    assert diagonals == [{1.0}, {1.0}, {0.0}]


def test_kernel_mask_covers_earlier_pixels():
    channels = mask_between(degrees(2, 2), degrees(2, 2), diagonal=True)
    mask = kernel_mask(channels, 3)
    assert mask[0, 0].tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    assert mask[0, 1].tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    reverse = kernel_mask(channels.flip(0, 1), 3, reverse=True)
    assert torch.equal(reverse, mask.flip(0, 1, 2, 3))


@pytest.mark.parametrize("masked", [MaskedLinear, MaskedConv2d])
def test_norm_is_that_of_the_masked_weight(masked):
    def with_taps(mask):
        return masked(mask if masked is MaskedLinear else kernel_mask(mask, 3))

    step = AutoregressiveStep(4, (8,), with_taps, reverse=False, normalize=True)
    for layer in step.layers:
        assert is_weight_normed(layer)
        v, g = parts(layer)
        assert (layer.weight[layer.mask == 0] == 0).all()
        seen = (v * layer.mask).flatten(1)
        norm = layer.weight.flatten(1).norm(dim=1)
        expected = torch.where(seen.any(1), g.flatten().abs(), 0.0)
        torch.testing.assert_close(norm, expected)


def test_posterior_without_steps_has_an_exact_kl():
    flow, prior = Posterior(0, 3, (), normalize=True), Gaussian(*torch.randn(2, 3))
    base = Gaussian(*torch.randn(2, 40_000, 3)[:, :1].expand(2, 40_000, 3))
    _, exact = flow(base, torch.zeros(0), prior)
    _, sampled = flow(base, torch.zeros(0), prior, at_sample=True)
    assert exact.std(0).max() < 1e-5
    torch.testing.assert_close(exact.mean(0), sampled.mean(0), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("normalize", [True, False])
def test_masked_weights_have_no_gradient(normalize):
    step = AutoregressiveStep(4, (8,), MaskedLinear, reverse=True, normalize=normalize)
    z, growth = step(torch.randn(6, 4), torch.randn(6, 8))
    (z.square().sum() + growth.sum()).backward()
    for layer in step.layers:
        grad = parts(layer).v.grad if normalize else layer.weight.grad
        assert (grad[layer.mask == 0] == 0).all()
        assert (grad[layer.mask == 1] != 0).any()


def test_m_and_s_are_a_tenth_of_the_last_layers_output():
    step = posterior("vector", False, 1).steps[0]
    last = step.layers[-1]
    nn.init.zeros_(last.weight)
    mean, log_scale = last.bias.detach().chunk(2)
    z = torch.randn(1, 5, dtype=torch.float64)
    moved, growth = step(z, context("vector"))
    torch.testing.assert_close(growth[0], 0.1 * log_scale)
    torch.testing.assert_close(moved[0], (z[0] - 0.1 * mean) / (0.1 * log_scale).exp())
