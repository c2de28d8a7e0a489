"""Compiled, traced and transformed options and networks give the same results as eager.

Every layer type on its own: conformance/features/compilers.py.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightnorm import (
    MeanOnlyBatchNorm2d,
    _kernels,
    folded,
    mean_only_batch_norm,
    normalized_weights,
    parts,
    weight_norm,
)
from zoo import LAYERS, trained_network

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

G, V = "parametrizations.weight.original0", "parametrizations.weight.original1"


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


OPTIONS = {
    "log": lambda: weight_norm(nn.Linear(3, 3), scale="log"),
    "masked": lambda: weight_norm(nn.Linear(3, 3), mask=torch.tril(torch.ones(3, 3))),
    "one-g": lambda: weight_norm(nn.Linear(3, 3), dim=None),
    "half": lambda: weight_norm(nn.Linear(3, 3, dtype=torch.bfloat16)),
    "mean-only": lambda: mean_only_batch_norm(weight_norm(nn.Linear(3, 3))),
}


def test_compiled_options_match_eager():
    layers = nn.ModuleList(make() for make in OPTIONS.values())
    x = torch.randn(6, 3)

    def outputs(layers):
        return [layer(x.to(next(layer.parameters()).dtype)) for layer in layers]

    compiled = torch.compile(outputs, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(layers), outputs(layers))


def test_inductor_matches_eager():
    model, x = trained_network(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)


def test_folding_a_compiled_model():
    model, x = trained_network(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = compiled(x)
    with folded(model):
        torch.testing.assert_close(compiled(x), expected)
    with torch.no_grad():
        parts(model[0]).g.mul_(2)
    torch.testing.assert_close(compiled(x), model(x))


def test_per_example_gradients():
    layer, x = weight_norm(nn.Linear(3, 2)), torch.randn(5, 3)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    grad = torch.func.grad(
        lambda parameters, x: torch.func.functional_call(layer, parameters, (x,)).sin().sum()
    )
    each = torch.func.vmap(grad, (None, 0))(parameters, x)
    for i in range(5):
        one = grad(parameters, x[i])
        torch.testing.assert_close({name: every[i] for name, every in each.items()}, one)


TRANSFORMS = [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.__name__)
def test_function_transforms_match_the_formula(transform):
    layer = weight_norm(nn.Linear(3, 2)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def called(parameters):
        return torch.func.functional_call(layer, parameters, (x,))

    def written_out(parameters):
        b, g, v = parameters.values()
        return x @ (g * v / v.norm(dim=1, keepdim=True)).T + b

    assert [*parameters] == ["bias", G, V]
    torch.testing.assert_close(transform(called)(parameters), transform(written_out)(parameters))


ENSEMBLES = {
    "network": (trained_network, (5, 3, 8, 8)),
    "log": (lambda: weight_norm(nn.Linear(3, 2), scale="log"), (5, 3)),
    "masked": (lambda: weight_norm(nn.Linear(3, 3), mask=torch.ones(3, 3).tril()), (5, 3)),
    "one-g": (lambda: weight_norm(nn.Conv1d(3, 2, 3), dim=None), (5, 3, 4)),
}


@pytest.mark.parametrize(("make", "shape"), ENSEMBLES.values(), ids=ENSEMBLES.keys())
def test_ensemble_by_vmap_matches_each_model(make, shape):
    models = [nn.Sequential(make()).double() for _ in range(3)]
    x = torch.randn(shape, dtype=torch.float64)
    stacked = torch.func.stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")

    def loss(parameters, buffers, x):
        return torch.func.functional_call(skeleton, (parameters, buffers), (x,)).sin().sum()

    batched = torch.func.vmap(torch.func.grad_and_value(loss), (0, 0, None))
    gradients, values = batched(*stacked, x)
    for i, model in enumerate(models):
        value = model(x).sin().sum()
        value.backward()
        torch.testing.assert_close(values[i], value.detach())
        for name, p in model.named_parameters():
            torch.testing.assert_close(gradients[name][i], p.grad)


MEAN_ONLY = {
    "in-the-layer": lambda: mean_only_batch_norm(weight_norm(nn.Conv2d(3, 4, 3))),
    "behind-it": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), MeanOnlyBatchNorm2d(4, None)),
}


@pytest.mark.parametrize("make", MEAN_ONLY.values(), ids=MEAN_ONLY.keys())
def test_compiled_running_mean_matches_eager(make):
    eager = make().double().train()
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for x in torch.randn(3, 5, 3, 8, 8, dtype=torch.float64) + 1:
        for run in (eager, compiled):
            run(x).sin().sum().backward()
    torch.testing.assert_close(gradients(model), gradients(eager))
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    eager.eval(), model.eval()
    torch.testing.assert_close(compiled(x), eager(x))


class RefuseReads(TorchDispatchMode):
    """Refuse what a CUDA graph cannot record: values read by Python or passed in by it."""

    REFUSED = ("_local_scalar_dense", "lift_fresh", "nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in self.REFUSED, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_mean_over_ranks_does_not_synchronize_with_the_device(momentum, training, one_rank):
    """Without a group, and every layer type: test_pretended_device.py."""
    layer = weight_norm(nn.Conv2d(3, 4, 3), scale="log")
    norm = MeanOnlyBatchNorm2d(4, momentum, group=one_rank)
    model = nn.Sequential(mean_only_batch_norm(layer, momentum, group=one_rank), norm)
    model.train(training)
    x = torch.randn(5, 3, 6, 6)
    with _kernels.assume_accelerator(), RefuseReads():
        model(x).sin().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_reads_are_detected():
    with RefuseReads(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(2).max().item()


def traced(layer, inputs):
    """Trace with torch.jit; it checks that a second trace, without gradients, is the same."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = torch.jit.trace(layer, inputs)
    assert not [warning for warning in caught if "weightnorm" in warning.filename]
    return module


@pytest.mark.parametrize("make", OPTIONS.values(), ids=OPTIONS.keys())
def test_jit_trace(make):
    layer = make().eval()
    x = torch.randn(6, 3, dtype=next(layer.parameters()).dtype)
    torch.testing.assert_close(traced(layer, (x,))(x), layer(x))


@pytest.mark.parametrize("name", ["linear", "lstm"])
def test_a_trace_computes_the_weight_from_v_and_g(name):
    case = LAYERS[name]
    layer, inputs = weight_norm(case.make()), case.inputs()
    module = traced(layer, inputs)
    with torch.no_grad():
        for v, g in normalized_weights(layer).values():
            v.add_(0.1 * torch.randn_like(v))
            g.mul_(2)
    torch.testing.assert_close(case.run(module, inputs), case.run(layer, inputs))
