"""torch.compile in one graph, torch.export, and the function transforms: same numbers as eager."""

import pytest
import torch
from torch import nn

from weightnorm import data_dependent_init, mean_only_batch_norm, weight_norm, weight_norm_model
from zoo import LAYERS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# Dynamo refuses recurrent layers, weight-normed or not; their cells it takes.
GRAPHED = [name for name in LAYERS if name not in ("rnn", "lstm", "gru")]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def first(out):
    return out[0] if isinstance(out, tuple) else out


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", GRAPHED)
def test_one_graph_trains_as_eager_does(name):
    case = LAYERS[name]
    layer, inputs = weight_norm(case.make()), case.inputs()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer, compiled):
        layer.zero_grad()
        out = first(run(*inputs))
        out.sin().sum().backward()
        results.append((out, gradients(layer)))
    torch.testing.assert_close(results[0], results[1])


VARIANTS = {
    "log": lambda: weight_norm(nn.Linear(3, 3), scale="log"),
    "masked": lambda: weight_norm(nn.Linear(3, 3), mask=torch.tril(torch.ones(3, 3))),
    "one-g": lambda: weight_norm(nn.Linear(3, 3), dim=None),
    "half": lambda: weight_norm(nn.Linear(3, 3, dtype=torch.bfloat16)),
    "mean-only": lambda: mean_only_batch_norm(weight_norm(nn.Linear(3, 3))),
}


@pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS.keys())
def test_one_graph_of_every_variant(make):
    layer = make()
    x = torch.randn(6, 3, dtype=next(layer.parameters()).dtype)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def network():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        mean_only_batch_norm(nn.ConvTranspose2d(4, 6, 3, groups=2)),
        nn.Flatten(),
        nn.Linear(6 * 64, 4),
    )
    weight_norm_model(model)
    data_dependent_init(model, torch.randn(20, 3, 8, 8))
    return model.eval()


def test_the_real_compiler_after_initialization():
    model, x = network(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)


def test_export():
    model, x = network(), torch.randn(2, 3, 8, 8)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))


def test_per_example_gradients():
    layer = weight_norm(nn.Linear(3, 2))
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).sin().sum()

    x = torch.randn(5, 3)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i in range(5):
        one = torch.func.grad(loss)(parameters, x[i])
        for name in one:
            torch.testing.assert_close(each[name][i], one[name])
