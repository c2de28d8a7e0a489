"""The differences to torch's weight norm that README lists, with the installed torch.

If a test fails, torch has changed: remove that row from the table.
"""

import copy
import pickle

import onnxruntime
import pytest
import torch
from torch import nn
from torch.autograd import gradgradcheck
from torch.nn.utils import parametrizations

import weightnorm
from conformance.implementation import without_correction
from zoo import Vector


def ours(layer, **options):
    return weightnorm.weight_norm(layer, **options)


def torchs(layer, **options):
    return parametrizations.weight_norm(layer, **options)


def test_transposed_convolutions():
    make = lambda: nn.ConvTranspose1d(4, 6, 3)  # noqa: E731
    assert ours(make()).parametrizations.weight.original0.numel() == 6
    assert torchs(make()).parametrizations.weight.original0.numel() == 4


def has_right_second_derivatives(layer):
    leaves = tuple(
        p.detach().double().requires_grad_() for p in layer.parametrizations.parameters()
    )
    names = [n for n, _ in layer.named_parameters() if "parametrizations" in n]

    def weight(*values):
        return torch.func.functional_call(
            layer, dict(zip(names, values, strict=True)), torch.eye(4, dtype=torch.float64)
        )

    return gradgradcheck(weight, leaves, raise_exception=False)


def test_second_derivatives():
    assert has_right_second_derivatives(ours(nn.Linear(4, 3).double()))
    with without_correction():
        assert not has_right_second_derivatives(torchs(nn.Linear(4, 3).double()))


@pytest.mark.xdist_group("deployment")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_weights_of_one_dimension_in_onnx():
    def exports_correctly(layer):
        x = torch.randn(2, 5)
        program = torch.onnx.export(layer.eval(), (x,), dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
        (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        return torch.allclose(torch.from_numpy(out), layer(x))

    assert exports_correctly(ours(Vector(), dim=0))
    if torch.__version__ < "2.14":  # pytorch#191749: correct in 2.15
        assert not exports_correctly(torchs(Vector(), dim=0))


def zeroed():
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)
    return layer


def test_zero_rows():
    assert ours(zeroed()).weight.isfinite().all()
    assert torchs(zeroed()).weight.isnan().any()


def test_removing_from_a_copy():
    layer = ours(nn.Linear(4, 3))
    weightnorm.remove_weight_norm(copy.deepcopy(layer))
    assert layer.weight.shape == (3, 4)
    layer = torchs(nn.Linear(4, 3))
    nn.utils.parametrize.remove_parametrizations(copy.deepcopy(layer), "weight")
    with pytest.raises(AttributeError):
        _ = layer.weight


def test_pickling_a_module():
    assert pickle.loads(pickle.dumps(ours(nn.Linear(4, 3)))).weight.shape == (3, 4)
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
        pickle.dumps(torchs(nn.Linear(4, 3)))


def test_negative_dim():
    g = {
        (name, dim): flavour(nn.Linear(4, 3), dim=dim).parametrizations.weight.original0.shape
        for name, flavour in (("ours", ours), ("torch", torchs))
        for dim in (None, -1)
    }
    assert g["ours", None] == ()
    assert g["ours", -1] == (1, 4)
    assert g["torch", None] == g["torch", -1]


def test_recurrent_weights_per_sequence():
    def evaluations(layer, sequence):
        count = 0

        def count_calls(parametrization):
            forward = parametrization.forward

            def wrapper(*args):
                nonlocal count
                count += 1
                return forward(*args)

            parametrization.forward = wrapper

        for parametrization_list in layer.parametrizations.values():
            count_calls(parametrization_list[0])
        layer(sequence)
        return count

    x = torch.randn(5, 2, 3)
    theirs = nn.LSTM(3, 4)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        parametrizations.weight_norm(theirs, name)
    assert evaluations(ours(nn.LSTM(3, 4)), x) == 2
    assert evaluations(theirs, x) > 2
