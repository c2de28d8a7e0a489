"""Errors that a new user meets: each states what was got, what was expected and what to do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader

import weightnorm as wn
from weightnorm import diagnostics


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def normalized():
    model = network()
    wn.weight_norm_model(model)
    return model


X = torch.randn(8, 3)

OF_MODULE = {
    "batched_weights": wn.batched_weights,
    "check": diagnostics.check,
    "data_dependent_init": lambda module: wn.data_dependent_init(module, X),
    "folded": lambda module: wn.folded(module).__enter__(),
    "init_": lambda module: wn.init_(module, nn.init.ones_),
    "is_weight_normed": wn.is_weight_normed,
    "normalized_weights": wn.normalized_weights,
    "parameterize": lambda module: wn.parameterize(module, "weight-norm"),
    "parts": wn.parts,
    "remove_weight_norm": wn.remove_weight_norm,
    "robust_init": wn.robust_init,
    "TrainingMonitor": lambda module: diagnostics.TrainingMonitor(module, Adam([X]), print),
    "unnormalized_weights": wn.unnormalized_weights,
    "update_running_means": lambda module: wn.update_running_means([X], module),
    "weight_norm": wn.weight_norm,
    "weight_norm_model": wn.weight_norm_model,
}


@pytest.mark.parametrize("function", OF_MODULE)
def test_something_else_than_a_module(function):
    wrong = {
        r"a tensor of shape \(8, 3\): pass the module that it belongs to": X,
        "the class Linear: pass an instance of it": nn.Linear,
        "generator: pass the module itself": nn.Linear(3, 2).parameters(),
        "'fc': pass the module itself": "fc",
        "None: pass the module itself": None,
    }
    for message, value in wrong.items():
        with pytest.raises(
            TypeError, match=f"^{function} expects a torch.nn.Module; got {message}"
        ):
            OF_MODULE[function](value)


CALLS = {
    # What was called: the call, the exception, and the part of its message that helps.
    "weight_norm of a container": (
        lambda: wn.weight_norm(network()),
        ValueError,
        "use weight_norm_model to normalize the layers inside it",
    ),
    "init_ of a container": (
        lambda: wn.init_(network(), nn.init.ones_),
        ValueError,
        "call init_ for each of the layers inside it",
    ),
    "init_ with a name": (
        lambda: wn.init_(nn.Linear(3, 2), "xavier"),
        TypeError,
        "such as nn.init.xavier_uniform_; got 'xavier'",
    ),
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
    "where is a list": (
        lambda: wn.weight_norm_model(network(), where=["0"]),
        TypeError,
        r"where must be a function of name and module; got \['0'\]",
    ),
    "WeightNorm of a layer": (
        lambda: wn.WeightNorm(nn.Linear(3, 2)),
        TypeError,
        r"got Linear: to normalize a layer use weight_norm\(layer\)",
    ),
    "initialize on nothing": (
        lambda: wn.data_dependent_init(normalized()),
        TypeError,
        "got no batch: pass one batch",
    ),
    "initialize on a loader": (
        lambda: wn.data_dependent_init(normalized(), DataLoader(X)),
        TypeError,
        "got a DataLoader: pass one batch",
    ),
    "mean-only batch norm of a layer": (
        lambda: wn.MeanOnlyBatchNorm2d(nn.Conv2d(3, 4, 3)),
        TypeError,
        r"got Conv2d: .* use mean_only_batch_norm\(layer\)",
    ),
    "unknown parameterization": (
        lambda: wn.parameterize(nn.Linear(3, 2), "wn"),
        ValueError,
        "how='wn' is unknown; expected one of standard, batch-norm, weight-norm",
    ),
    "check with a class": (
        lambda: diagnostics.check(normalized(), Adam),
        TypeError,
        "check expects the optimizer that trains the model; got the class Adam",
    ),
    "monitor without an optimizer": (
        lambda: diagnostics.TrainingMonitor(normalized(), None, print),
        TypeError,
        "TrainingMonitor expects the optimizer that trains the model; got None",
    ),
    "monitor with a path": (
        lambda: diagnostics.TrainingMonitor(normalized(), SGD([X], lr=1), "runs"),
        TypeError,
        "log must be a TensorBoard SummaryWriter or a function .*; got 'runs'",
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
    "optimizer by name": (
        lambda: wn.WeightNormOptimizer(network(), "adam", lr=0.1),
        TypeError,
        "inner must be the class of an optimizer, such as torch.optim.Adam, .*; got 'adam'",
    ),
    "optimizer that is built already": (
        lambda: wn.WeightNormOptimizer(network(), SGD([X], lr=0.1)),
        TypeError,
        "got an optimizer that is built already; pass its class, SGD",
    ),
    "optimizer of g by name": (
        lambda: wn.WeightNormOptimizer(network(), Adam, lr=0.1, lengths="sgd"),
        TypeError,
        "lengths must be the class of an optimizer",
    ),
    "learning rate by position": (
        lambda: wn.WeightNormOptimizer(network(), Adam, 0.1),
        TypeError,
        "got 0.1: pass options of the optimizer by name, such as lr=0.001",
    ),
    "parameters of another model": (
        lambda: wn.WeightNormOptimizer(network(), Adam, network().parameters(), lr=0.1),
        ValueError,
        "none of the weights to normalize; pass the model's own",
    ),
    "optimizer of a normalized model": (
        lambda: wn.WeightNormOptimizer(normalized(), Adam, lr=0.1),
        ValueError,
        r"2 weights are normalized already; .* call remove_weight_norm\(model\) first",
    ),
    "optimizer with an unknown axis": (
        lambda: wn.WeightNormOptimizer(network(), Adam, lr=0.1, dim="row"),
        ValueError,
        "dim='row' is unknown",
    ),
    "optimizer where a list": (
        lambda: wn.WeightNormOptimizer(network(), Adam, lr=0.1, where=["0"]),
        TypeError,
        "where must be a function",
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
    assert wn.remove_weight_norm(plain) == wn.remove_weight_norm(plain, "weight") == []
    wn.WeightNormOptimizer(network(), SGD).step()  # with torch's default learning rate
