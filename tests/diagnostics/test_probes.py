"""Probes against their definitions."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from weightnorm import parts, remove_weight_norm, weight_norm, weight_norm_model
from weightnorm.diagnostics import (
    batch_statistics,
    direction_angle,
    effective_step,
    example_gradients,
    excess_kurtosis,
    gradient_covariance,
    noise_kurtosis,
    v_norms,
    weight_rows,
)
from weightnorm.diagnostics.probes import angles
from zoo import every_layer


def test_norm_and_effective_step_of_every_unit():
    model = nn.Sequential(nn.Linear(4, 3), nn.ConvTranspose1d(4, 6, 3, groups=2), nn.GRU(3, 2))
    weight_norm_model(model)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    norms, steps = v_norms(model), effective_step(model)
    assert (
        list(norms) == list(steps) == ["0.weight", "1.weight", "2.weight_ih_l0", "2.weight_hh_l0"]
    )
    v, g = parts(model[0])
    torch.testing.assert_close(norms["0.weight"], v.norm(dim=1))
    torch.testing.assert_close(steps["0.weight"], g.abs().flatten() / v.norm(dim=1))
    v = parts(model[1]).v
    expected = torch.cat([half.norm(dim=(0, 2)) for half in v.chunk(2)])
    torch.testing.assert_close(norms["1.weight"], expected)


def test_log_scales_masks_and_zero_rows():
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    layer = weight_norm(nn.Linear(2, 3), scale="log", mask=mask)
    v, g = parts(layer)
    torch.testing.assert_close(v_norms(layer)["weight"], (v * mask).norm(dim=1))
    step = effective_step(layer)["weight"]
    torch.testing.assert_close(step[:2], (g.flatten() / (v * mask).norm(dim=1))[:2])
    assert step[2] == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("flavour", [nn.utils.weight_norm, parametrizations.weight_norm])
def test_torchs_weight_norm(flavour):
    layer = flavour(nn.Linear(4, 3))
    torch.testing.assert_close(v_norms(layer)["weight"], parts(layer).v.norm(dim=1))
    torch.testing.assert_close(effective_step(layer)["weight"], torch.ones(3))


# Rows and angles


@every_layer
def test_one_row_per_output_unit(case):
    layer = case.make()
    rows, plain = weight_rows(weight_norm(layer)), weight_rows(case.make())
    is_lookup = isinstance(layer, (nn.Embedding, nn.EmbeddingBag))  # not a weight by default
    assert {name: x.shape for name, x in rows.items()} == {
        name: x.shape for name, x in plain.items()
    } or (is_lookup and not plain)
    for name, norm in v_norms(layer).items():
        g = effective_step(layer)[name] * norm
        torch.testing.assert_close(rows[name].norm(dim=1), g)


@pytest.mark.parametrize("groups", [1, 2])
def test_row_is_the_weight_vector_of_its_unit(groups):
    conv = nn.ConvTranspose2d(4, 6, 3, groups=groups, bias=False)
    rows = weight_rows(weight_norm(conv))["weight"]
    for unit in range(6):
        layer = nn.ConvTranspose2d(4, 6, 3, groups=groups, bias=False)
        layer.weight.data.copy_(conv.weight)
        group, inner = divmod(unit, 6 // groups)
        block = layer.weight.data[group * 4 // groups : (group + 1) * 4 // groups, inner]
        torch.testing.assert_close(rows[unit], block.flatten())


@pytest.mark.parametrize("angle", [0.0, 1e-7, 0.3, 1.5, 3.0, math.pi])
@pytest.mark.parametrize("wrapped", [True, False])
def test_angles_small_and_large(angle, wrapped):
    layer = nn.Linear(2, 2, dtype=torch.float64)
    layer.weight.data = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    layer = weight_norm(layer) if wrapped else layer
    before = weight_rows(layer)
    with torch.no_grad():
        target = parts(layer).v if wrapped else layer.weight
        target[0] = torch.tensor([math.cos(angle), math.sin(angle)])
    found = direction_angle(layer, before)["weight"]
    assert found[0].item() == pytest.approx(angle, rel=1e-6, abs=1e-12)
    assert found[1] == 0


# Gradients of single examples


def network():
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.ReLU(), nn.ConvTranspose2d(3, 4, 2, groups=1), nn.Flatten(),
        nn.Linear(4 * 25, 5),
    ).double()  # fmt: skip
    return model, torch.randn(6, 1, 6, 6).double(), torch.randint(5, (6,))


def test_example_gradients_match_separate_backward_passes():
    model, x, y = network()
    weight_norm_model(model)
    found = example_gradients(model, nn.functional.cross_entropy, x, y)
    assert list(found) == ["0.weight", "2.weight", "4.weight"]
    plain = deepcopy(model)
    remove_weight_norm(plain)
    for i in range(len(x)):
        plain.zero_grad()
        nn.functional.cross_entropy(plain(x[i : i + 1]), y[i : i + 1]).backward()
        torch.testing.assert_close(found["0.weight"][i], plain[0].weight.grad.flatten(1))
        rows = plain[2].weight.grad.transpose(0, 1).flatten(1)
        torch.testing.assert_close(found["2.weight"][i], rows)
        torch.testing.assert_close(found["4.weight"][i], plain[4].weight.grad)


def test_unknown_weight_name_raises():
    model, x, y = network()
    with pytest.raises(ValueError, match=r"no weight '1.weight'; there are 0.weight, 2.weight"):
        example_gradients(model, nn.functional.cross_entropy, x, y, ["1.weight"])
    only = example_gradients(model, nn.functional.cross_entropy, x, y, ["4.weight"])
    assert list(only) == ["4.weight"]


def test_covariance_matches_numpy():
    gradients = torch.randn(50, 3, 4, dtype=torch.float64)
    found = gradient_covariance(gradients)
    for unit in range(3):
        expected = torch.from_numpy(np.cov(gradients[:, unit].numpy().T, bias=True))
        torch.testing.assert_close(found[unit], expected)


# Noise of batch statistics


def test_kurtosis_of_known_distributions():
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(200_000, 1, generator=generator, dtype=torch.float64)
    assert excess_kurtosis(uniform).item() == pytest.approx(-1.2, abs=0.02)
    assert excess_kurtosis(torch.tensor([-1.0, 1.0] * 4)).item() == pytest.approx(-2)


@pytest.mark.parametrize("space", [(), (5,), (3, 2)])
def test_batch_noise_matches_a_loop(space):
    t = torch.randn(40, 3, *space, dtype=torch.float64).exp()
    found = noise_kurtosis(t, 8, draws=60, generator=torch.Generator().manual_seed(4))
    rows = torch.randint(40, (60, 8), generator=torch.Generator().manual_seed(4))
    axes = [0, *range(2, t.ndim)]
    means = torch.stack([t[r].mean(axes) for r in rows])
    variances = torch.stack([t[r].var(axes, correction=0) for r in rows])
    torch.testing.assert_close(found.mean, excess_kurtosis(means))
    torch.testing.assert_close(found.variance, excess_kurtosis(variances))
    torch.testing.assert_close(found.inverse_std, excess_kurtosis(variances.rsqrt()))


def test_heavier_tails_of_one_over_sigma():
    t = torch.randn(4000, 2, generator=torch.Generator().manual_seed(5))
    found = noise_kurtosis(t, 8, draws=4000, generator=torch.Generator().manual_seed(6))
    assert (found.mean.abs() < 0.3).all()
    assert (found.inverse_std > 1).all()


def test_example_gradients_of_tied_layers():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    x, y = torch.randn(5, 3), torch.randn(5, 3)
    ((name, found),) = example_gradients(model, lambda a, b: (a - b).square().sum(), x, y).items()
    assert name == "0.weight"
    (model(x) - y).square().sum().backward()
    torch.testing.assert_close(found.sum(0), model[0].weight.grad)


@pytest.mark.parametrize(
    ("shift", "dtype", "tolerance"),
    [(0.0, torch.float64, 1e-9), (3000.0, torch.float32, 2e-3), (100.0, torch.bfloat16, 0.1)],
)
def test_batch_statistics_are_exact_for_large_means(shift, dtype, tolerance):
    t = (torch.randn(400, 3, 5, dtype=torch.float64) + shift).to(dtype)

    def draw(t):
        return batch_statistics(t, 50, 20, torch.Generator().manual_seed(0))

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(400, (20, 50), generator=generator)
    batches = t.double()[rows]  # (draws, examples, channels, positions)
    mean, variance, inverse_std = draw(t)
    torch.testing.assert_close(mean.double(), batches.mean((1, 3)), rtol=1e-5, atol=1e-5)
    expected = batches.var((1, 3), correction=0)
    torch.testing.assert_close(variance.double(), expected, rtol=tolerance, atol=0)
    torch.testing.assert_close(inverse_std.double(), expected.rsqrt(), rtol=tolerance, atol=0)


def test_opposite_vectors_whose_distance_is_rounded_up():
    beyond = torch.tensor([2.0]).nextafter(torch.tensor([3.0]))
    assert angles(beyond).item() == pytest.approx(math.pi)
    assert angles(torch.tensor([math.nan])).item() == 0


def test_example_gradients_with_dropout():
    model = nn.Sequential(nn.Linear(20, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    x = torch.ones(8, 20)
    (found,) = example_gradients(
        model, lambda a, b: a.sum(), x, torch.zeros(8), ["2.weight"]
    ).values()
    assert len(found.unique(dim=0)) > 1  # each example has its own dropout


def test_batch_statistics_of_a_constant_channel_are_finite():
    t = torch.randn(50, 2)
    t[:, 1] = 7.3
    found = batch_statistics(t, 8, 20, torch.Generator().manual_seed(0))
    assert all(x.isfinite().all() for x in found)
    assert (found.variance > 0).all()
    torch.testing.assert_close(found.mean[:, 1], torch.full((20,), 7.3))
