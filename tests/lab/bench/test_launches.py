"""Kernel launches of weight norm on an accelerator, counted: they are deterministic."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from weightnorm import WeightNormOptimizer, batched_weights, weight_norm, weight_norm_model
from weightnorm._kernels import assume_accelerator
from weightnorm.lab.bench.launches import count_launches


def launches(model, x, context=None):
    """Launches of a forward and backward pass, after a first one."""

    def run():
        with context or torch.enable_grad():
            y = model(x)
        (y[0] if isinstance(y, tuple) else y).sum().backward()

    run()
    model.zero_grad()
    return count_launches(run).total()


def extra(make, x, normalize):
    """Launches that normalizing adds to a layer."""
    plain, normalized = make(), make()
    normalize(normalized)
    return launches(normalized, x) - launches(plain, x)


LAYERS = {
    "linear": (lambda: nn.Linear(8, 6), (4, 8), 5),
    "conv1d": (lambda: nn.Conv1d(8, 6, 3), (4, 8, 9), 5),
    "channels-last": (
        lambda: nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last),
        (4, 8, 9, 9),
        6,
    ),
    "transposed": (lambda: nn.ConvTranspose1d(8, 6, 3), (4, 8, 9), 8),
    "transposed-grouped": (lambda: nn.ConvTranspose1d(8, 6, 3, groups=2), (4, 8, 9), 9),
    "lstm": (lambda: nn.LSTM(8, 6), (5, 4, 8), 10),
}


@pytest.mark.parametrize(("make", "shape", "most"), LAYERS.values(), ids=LAYERS.keys())
def test_launches_of_a_layer(make, shape, most):
    assert extra(make, torch.randn(shape), weight_norm) <= most


def test_transposed_convolution_launches_less_than_torch_on_the_same_axis():
    make, shape, most = LAYERS["transposed"]
    x = torch.randn(shape)
    torchs = extra(make, x, lambda layer: parametrizations.weight_norm(layer, dim=1))
    assert most < torchs


@pytest.mark.parametrize("shapes", [1, 3, 10])
def test_sixty_layers_batched(shapes):
    def make():
        sizes = (2 * (i % shapes) + 1 for i in range(60))
        return nn.Sequential(*[nn.Conv1d(4, 4, k, padding=k // 2) for k in sizes])

    x = torch.randn(2, 4, 30)
    plain, model = launches(make(), x), make()
    weight_norm_model(model)
    with assume_accelerator():
        weights = batched_weights(model)
    assert launches(model, x, weights) - plain <= 12 + 2 * shapes


def test_optimizer_form_launches_few_kernels_per_weight():
    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)]), torch.randn(4, 8)
    counts = {}
    for name in ("plain", "weight norm"):
        if name == "plain":
            optimizer = torch.optim.Adam(model.parameters(), fused=True)
        else:
            optimizer = WeightNormOptimizer(model, torch.optim.Adam, fused=True)
        for _ in range(2):
            model(x).sum().backward()
            counts[name] = count_launches(optimizer.step).total()
    assert counts["weight norm"] - counts["plain"] <= 8 * 12


def test_views_and_allocations_are_not_counted():
    x = torch.ones(2, 3)
    assert not count_launches(lambda: [torch.empty(2), x.t(), x.view(6), x.expand(4, 2, 3), x[0]])
    assert count_launches(lambda: x.add_(1) + x.clone()) == {"add_": 1, "add": 1, "clone": 1}
