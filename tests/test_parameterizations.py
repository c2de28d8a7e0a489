"""The five parameterizations compute the same function at first, and normalize as defined."""

import pytest
import torch
from torch import nn

from weightnorm import (
    Parameterization,
    data_dependent_init,
    init_,
    is_weight_normed,
    parameterize,
    weight_norm,
)


def draw(w):
    nn.init.normal_(w, 0, 0.05)


def deep_net(how):
    """Build a deep convolutional network with pooling and dropout, always with the same weights."""
    torch.manual_seed(3)
    layers, channels = [], 3
    for width in (12, 12, 12, 24, 24, 24):
        conv = init_(nn.Conv2d(channels, width, 3, padding=1), draw)
        layers += [parameterize(conv, how), nn.LeakyReLU(0.1)]
        channels = width
        if len(layers) == 6:
            layers += [nn.MaxPool2d(2), nn.Dropout(0.5)]
    last = init_(nn.Linear(24, 10), draw)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), parameterize(last, how))


def test_all_five_compute_the_same_function_of_the_init_batch():
    x = 2 * torch.randn(64, 3, 8, 8) + 1
    outputs = {}
    for how in Parameterization:
        model = deep_net(how)
        torch.manual_seed(5)
        data_dependent_init(model, x)
        torch.manual_seed(5)
        outputs[how] = model(x)
    standard = outputs[Parameterization.STANDARD]
    assert standard.std().item() == pytest.approx(1, abs=1e-2)
    for how, out in outputs.items():
        assert (out - standard).abs().max() < 1e-4, how


@pytest.mark.parametrize("how", Parameterization)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(4, 3), (8, 4)),
        (lambda: nn.Conv1d(4, 3, 2), (8, 4, 5)),
        (lambda: nn.Conv2d(4, 3, 2), (8, 4, 5, 5)),
        (lambda: nn.ConvTranspose3d(4, 3, 2), (8, 4, 3, 3, 3)),
    ],
)
def test_every_layer_with_every_parameterization(how, make, shape):
    layer = parameterize(make(), how.value)
    x = torch.randn(shape)
    out = layer(x)
    assert out.shape[:2] == (8, 3)
    assert any(is_weight_normed(m) for m in layer.modules()) is how.normalizes_weights
    alone = layer(torch.cat([x[:1], 9 * x[1:]]))[0]
    assert torch.allclose(alone, out[0], atol=1e-6) is not how.uses_batch
    if how is not Parameterization.STANDARD and how.uses_batch:
        mean = out.mean([d for d in range(out.ndim) if d != 1])
        bias = 0 if how is Parameterization.BATCH_NORM else layer.bias
        torch.testing.assert_close(mean, mean * 0 + bias, atol=1e-5, rtol=0)
    out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("how", [how for how in Parameterization if how.uses_batch])
def test_recurrent_layers_with_batch_statistics_raise(how):
    layer = nn.LSTM(3, 4)
    with pytest.raises(TypeError, match="no batch statistics behind LSTM"):
        parameterize(layer, how)
    assert type(layer) is nn.LSTM


def test_batch_norm_of_a_normalized_layer_keeps_it_normalized():
    layer = weight_norm(nn.Linear(2, 3))
    sequence = parameterize(layer, "batch-norm")
    assert is_weight_normed(sequence[0])
    torch.testing.assert_close(sequence(torch.randn(8, 2)).mean(0), torch.zeros(3))
