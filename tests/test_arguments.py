"""Errors that a new user meets: each states what was got, what was expected and what to do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, Adam

import weightnorm as wn
from weightnorm import diagnostics


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def normalized():
    model = network()
    wn.weight_norm_model(model)
    return model


X = torch.randn(8, 3)

CALLS = {
    # What was called: the call, the exception, and the part of its message that helps.
    "parts of a model": (
        lambda: wn.parts(normalized()),
        ValueError,
        "normalized_weights returns v and g of the layers inside it",
    ),
    "remove a misspelt name": (
        lambda: wn.remove_weight_norm(normalized(), "wight"),
        ValueError,
        "no module of Sequential has a tensor 'wight'",
    ),
    "unknown parameterization": (
        lambda: wn.parameterize(nn.Linear(3, 2), "wn"),
        ValueError,
        "how='wn' is unknown; expected one of standard, batch-norm, weight-norm",
    ),
    "monitor of a plain model": (
        lambda: diagnostics.TrainingMonitor(network(), SGD([X], lr=1), print),
        ValueError,
        "apply weight_norm_model to it, or train it with a WeightNormOptimizer",
    ),
    "optimizer of parameters": (
        lambda: wn.WeightNormOptimizer(network().parameters(), Adam, lr=0.1),
        TypeError,
        r"got generator; .* Write WeightNormOptimizer\(model, torch.optim.Adam, lr=…\)",
    ),
    "parameters of another model": (
        lambda: wn.WeightNormOptimizer(network(), Adam, network().parameters(), lr=0.1),
        ValueError,
        "none of the weights to normalize; pass the model's own",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_names_the_solution(name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call()


def test_calls_in_the_way_of_torch():
    plain = nn.Linear(3, 2)
    theirs = parametrizations.weight_norm(copy.deepcopy(plain), "weight", 0)
    for layer in (
        wn.weight_norm(copy.deepcopy(plain), "weight", 0),
        wn.weight_norm(module=copy.deepcopy(plain), name="weight", dim=0),
    ):
        assert layer.state_dict().keys() == theirs.state_dict().keys()
        torch.testing.assert_close(layer(X), theirs(X))
        wn.remove_weight_norm(layer, name="weight")
        torch.testing.assert_close(layer(X), plain(X))
    assert wn.remove_weight_norm(plain) is wn.remove_weight_norm(plain, "weight") is plain
    wn.WeightNormOptimizer(network(), SGD).step()  # with torch's default learning rate
