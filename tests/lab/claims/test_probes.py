"""Probes against their definitions."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from weightnorm import remove_weight_norm, weight_norm_model
from weightnorm.lab.claims.probes import (
    batch_statistics,
    example_gradients,
    excess_kurtosis,
    pre_activations,
    weight_rows,
)
from weightnorm.lab.claims.problem import Problem


def test_example_gradients_match_separate_backward_passes():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5)).double()
    weight_norm_model(model)
    x, y = torch.randn(6, 1, 6, 6).double(), torch.randint(5, (6,))
    found = example_gradients(model, nn.functional.cross_entropy, x, y)
    assert list(found) == ["0.weight", "3.weight"]
    plain = deepcopy(model)
    remove_weight_norm(plain)
    for i in range(len(x)):
        plain.zero_grad()
        nn.functional.cross_entropy(plain(x[i : i + 1]), y[i : i + 1]).backward()
        torch.testing.assert_close(found["0.weight"][i], plain[0].weight.grad.flatten(1))
        torch.testing.assert_close(found["3.weight"][i], plain[3].weight.grad)
    for rows in (weight_rows(model), weight_rows(plain)):
        torch.testing.assert_close(rows["0.weight"], plain[0].weight.detach().flatten(1))
    assert len([*model.parameters()]) > len([*plain.parameters()])  # its own weight norm is kept


def test_kurtosis_of_known_distributions():
    uniform = torch.rand(200_000, 1, generator=torch.Generator().manual_seed(3)).double()
    assert excess_kurtosis(uniform).item() == pytest.approx(-1.2, abs=0.02)
    assert excess_kurtosis(torch.tensor([-1.0, 1.0] * 4)).item() == pytest.approx(-2)


@pytest.mark.parametrize(
    ("space", "shift", "dtype", "tolerance"),
    [
        ((), 0.0, torch.float64, 1e-9),
        ((3, 2), 0.0, torch.float64, 1e-9),
        ((5,), 3000.0, torch.float32, 2e-3),
    ],
)
def test_batch_statistics_match_a_loop_also_for_large_means(space, shift, dtype, tolerance):
    t = (torch.randn(400, 3, *space, dtype=torch.float64) + shift).to(dtype)
    found = batch_statistics(t, 50, 20, torch.Generator().manual_seed(0))
    rows = torch.randint(400, (20, 50), generator=torch.Generator().manual_seed(0))
    axes = [0, *range(2, t.ndim)]
    batches = [t.double()[r] for r in rows]
    mean = torch.stack([batch.mean(axes) for batch in batches])
    variance = torch.stack([batch.var(axes, correction=0) for batch in batches])
    torch.testing.assert_close(found.mean.double(), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.variance.double(), variance, rtol=tolerance, atol=0)
    torch.testing.assert_close(found.inverse_std.double(), variance.rsqrt(), rtol=tolerance, atol=0)


def test_batch_statistics_of_a_constant_channel_are_finite():
    t = torch.randn(50, 2)
    t[:, 1] = 7.3
    found = batch_statistics(t, 8, 20, torch.Generator().manual_seed(0))
    assert all(x.isfinite().all() for x in found)
    assert (found.variance > 0).all()
    torch.testing.assert_close(found.mean[:, 1], torch.full((20,), 7.3))


@pytest.mark.parametrize("how", ["weight-norm", "batch-norm", "weight-norm-mean-only"])
def test_pre_activations_of_every_layer(how):
    problem = Problem("digits")
    found = pre_activations(problem.network(how, 1).eval(), problem.data.train[:7])
    assert [tuple(t.shape) for t in found] == [(7, 48)] * 3 + [(7, 10)]
