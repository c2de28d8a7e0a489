"""Differences to torch's weight norm that the conformance table does not show, with this torch.

If a test fails, torch has changed: correct the documents.
"""

import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import weightnorm
from zoo import Vector


def ours(layer, **options):
    return weightnorm.weight_norm(layer, **options)


def torchs(layer, **options):
    return parametrizations.weight_norm(layer, **options)


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
