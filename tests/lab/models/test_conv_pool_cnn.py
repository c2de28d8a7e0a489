"""ConvPool-CNN-C: layers, parameter counts, shapes."""

from functools import partial

import pytest
import torch
from torch import nn

from weightnorm import Parameterization, parameterize
from weightnorm.lab.classify import ConvPoolCNN, GaussianNoise


def build(how="standard", **options):
    return ConvPoolCNN(partial(parameterize, how=how), **options)


def test_parameter_counts_are_the_papers():
    sizes = {True: 0, False: 0}
    for name, p in build().named_parameters():
        sizes[name.endswith("weight")] += p.numel()
    assert sizes[True] == 1_405_344
    assert sizes[False] == 1_450
    normed = sum(p.numel() for p in build("weight-norm").parameters())
    assert normed == 1_405_344 + 1_450 + 1_450


def test_layer_shapes_are_the_papers():
    shapes = []
    model = build(width=0.125)
    for module in model:
        if isinstance(module, (nn.Conv2d, nn.MaxPool2d, nn.Linear)):
            module.register_forward_hook(lambda m, i, o: shapes.append(tuple(o.shape[1:])))
    model(torch.randn(2, 3, 32, 32))
    narrow, wide = 12, 24
    assert shapes == [
        *[(narrow, 32, 32)] * 3,
        (narrow, 16, 16),
        *[(wide, 16, 16)] * 3,
        (wide, 8, 8),
        *[(wide, 6, 6)] * 3,
        (10,),
    ]


@pytest.mark.parametrize("how", Parameterization)
def test_every_parameterization_has_finite_gradients(how):
    model = build(how, width=0.05, channels=1)
    model(torch.randn(4, 1, 16, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_initial_weights_have_std_005():
    model = build()
    stds = [m.weight.std().item() for m in model if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(stds) == 10
    assert all(0.045 < std < 0.055 for std in stds)


def test_noise_is_added_in_training_only():
    noise, x = GaussianNoise(0.15), torch.zeros(1000)
    assert noise(x).std().item() == pytest.approx(0.15, rel=0.1)
    assert torch.equal(noise.eval()(x), x)
    assert torch.equal(GaussianNoise(0.0)(x), x)
