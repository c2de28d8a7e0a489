"""Folding for the time of a block, and removing weight norm."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from weightnorm import folded, is_weight_normed, parts, remove_weight_norm, weight_norm
from weightnorm.layers import weight_names
from zoo import every_layer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def ours(layer):
    return weight_norm(layer)


def torchs(layer):
    for name in weight_names(layer):
        parametrizations.weight_norm(layer, name)
    return layer


def hooked(layer):
    for name in weight_names(layer):
        nn.utils.weight_norm(layer, name)
    return layer


every_flavour = pytest.mark.parametrize("flavour", [ours, torchs, hooked])
SIMPLE = [nn.Linear, nn.LSTMCell, nn.GRU]


@every_layer
def test_folding_keeps_the_output_and_restores_v_and_g(case):
    plain, inputs = case.make(), case.inputs()
    layer = weight_norm(copy.deepcopy(plain))
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    before, state = case.run(layer, inputs), copy.deepcopy(layer.state_dict())
    names, ids = [n for n, _ in layer.named_parameters()], [id(p) for p in layer.parameters()]
    with folded(layer) as inside:
        assert inside is layer
        assert type(layer) is type(plain)
        assert list(layer.state_dict()) == list(plain.state_dict())
        assert not any(getattr(layer, n).requires_grad for n in weight_names(layer))
        torch.testing.assert_close(case.run(layer, inputs), before)
        plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(case.run(plain, inputs), before)
    assert torch.equal(case.run(layer, inputs), before)
    assert [n for n, _ in layer.named_parameters()] == names
    assert [id(p) for p in layer.parameters()] == ids
    for key, value in layer.state_dict().items():
        assert torch.equal(value, state[key])


@every_layer
def test_removing_gives_a_plain_trainable_layer(case):
    plain, inputs = case.make(), case.inputs()
    layer = weight_norm(copy.deepcopy(plain))
    before = case.run(layer, inputs)
    assert remove_weight_norm(layer) == list(weight_names(plain))
    assert type(layer) is type(plain)
    assert [n for n, _ in layer.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert all(p.is_leaf and p.requires_grad for p in layer.parameters())
    torch.testing.assert_close(case.run(layer, inputs), before)
    case.run(layer, inputs).sum().backward()
    assert all(getattr(layer, n).grad is not None for n in weight_names(layer))
    assert remove_weight_norm(layer) == []


@every_flavour
@pytest.mark.parametrize("kind", SIMPLE)
def test_fold_and_remove_every_flavour(flavour, kind):
    model = nn.Sequential(flavour(kind(4, 4)))
    run = lambda: model(x)[0]  # noqa: E731
    x = torch.randn(3, 4)
    before = run()
    names = [f"0.{n}" for n in weight_names(model[0])]
    assert is_weight_normed(model[0])
    v, g = parts(model[0], weight_names(model[0])[0])
    torch.testing.assert_close(v.norm(dim=1, keepdim=True), g)
    with folded(model):
        assert not is_weight_normed(model[0])
        torch.testing.assert_close(run(), before)
    torch.testing.assert_close(run(), before)
    assert parts(model[0], weight_names(model[0])[0]).v is v
    assert remove_weight_norm(model) == names
    torch.testing.assert_close(run(), before)
    run().sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "weight" in n)


def test_folding_a_copy_of_torchs_flavour_keeps_the_original():
    layer = torchs(nn.Linear(3, 2))
    twin = copy.deepcopy(layer)  # torch lets them share a class
    before = layer.weight.detach().clone()
    with folded(twin):
        assert torch.equal(layer.weight, before)
    remove_weight_norm(twin)
    assert torch.equal(layer.weight, before)
    assert type(twin) is nn.Linear


def test_v_and_g_are_restored_after_an_exception():
    layer = weight_norm(nn.Linear(3, 2))
    v, g = parts(layer)
    with pytest.raises(ZeroDivisionError), folded(layer):
        1 / 0  # noqa: B018
    assert parts(layer).v is v
    assert parts(layer).g is g


def test_writes_to_folded_weights_are_discarded():
    layer = weight_norm(nn.Linear(3, 2))
    before = layer.weight.detach().clone()
    with folded(layer), torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(layer.weight, before)


def test_nested_folds():
    layer = weight_norm(nn.Linear(3, 2))
    with folded(layer):
        with folded(layer):
            assert type(layer) is nn.Linear
        assert type(layer) is nn.Linear
    assert is_weight_normed(layer)


def test_remove_by_name():
    layer = weight_norm(nn.LSTMCell(3, 2))
    assert remove_weight_norm(layer, "weight_ih") == ["weight_ih"]
    assert is_weight_normed(layer, "weight_hh")
    assert not is_weight_normed(layer, "weight_ih")


def test_folding_keeps_the_order_of_parameters():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))
            weight_norm(self, "weight")
            self.child = nn.Linear(3, 3)

    block = Block()
    names = [n for n, _ in block.named_parameters()]
    with folded(block):
        pass
    assert [n for n, _ in block.named_parameters()] == names


@every_flavour
@every_layer
def test_removing_one_by_one_keeps_the_order_of_parameters(flavour, case):
    plain = case.make()
    layer = flavour(copy.deepcopy(plain))
    for name in weight_names(plain):
        remove_weight_norm(layer, name)
    assert list(layer.state_dict()) == list(plain.state_dict())


def test_weight_with_a_second_parametrization_is_folded_but_not_removed():
    class Double(nn.Module):
        def forward(self, w):
            return 2 * w

    layer = weight_norm(nn.Linear(3, 2))
    parametrize.register_parametrization(layer, "weight", Double())
    before = layer.weight.detach().clone()
    with folded(layer):
        assert torch.equal(layer.weight, before)
    assert torch.equal(layer.weight, before)
    with pytest.raises(ValueError, match="Double is registered after weight norm"):
        remove_weight_norm(layer)


def test_other_parametrized_tensors_are_kept():
    class Negative(nn.Module):
        def forward(self, b):
            return -b

    layer = weight_norm(nn.Linear(3, 2))
    parametrize.register_parametrization(layer, "bias", Negative())
    x, state = torch.randn(4, 3), list(layer.state_dict())
    before = layer(x)
    with folded(layer):
        assert parametrize.is_parametrized(layer, "bias")
        torch.testing.assert_close(layer(x), before)
    assert list(layer.state_dict()) == state
    assert torch.equal(copy.deepcopy(layer)(x), before)
    remove_weight_norm(layer)
    assert parametrize.is_parametrized(layer, "bias")
    torch.testing.assert_close(layer(x), before)
