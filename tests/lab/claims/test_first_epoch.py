"""Claim 25: networks whose means are removed, and the size of means and deviations."""

import pytest
import torch
from torch import nn

from weightnorm.lab import classify
from weightnorm.lab.claims.first_epoch import BOTH, CONSTANT, moments, network

CONFIG = classify.PRESETS["demo"]


def output_and_gradient(how):
    torch.manual_seed(1)
    images = torch.randn(60, 1, 16, 16)
    model = network(CONFIG, how, images)
    torch.manual_seed(2)  # noise and dropout
    logits = model(images + 1)
    logits[:, 0].square().sum().backward()
    return logits, next(p.grad for p in model.parameters() if p.ndim == 4)


def test_means_as_constants_change_the_gradient_but_not_the_function():
    (ours, constant), (theirs, centred) = map(output_and_gradient, (CONSTANT, BOTH))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(constant, centred, rtol=0.01)


def test_moments_of_a_known_layer():
    layer = nn.Conv2d(1, 2, 1)
    nn.init.ones_(layer.weight)
    layer.bias.data = torch.tensor([1.0, 7.0])
    model = nn.Sequential(classify.GaussianNoise(9.0), layer, nn.LeakyReLU(0.1), nn.Flatten())
    mean, std = moments(model, torch.tensor([-2.0, 2.0]).view(2, 1, 1, 1))
    assert mean[0] == pytest.approx(5)  # √((1 + 49)/2)
    assert std[0] == pytest.approx(8**0.5)
    assert len(mean) == len(std) == 2  # the layer, and the output
