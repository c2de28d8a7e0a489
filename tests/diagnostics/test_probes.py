"""Norms and effective steps against their definitions."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from weightnorm import parts, weight_norm, weight_norm_model
from weightnorm.diagnostics import effective_step, v_norms


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
