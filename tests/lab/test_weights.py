"""Weights as rows of units, their norms, and angles between them."""

import math

import pytest
import torch
from torch import nn

from weightnorm import parts, weight_norm
from weightnorm.diagnostics import effective_step, v_norms
from weightnorm.lab.weights import direction_angle, mean_norms, weight_rows
from zoo import every_layer


@every_layer
def test_rows_are_units_whose_norm_is_g(case):
    layer = weight_norm(case.make())
    rows = weight_rows(layer)
    for name, norm in v_norms(layer).items():
        torch.testing.assert_close(rows[name].norm(dim=1), effective_step(layer)[name] * norm)


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


def test_means_are_over_all_units():
    plain, normed = nn.Linear(2, 3), nn.Linear(4, 1)
    norms = torch.cat([plain.weight.norm(dim=1), normed.weight.norm(dim=1)])
    model = nn.Sequential(plain, weight_norm(normed, g=2.0))
    norms[-1] = 2.0
    found = mean_norms(model)
    v = parts(normed).v.norm().item()
    expected = {"w_norm": norms.mean().item(), "v_norm": v, "effective_step": 2 / v}
    assert found == pytest.approx(expected)
    assert mean_norms(plain).keys() == {"w_norm"}
