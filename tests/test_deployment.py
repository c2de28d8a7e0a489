"""Deployment of trained models: ONNX with and without folding, int8 after folding."""

import copy

import onnxruntime
import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic
from torch.utils import _pytree as pytree
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

from weightnorm import (
    folded,
    is_weight_normed,
    remove_weight_norm,
    weight_norm,
    weight_norm_model,
)
from zoo import LAYERS, Case, Vector, trained_network

pytestmark = [
    pytest.mark.xdist_group("deployment"),  # in one worker, so that the exporter is loaded once
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    # torch's plain recurrent layers hold a list of their weights, which the exporter warns about.
    pytest.mark.filterwarnings("ignore:The tensor attributes self.*_flat_weights:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning"),
]


FAMILIES = ("conv1d", "conv-transpose2d-grouped", "embedding-bag", "lstm", "gru-cell", "attention")
CASES = {
    **{
        name: Case(lambda case=LAYERS[name]: weight_norm(case.make()), LAYERS[name].inputs)
        for name in FAMILIES
    },
    "log": Case(lambda: weight_norm(nn.Linear(3, 4), scale="log"), lambda: (torch.randn(2, 3),)),
    "masked": Case(
        lambda: weight_norm(nn.Linear(3, 3), mask=torch.ones(3, 3).tril(-1)),  # row 0 is zero
        lambda: (torch.randn(2, 3),),
    ),
    # torch's own weight norm is exported incorrectly for these (pytorch#191749).
    "vector": Case(lambda: weight_norm(Vector(), dim=0), lambda: (torch.randn(2, 5),)),
    "vector-one-g": Case(lambda: weight_norm(Vector(), dim=None), lambda: (torch.randn(2, 5),)),
    "network": Case(trained_network, lambda: (torch.randn(2, 3, 8, 8),)),
}


NORM = {"Sqrt", "Where"}
"""Operations of w = g·v/‖v‖ that none of the plain layers contains."""


class Everything(nn.Module):
    """All cases in one graph, since the cost of exporting is per graph."""

    def __init__(self):
        super().__init__()
        self.models = nn.ModuleList(case.make() for case in CASES.values())

    def forward(self, *inputs):
        outputs = [model(*x) for model, x in zip(self.models, inputs, strict=True)]
        return tuple(out[0] if isinstance(out, tuple) else out for out in outputs)


class Exported:
    """A model exported to ONNX: the operations and tensors of its graph, and its outputs."""

    def __init__(self, model, inputs):
        program = torch.onnx.export(model, inputs, dynamo=True, optimize=False, verbose=False)
        graph = program.model.graph
        self.operations = {node.op_type for node in graph}
        self.tensors = {name: tuple(value.shape) for name, value in graph.initializers.items()}
        program.optimize()
        session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
        names = [one.name for one in session.get_inputs()]
        leaves = [leaf.numpy() for leaf in pytree.tree_leaves(inputs)]
        outputs = session.run(None, dict(zip(names, leaves, strict=True)))
        self.outputs = [torch.from_numpy(out) for out in outputs]


@pytest.fixture(scope="module")
def everything():
    torch.manual_seed(0)
    model = Everything().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model, tuple(case.inputs() for case in CASES.values())


@torch.no_grad()
def agree(exported, model, inputs):
    for name, ours, theirs in zip(CASES, model(*inputs), exported.outputs, strict=True):
        torch.testing.assert_close(theirs, ours, msg=lambda text, name=name: f"{name}: {text}")


def test_onnx_without_folding(everything):
    model, inputs = everything
    exported = Exported(model, inputs)
    agree(exported, model, inputs)
    assert exported.operations >= NORM


def test_onnx_folded(everything):
    model, inputs = everything
    with folded(model):
        exported = Exported(model, inputs)
        weights = {name: tuple(p.shape) for name, p in model.named_parameters()}
    agree(exported, model, inputs)
    assert not exported.operations & NORM
    assert exported.tensors.items() >= weights.items()
    assert not any("original" in name for name in exported.tensors)


class Reader(nn.Module):
    """Layers of every type that torch's dynamic quantization supports."""

    def __init__(self):
        super().__init__()
        self.sequence = nn.LSTM(32, 32, batch_first=True)
        self.middle = nn.Linear(32, 16)
        self.cell = nn.GRUCell(16, 16)

    def forward(self, x):
        return self.cell(self.middle(self.sequence(x)[0][:, -1]).relu())


def classifier():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


def by_torch(model):
    return quantize_dynamic(model, {nn.Linear, nn.LSTM, nn.GRUCell})


def by_torchao(model):
    model = copy.deepcopy(model)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


QUANTIZERS = {
    "torch": (by_torch, Reader, (4, 7, 32), "from_float only works for"),
    "torchao": (by_torchao, classifier, (4, 32), "attribute 'weight' already exists"),
}
every_quantizer = pytest.mark.parametrize(
    ("quantized", "make", "shape", "refusal"), QUANTIZERS.values(), ids=QUANTIZERS.keys()
)


def normalized(make):
    model = make()
    weight_norm_model(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.5 * torch.rand_like(p))
    return model.eval()


def close_but_rounded(int8, exact):
    return 0 < (int8 - exact).norm() < 0.03 * exact.norm()


@torch.no_grad()
@every_quantizer
@pytest.mark.filterwarnings("ignore::UserWarning")  # of older releases of torchao
def test_int8_after_folding(quantized, make, shape, refusal):
    model, x = normalized(make), torch.randn(shape)
    exact = model(x)
    with folded(model):
        inside, twin = quantized(model), copy.deepcopy(model)
    removed = copy.deepcopy(model)
    remove_weight_norm(removed)
    for int8 in (inside, quantized(twin), quantized(removed)):
        assert close_but_rounded(int8(x), exact)
        assert torch.equal(int8(x), inside(x))
    assert torch.equal(model(x), exact)
    assert all(is_weight_normed(layer) for layer in model.children() if [*layer.parameters()])


@every_quantizer
@pytest.mark.filterwarnings("ignore::UserWarning")  # of older releases of torchao
def test_quantizers_refuse_without_folding(quantized, make, shape, refusal):
    with pytest.raises((AssertionError, KeyError), match=refusal):
        quantized(normalized(make))
