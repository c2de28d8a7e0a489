"""DQN's network: layers, parameter counts, three parameterizations."""

import pytest
import torch
from torch import nn

from weightnorm import Parameterization
from weightnorm.lab.dqn import QNetwork


def build(how="standard", actions=6, **options):
    return QNetwork(actions, how=Parameterization(how), **options)


def frames(count, side=84):
    return torch.randint(0, 256, (count, 4, side, side), dtype=torch.uint8)


def test_layers_are_those_of_mnih_et_al():
    sizes = [sum(p.numel() for p in m.parameters()) for m in build() if list(m.parameters())]
    convolutions = [32 * (4 * 64 + 1), 64 * (32 * 16 + 1), 64 * (64 * 9 + 1)]
    assert sizes == [*convolutions, 512 * (3136 + 1), 6 * (512 + 1)]
    shapes, model = [], build()
    for module in model:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(lambda m, i, o: shapes.append(tuple(o.shape[1:])))
    model(frames(1))
    assert shapes == [(32, 20, 20), (64, 9, 9), (64, 7, 7), (512,), (6,)]


def test_pixels_are_divided_by_255_and_not_modified():
    model, x = build(width=0.125), frames(2)
    before = x.clone()
    expected = x.double() / 255
    for layer in list(model)[1:]:
        expected = layer.double()(expected)
    torch.testing.assert_close(model.float()(x), expected.float())
    assert torch.equal(x, before)


@pytest.mark.parametrize("how", ["standard", "weight-norm", "batch-norm"])
def test_every_parameterization_has_finite_gradients_in_channels_last(how):
    model = build(how, width=0.125, shape=(36, 36), actions=3)
    model(frames(5, 36)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)


def test_width_multiplies_every_layer_but_the_last():
    model = build(width=0.5, actions=18)
    units = [m.weight.shape[0] for m in model if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert units == [16, 32, 32, 256, 18]
