"""torch.compile, torch.export, torch.jit.trace and torch.func give the same results as eager."""

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
    parts,
    weight_norm,
)
from weightnorm.layers import weight_names
from zoo import LAYERS, every_layer, trained_network

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

G, V = "parametrizations.weight.original0", "parametrizations.weight.original1"

# Dynamo does not trace recurrent layers, normalized or not; it does trace their cells.
COMPILABLE = [name for name in LAYERS if name not in ("rnn", "lstm", "gru")]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def first(out):
    return out[0] if isinstance(out, tuple) else out


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", COMPILABLE)
def test_compiled_training_matches_eager(name):
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


OPTIONS = {
    "log": lambda: weight_norm(nn.Linear(3, 3), scale="log"),
    "masked": lambda: weight_norm(nn.Linear(3, 3), mask=torch.tril(torch.ones(3, 3))),
    "one-g": lambda: weight_norm(nn.Linear(3, 3), dim=None),
    "half": lambda: weight_norm(nn.Linear(3, 3, dtype=torch.bfloat16)),
    "mean-only": lambda: mean_only_batch_norm(weight_norm(nn.Linear(3, 3))),
}


@pytest.mark.parametrize("make", OPTIONS.values(), ids=OPTIONS.keys())
def test_compiled_options_match_eager(make):
    layer = make()
    x = torch.randn(6, 3, dtype=next(layer.parameters()).dtype)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


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


def test_export():
    model, x = trained_network(), torch.randn(2, 3, 8, 8)
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
    "behind-it": lambda: nn.Sequential(weight_norm(nn.Conv2d(3, 4, 3)), MeanOnlyBatchNorm2d(4)),
    "all-batches": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), MeanOnlyBatchNorm2d(4, None)),
    "network": trained_network,
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
def assume_accelerator():
    with _kernels.assume_accelerator():
        yield


@pytest.mark.usefixtures("assume_accelerator")
@every_layer
def test_no_layer_synchronizes_with_the_device(case):
    layer, inputs = weight_norm(case.make()), case.inputs()
    with RefuseReads():
        case.run(layer, inputs).sum().backward()
    assert all(p.grad is not None for p in layer.parametrizations.parameters())


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.usefixtures("assume_accelerator")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_mean_only_batch_norm_does_not_synchronize_with_the_device(momentum, training, one_rank):
    x = torch.randn(5, 3, 6, 6)
    for group in (None, one_rank):
        layer = weight_norm(nn.Conv2d(3, 4, 3), scale="log")
        norm = MeanOnlyBatchNorm2d(4, momentum, group=group)
        model = nn.Sequential(mean_only_batch_norm(layer, momentum, group=group), norm)
        model.train(training)
        with RefuseReads():
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


@every_layer
def test_jit_trace(case):
    layer, inputs = weight_norm(case.make()).eval(), case.inputs()
    assert_close = torch.testing.assert_close
    module = traced(layer, inputs)
    assert_close(first(module(*inputs)), case.run(layer, inputs))
    with torch.no_grad():
        for name in weight_names(layer):
            parts(layer, name).g.mul_(2)
    assert_close(first(module(*inputs)), case.run(layer, inputs))  # it computes w from v and g


@pytest.mark.parametrize("make", OPTIONS.values(), ids=OPTIONS.keys())
def test_jit_trace_of_every_option(make):
    layer = make().eval()
    x = torch.randn(6, 3, dtype=next(layer.parameters()).dtype)
    torch.testing.assert_close(traced(layer, (x,))(x), layer(x))
