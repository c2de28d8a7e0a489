"""Copying, pickling, caching and calling normalized modules, from one thread and from many."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from threads import in_threads
from weightnorm import (
    _kernels,
    init_,
    is_weight_normed,
    parts,
    remove_weight_norm,
    weight_norm,
    weight_norm_model,
)
from zoo import LAYERS, every_layer


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": saved,
    "copy of a copy": lambda m: copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(m)))),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("name", ["conv-transpose2d-grouped", "lstm", "attention"])
def test_copies_of_a_used_layer_are_equal_and_independent(name, duplicate):
    case = LAYERS[name]
    layer, inputs = weight_norm(case.make()), case.inputs()
    case.run(layer, inputs).sum().backward()
    twin = duplicate(layer)
    before = case.run(layer, inputs)
    assert torch.equal(case.run(twin, inputs), before)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in layer.parameters()}
    remove_weight_norm(twin)  # copies of torch's weight norm share a class: the original breaks
    assert is_weight_normed(layer)
    assert torch.equal(case.run(layer, inputs), before)


def test_copies_do_not_share_entries_of_torchs_cache():
    layer = weight_norm(nn.Linear(3, 2))
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        parts(twin).g.mul_(2)
    with parametrize.cached():
        torch.testing.assert_close(twin.weight, 2 * layer.weight)
        assert layer.weight is layer.weight


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_averaged_model_averages_v_and_g(scale):
    model = weight_norm(nn.Linear(3, 2), scale=scale)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    first = [p.clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    average.update_parameters(model)
    for p, mean in zip(first, average.module.parameters(), strict=True):
        torch.testing.assert_close(mean, 2 * p)
    assert average(torch.randn(4, 3)).isfinite().all()


def test_recurrent_layers_use_current_weights():
    layer = weight_norm(nn.LSTM(3, 4))
    x = torch.randn(5, 2, 3)
    before = layer(x)[0]
    with torch.no_grad():
        parts(layer, "weight_hh_l0").g.mul_(2)
    assert not torch.equal(layer(x)[0], before)
    layer.flatten_parameters()
    layer.to(torch.float64)
    assert layer(x.double())[0].dtype == torch.float64
    assert "_flat_weights" not in vars(layer)


def test_recurrent_weights_are_computed_once_per_forward_and_kept_by_nobody(monkeypatch):
    layer, made, compose = weight_norm(nn.LSTM(3, 4)), [], _kernels.compose

    def counted(*args):
        w = compose(*args)
        made.append(weakref.ref(w))
        return w

    monkeypatch.setattr(_kernels, "compose", counted)
    layer(torch.randn(5, 2, 3))[0].sum().backward()
    assert len(made) == 2  # input-hidden and hidden-hidden
    assert [ref() for ref in made] == [None, None]


def test_packed_sequences():
    plain = LAYERS["lstm"].make()
    layer = weight_norm(copy.deepcopy(plain))
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])
    torch.testing.assert_close(layer(packed)[0].data, plain(packed)[0].data)


@every_layer
def test_torchs_remove_parametrizations(case):
    plain, inputs = case.make(), case.inputs()
    layer = weight_norm(copy.deepcopy(plain))
    before = case.run(layer, inputs)
    for name in list(layer.parametrizations):
        parametrize.remove_parametrizations(layer, name)
    assert type(layer) is type(plain)
    torch.testing.assert_close(case.run(layer, inputs), before)


@pytest.mark.parametrize("name", ["rnn", "lstm", "gru"])
def test_recurrent_layers_in_threads(name):
    case = LAYERS[name]
    layer = weight_norm(case.make())
    inputs = [case.inputs() for _ in range(8)]
    expected = [case.run(layer, x) for x in inputs]

    def repeat(i):
        return [case.run(layer, inputs[i]) for _ in range(20)]

    for outputs, value in zip(in_threads(8, repeat), expected, strict=True):
        assert all(torch.equal(out, value) for out in outputs)


def test_recurrent_layer_called_by_another_thread_during_its_forward():
    class Interrupted(nn.GRU):
        others = 1

        def forward(self, x):
            if self.others:
                self.others -= 1
                (self.other_output,) = in_threads(1, lambda i: self(x)[0])
            return super().forward(x)

    layer, x = weight_norm(Interrupted(3, 4)), torch.randn(5, 2, 3)
    output = layer(x)[0]
    assert torch.equal(output, layer.other_output)
    assert torch.equal(output, layer(x)[0])


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


def test_a_pruned_direction_is_used():
    layer = weight_norm(nn.Linear(4, 3))
    prune.l1_unstructured(layer.parametrizations.weight, "original1", 0.5)
    assert (layer.weight == 0).sum() == 6
    torch.testing.assert_close(layer.weight.norm(dim=1), parts(layer).g.flatten())
    layer(torch.ones(1, 4)).sum().backward()
    assert layer.parametrizations.weight.original1_orig.grad is not None


@pytest.mark.parametrize("which", ["list", "module"])
def test_hooks_on_the_parametrization_run(which):
    layer = weight_norm(nn.Linear(4, 3))
    hooked = layer.parametrizations.weight
    hooked = hooked if which == "list" else hooked[0]
    handle = hooked.register_forward_hook(lambda *_: torch.zeros(3, 4))
    assert not layer.weight.any()
    handle.remove()
    assert layer.weight.any()


@pytest.mark.parametrize("make", [lambda: nn.LSTM(3, 4), lambda: nn.Linear(3, 4)])
def test_replicas_of_data_parallel(make):
    layer = make()
    weight_norm_model(layer)
    x = torch.randn(2, 5, 3)
    torch.testing.assert_close(replicated(layer)(x), layer(x))


def replicated(module):
    """A replica as nn.DataParallel makes it on each GPU: tensors in place of parameters."""
    replica = module._replicate_for_data_parallel()
    replica._modules = {name: replicated(child) for name, child in module._modules.items()}
    for name, parameter in module._parameters.items():
        setattr(replica, name, parameter.clone())
    return replica


def test_a_copy_with_another_parametrized_tensor():
    layer = weight_norm(nn.LSTM(3, 4))
    parametrize.register_parametrization(layer, "bias_ih_l0", Twice())
    x = torch.randn(2, 3)
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))


def test_reset_parameters_takes_arguments_and_assigns():
    class Scaled(nn.Linear):
        def reset_parameters(self, gain=1.0, *, bias=0.0):
            nn.init.constant_(self.weight, gain)
            nn.init.constant_(self.bias, bias)
            self.gain, self.child, self.trained = gain, nn.Identity(), self.weight.requires_grad

    layer = weight_norm(Scaled(2, 3)).requires_grad_(False)
    before = layer.child
    layer.reset_parameters(2.0, bias=5.0)
    torch.testing.assert_close(layer.weight.detach(), torch.full((3, 2), 2.0))
    torch.testing.assert_close(layer.bias.detach(), torch.full((3,), 5.0))
    assert (layer.gain, layer.trained) == (2.0, False)
    assert layer.child is not before
    assert is_weight_normed(layer)
    del layer.child
    layer.reset_parameters()
    assert isinstance(layer.child, nn.Identity)


def test_reset_parameters_may_fill_all_parameters_or_a_part():
    class Uniform(nn.Linear):
        def reset_parameters(self):
            for p in self.parameters():
                nn.init.uniform_(p, 0.5, 1)

    class ZeroRecurrence(nn.LSTM):
        def reset_parameters(self):
            super().reset_parameters()
            nn.init.zeros_(self.weight_hh_l0)

    layer = weight_norm(Uniform(8, 8))
    layer.reset_parameters()
    assert 0.49 < layer.weight.min() < layer.weight.max() < 1.01
    recurrent = ZeroRecurrence(3, 4)
    weight_norm_model(recurrent)
    recurrent.reset_parameters()
    assert not recurrent.weight_hh_l0.any()
    assert recurrent.weight_ih_l0.abs().max() <= 0.5001


def test_reset_parameters_with_another_parametrized_tensor():
    layer = weight_norm(nn.Linear(2, 3))
    parametrize.register_parametrization(layer, "bias", Twice())
    with torch.no_grad():
        layer.parametrizations.bias.original.fill_(9)
    layer.reset_parameters()
    assert layer.bias.abs().max() <= 2**-0.5


def test_a_second_parametrization_is_inverted():
    layer = weight_norm(nn.Linear(2, 3))
    parametrize.register_parametrization(layer, "weight", Twice())
    ones = torch.ones(3, 2)
    init_(layer, nn.init.ones_)
    torch.testing.assert_close(layer.weight.detach(), ones)
    layer.load_state_dict({"weight": 3 * ones, "bias": layer.bias})
    torch.testing.assert_close(layer.weight.detach(), 3 * ones)
    init_(layer, lambda w: w.mul_(2))
    torch.testing.assert_close(layer.weight.detach(), 6 * ones)
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    with pytest.raises(AttributeError, match="right_inverse"):
        init_(layer, nn.init.ones_)


def test_a_recurrent_layer_that_runs_another_in_its_forward():
    class Outer(nn.LSTM):
        def __init__(self):
            super().__init__(3, 3)
            self.inner = nn.GRU(3, 3)

        def forward(self, x):
            return super().forward(self.inner(x)[0])

    layer, x = Outer(), torch.randn(4, 2, 3)
    expected = layer(x)[0]
    weight_norm_model(layer)
    torch.testing.assert_close(layer(x)[0], expected)
