"""Folding for the time of a block, and removing weight norm."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from threads import in_threads
from weightnorm import (
    _kernels,
    convert_state_dict,
    data_dependent_init,
    folded,
    init_,
    is_weight_normed,
    normalized_weights,
    parts,
    remove_weight_norm,
    weight_norm,
    weight_norm_model,
)
from weightnorm.inspection import NormalizedWeight
from weightnorm.layers import weight_names
from zoo import every_layer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def ours(layer):
    return weight_norm(layer)


def torchs(layer):
    for name in weight_names(layer):
        parametrizations.weight_norm(layer, name)
    return layer


def masked(layer):
    return weight_norm(layer, mask=torch.ones_like(layer.weight))


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
        torch.testing.assert_close(case.run(layer, inputs), before)
        plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(case.run(plain, inputs), before)
    assert torch.equal(case.run(layer, inputs), before)
    assert [n for n, _ in layer.named_parameters()] == names
    assert [id(p) for p in layer.parameters()] == ids
    for key, value in layer.state_dict().items():
        assert torch.equal(value, state[key])


@every_flavour
@pytest.mark.parametrize("kind", SIMPLE)
def test_fold_and_remove_every_flavour(flavour, kind):
    model = nn.Sequential(flavour(kind(4, 4)))
    run = lambda: model(x)[0]  # noqa: E731
    x = torch.randn(3, 4)
    before = run()
    assert is_weight_normed(model[0])
    v, g = parts(model[0], weight_names(model[0])[0])
    torch.testing.assert_close(v.norm(dim=1, keepdim=True), g)
    with folded(model):
        assert not is_weight_normed(model[0])
        torch.testing.assert_close(run(), before)
    torch.testing.assert_close(run(), before)
    assert parts(model[0], weight_names(model[0])[0]).v is v
    assert remove_weight_norm(model) is model
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


def test_writes_to_folded_weights_are_discarded_with_a_warning():
    layer = weight_norm(nn.Linear(3, 2))
    (v, g), before = parts(layer), layer.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), folded(layer):
        write_and_fail(layer)
    assert torch.equal(layer.weight, before)
    assert parts(layer).v is v
    assert parts(layer).g is g


def write_and_fail(layer):
    with pytest.warns(UserWarning, match="an update of it is discarded"):
        layer.weight.sum().backward()
    with torch.no_grad():
        layer.weight.zero_()
    copied = copy.deepcopy(layer)
    copied(torch.ones(1, 3)).sum().backward()  # a copy is a plain model, to be trained
    raise ZeroDivisionError


@pytest.mark.parametrize("flavour", [ours, torchs])
def test_a_model_that_is_frozen_inside_the_block_stays_frozen(flavour):
    model = nn.Sequential(flavour(nn.Linear(3, 2)))
    with folded(model):
        model.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    with folded(model):
        model.requires_grad_(True)
    assert all(p.requires_grad for p in model.parameters())


@every_flavour
@pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(3, 4), lambda: nn.MultiheadAttention(4, 2, kdim=3)]
)
def test_removing_one_by_one_keeps_the_order_of_parameters(flavour, make):
    plain = make()
    layer = flavour(copy.deepcopy(plain))
    for name in weight_names(plain):
        remove_weight_norm(layer, name)
        assert not is_weight_normed(layer, name)
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


class Last(nn.Module):
    """Pass on the first output of a recurrent layer."""

    def forward(self, outputs):
        return outputs[0]


def parameters(model):
    return {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}


def same(before, after):
    return before.keys() == after.keys() and all(
        before[name][0] == after[name][0] and torch.equal(before[name][1], after[name][1])
        for name in before
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 4), Last(), nn.Linear(4, 4))
    weight_norm_model(model, where=lambda name, module: module is not model[3])
    hooked(model[3])
    return model


def test_threads_that_each_enter_folded(model):
    x, before = torch.randn(5, 4), parameters(model)
    expected = model(x)

    def serve(i):
        target = model if i % 2 else model[:2] if i % 4 else model[0]
        for _ in range(25):
            with folded(target):
                assert not is_weight_normed(model[0])
                if target is model:
                    torch.testing.assert_close(model(x), expected)

    for _ in range(5):
        in_threads(6, serve)
        assert same(before, parameters(model))
        assert torch.equal(model(x), expected)


def test_many_threads_inside_one_folded_block(model):
    x, before = [torch.randn(5, 4) for _ in range(8)], parameters(model)
    expected = [model(each) for each in x]
    with folded(model):
        results = in_threads(8, lambda i: [model(x[i]) for _ in range(30)])
    for outputs, value in zip(results, expected, strict=True):
        for output in outputs:
            torch.testing.assert_close(output, value)
    assert same(before, parameters(model))


def test_overlapping_blocks_left_in_any_order(model):
    before = parameters(model)
    first, second, third = folded(model), folded(model[1]), folded(model)
    for block in (first, second, third):
        block.__enter__()
    for block in (first, third, second):
        assert not is_weight_normed(model[1])
        block.__exit__(None, None, None)
    assert same(before, parameters(model))


def test_failure_while_folding_changes_nothing(model, monkeypatch):
    before = parameters(model)
    compute, calls = NormalizedWeight.folded, []

    def failing(weight):
        calls.append(weight)
        if len(calls) == 3:
            raise MemoryError
        return compute(weight)

    monkeypatch.setattr(NormalizedWeight, "folded", failing)
    for change in (lambda: folded(model).__enter__(), lambda: remove_weight_norm(model)):
        calls.clear()
        with pytest.raises(MemoryError):
            change()
        assert same(before, parameters(model))


REFUSED = {
    "remove": remove_weight_norm,
    "remove from a layer": lambda model: remove_weight_norm(model[0]),
    "apply": weight_norm_model,
    "apply to a layer": lambda model: weight_norm(model[0]),
    "initialize": lambda model: init_(model[0], nn.init.ones_),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
def test_changes_that_the_end_of_the_block_would_undo_are_refused(model, change):
    before = parameters(model)
    with folded(model):
        inside = parameters(model)
        with pytest.raises(RuntimeError, match=r"inside `with folded\(...\)`.*leave the block"):
            change(model)
        assert same(inside, parameters(model))
        remove_weight_norm(copy.deepcopy(model))  # a copy is a plain model
    assert same(before, parameters(model))


def brought_along():
    """A model with its own weight norm, of both of torch's flavours, and ours beside it."""
    model = nn.ModuleList([torchs(nn.Linear(2, 2)), hooked(nn.Linear(2, 2)), nn.Linear(2, 2)])
    own = list(model.state_dict())
    assert [*normalized_weights(weight_norm_model(model))][-1] == "2.weight"
    return model, own


def test_weight_norm_that_the_model_brought_along_is_kept():
    model, own = brought_along()
    before = parameters(model)
    with folded(model, include_torch=False):
        assert list(model.state_dict()) == own
        with folded(model):
            assert not any(map(is_weight_normed, model))
        assert not is_weight_normed(model[2])
    assert same(before, parameters(model))
    remove_weight_norm(model, include_torch=False)
    assert list(model.state_dict()) == own
    assert not any(map(is_weight_normed, remove_weight_norm(model)))


class Wrapper(nn.Module):
    """Forwards attributes that it lacks to the module it wraps, as peft's wrappers do."""

    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, x):
        return self.wrapped(x)


def test_wrapper_that_forwards_attributes_has_no_weight_of_its_own():
    model = nn.Sequential(Wrapper(weight_norm(nn.Linear(2, 3))))
    assert not is_weight_normed(model[0])
    assert [layer.name for layer in data_dependent_init(model, torch.randn(9, 2)).done] == [
        "0.wrapped"
    ]
    with folded(model):
        assert [*model.state_dict()] == ["0.wrapped.weight", "0.wrapped.bias"]
    remove_weight_norm(model)
    assert [*model.state_dict()] == ["0.wrapped.weight", "0.wrapped.bias"]


def test_removing_from_a_lazy_model_cancels_the_pending_normalization():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyConv1d(2, 1))
    weight_norm_model(model)
    remove_weight_norm(model)
    model[0](torch.randn(2, 4))
    assert type(model[0]) is nn.Linear


def shared_v(normalize):
    first, second = normalize(nn.Linear(3, 2)), normalize(nn.Linear(3, 2))
    second.parametrizations.weight.original1 = first.parametrizations.weight.original1
    with torch.no_grad():
        second.parametrizations.weight.original0.mul_(3)
    return nn.Sequential(first, second)


@pytest.mark.parametrize("normalize", [weight_norm, parametrizations.weight_norm])
def test_weights_that_share_v_but_not_g_stay_different(normalize):
    model = shared_v(normalize)
    expected = [layer.weight.detach().clone() for layer in model]
    with folded(model):
        torch.testing.assert_close([layer.weight.detach() for layer in model], expected)
    remove_weight_norm(model)
    torch.testing.assert_close([layer.weight.detach() for layer in model], expected)


@pytest.mark.parametrize("flavour", [ours, masked, torchs, hooked])
def test_a_model_that_is_cast_inside_the_block_stays_cast(flavour):
    model = nn.Sequential(flavour(nn.Linear(3, 2)))
    x = torch.randn(4, 3)
    expected = model(x)
    expected.sum().backward()
    with folded(model):
        model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}
    torch.testing.assert_close(model(x.double()).float(), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripting_needs_folded_weights():
    scripted = torch.jit.script(nn.Linear(3, 3))
    model, x = nn.Sequential(scripted, weight_norm(nn.Linear(3, 3))), torch.ones(1, 3)
    with pytest.raises(RuntimeError, match=r"normalized Linear, .* inside `with weightnorm.folded"):
        torch.jit.script(model)
    with folded(model):
        torch.testing.assert_close(torch.jit.script(model)(x), model(x))
    assert not is_weight_normed(remove_weight_norm(model)[1])


def test_a_module_of_the_users_may_be_called_parametrizations():
    model = nn.Sequential(nn.Linear(3, 3))
    model.add_module("parametrizations", nn.ModuleDict({"weight": nn.Identity()}))
    assert [*normalized_weights(weight_norm_model(model))] == ["0.weight"]
    assert not normalized_weights(remove_weight_norm(model))


@every_flavour
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        parametrizations.orthogonal,
        lambda layer: delattr(layer, "weight"),
    ],
    ids=["pruned", "parametrized", "deleted"],
)
def test_a_weight_that_is_replaced_inside_the_block_comes_back(flavour, change):
    model = nn.Sequential(flavour(nn.Linear(3, 3)), nn.Tanh(), flavour(nn.Linear(3, 3)))
    x, before = torch.randn(4, 3), copy.deepcopy(model.state_dict())
    y = model(x)
    message = r"2\.weight: pruned, parametrized or removed"
    with pytest.raises(RuntimeError, match=message), folded(model):
        change(model[2])
    assert model.state_dict().keys() == before.keys()
    assert torch.equal(model(x), y)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    with folded(model):  # nothing is left folded
        torch.testing.assert_close(model(x), y)
    assert not normalized_weights(remove_weight_norm(model))


def test_a_pruned_part_of_torchs_hook_is_refused_before_anything_changes():
    model = nn.Sequential(*(nn.utils.weight_norm(nn.Linear(2, 2)) for _ in range(2)))
    prune.l1_unstructured(model[1], "weight_v", 0.5)
    keys = list(model.state_dict())
    for change in (remove_weight_norm, lambda model: folded(model).__enter__()):
        with pytest.raises(ValueError, match=r"prune\.remove\(layer, 'weight_v'\) first"):
            change(model)
        assert list(model.state_dict()) == keys
    prune.remove(model[1], "weight_v")
    assert not normalized_weights(remove_weight_norm(model))


def test_removed_in_inference_mode_the_weight_can_be_trained():
    layer = weight_norm(nn.Linear(3, 2))
    with torch.inference_mode():
        remove_weight_norm(layer)
    layer(torch.ones(1, 3, requires_grad=True)).sum().backward()
    assert layer.weight.grad is not None


@every_flavour
def test_a_weight_of_which_a_part_is_trained_can_be_trained_when_plain(flavour):
    for frozen in ("v", "g", "vg"):
        layer = flavour(nn.Linear(3, 2))
        for part in frozen:
            getattr(parts(layer), part).requires_grad_(False)
        assert remove_weight_norm(layer).weight.requires_grad == (frozen != "vg")


def test_folding_torchs_hook_restores_its_attribute_and_the_order_of_hooks():
    layer = hooked(nn.Linear(3, 2))
    layer.register_forward_pre_hook(lambda module, inputs: None)
    before, hooks = layer.weight.detach().clone(), list(layer._forward_pre_hooks)
    with folded(layer):
        assert len(layer._forward_pre_hooks) == 1
    assert torch.equal(layer.weight, before)
    assert list(layer._forward_pre_hooks) == hooks


@every_layer
def test_every_way_to_fold_gives_the_same_bits_on_every_device(case):
    layer = weight_norm(case.make())
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    state = convert_state_dict(layer.state_dict(), to="folded")
    names = weight_names(layer)
    for path in (contextlib.nullcontext, _kernels.assume_accelerator):
        with path():
            with folded(layer):
                assert all(torch.equal(getattr(layer, name), state[name]) for name in names)
            removed = remove_weight_norm(copy.deepcopy(layer))
            assert all(torch.equal(getattr(removed, name), state[name]) for name in names)
