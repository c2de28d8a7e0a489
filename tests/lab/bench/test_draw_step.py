"""The DRAW benchmark compares four implementations of one function."""

import torch

from weightnorm import normalized_weights
from weightnorm.lab.bench.cases.draw_step import networks


def test_all_networks_compute_the_same():
    x, noise = torch.rand(3, 784).round(), torch.randn(4, 3, 100)
    made = networks(8, torch.device("cpu"))
    bounds = [model(x, noise).negative_elbo for model in made.values()]
    for bound in bounds[1:]:
        torch.testing.assert_close(bound, bounds[0])
    assert [len(normalized_weights(model)) for model in made.values()] == [0, 0, 9, 9]
