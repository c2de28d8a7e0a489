"""Batched computation of weights: same weights, same gradients, per thread."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode

from threads import in_threads
from weightnorm import (
    batched_weights,
    batching,
    kernels,
    parts,
    remove_weight_norm,
    weight_norm,
    weight_norm_model,
)
from weightnorm.batching import MAX_ELEMENTS
from zoo import every_layer


def model():
    """Layers of which some can be batched, along either axis, and some cannot."""
    torch.manual_seed(0)
    layers = [
        nn.Conv1d(4, 4, 3, padding=1),
        nn.Conv1d(4, 6, 3, padding=1, groups=1),
        nn.ConvTranspose1d(6, 4, 3, padding=1),
        nn.ConvTranspose1d(4, 4, 3, padding=1, groups=2),
        nn.ConvTranspose1d(4, 4, 3, padding=1, groups=2),
        nn.ConvTranspose1d(4, 4, 3, padding=1),
        nn.ConvTranspose1d(4, 6, 3, padding=1),
        nn.ConvTranspose1d(6, 4, 3, padding=1),
    ]
    net = nn.Sequential(*layers).double()
    weight_norm_model(net)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1 + 0.3 * torch.rand_like(p))
    return net


def gradients(net, x, context):
    net.zero_grad()
    with context:
        out = net(x)
        loss = out.square().sum()
    loss.backward()
    return out, [p.grad for p in net.parameters()]


def unbatched():
    return torch.enable_grad()


def test_output_and_gradients_match():
    net, x = model(), torch.randn(2, 4, 7, dtype=torch.float64)
    expected = gradients(net, x, unbatched())
    torch.testing.assert_close(
        gradients(net, x, batched_weights(net)), expected, rtol=1e-12, atol=0
    )


def test_accelerator_path_matches(monkeypatch):
    """There, weights of several shapes are concatenated flat."""
    flat = []
    compute = kernels.fused_flat
    monkeypatch.setattr(kernels, "fused_flat", lambda **kw: flat.append(kw) or compute(**kw))
    torch.manual_seed(0)
    layers = [nn.Conv1d(4, 4, 2 * k + 1, padding=k) for k in (0, 1, 2, 1, 0)]
    net = nn.Sequential(*layers, nn.ConvTranspose1d(4, 4, 1), nn.ConvTranspose1d(4, 4, 1)).double()
    weight_norm_model(net)
    parts(net[1]).v.data[2] = 0.0  # a zero row
    x = torch.randn(2, 4, 7, dtype=torch.float64)
    expected = gradients(net, x, unbatched())
    with kernels.assume_accelerator():
        got = gradients(net, x, batched_weights(net))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert [kw["rows"].lengths for kw in flat] == [(4, 12, 20)]


def test_accelerator_path_has_second_derivatives():
    v, g = torch.randn(20, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    rows = kernels.flat_rows([2, 3], [4, 4], v.device)

    def function(v, g):
        return kernels.fused_flat(v, g, rows)

    inputs = v.requires_grad_(), g.requires_grad_()
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def test_accelerator_path_batches_the_smallest_weights_up_to_a_size(monkeypatch):
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 400))
    weight_norm_model(net)
    monkeypatch.setattr(batching, "MAX_BYTES", 3 * 16 * 4)
    with kernels.assume_accelerator():
        (batch,) = batching._batches_of(net)
    assert [weight.path for weight in batch.weights] == ["0.weight", "1.weight", "2.weight"]


@every_layer
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_two_layers_of_every_type(case, scale):
    torch.manual_seed(0)
    pair = nn.ModuleList([case.make().double(), case.make().double()])
    weight_norm_model(pair, where=lambda name, module: name in "01", scale=scale)
    inputs = [x.double() if x.is_floating_point() else x for x in flat(case.inputs())]
    inputs = regrouped(case.inputs(), inputs)
    results = []
    for context in (unbatched(), batched_weights(pair)):
        pair.zero_grad()
        with context:
            out = case.run(pair[0], inputs) + case.run(pair[1], inputs)
        out.square().sum().backward()
        results.append((out, [p.grad for p in pair.parameters()]))
    torch.testing.assert_close(*results)


def flat(inputs):
    return [y for x in inputs for y in (flat(x) if isinstance(x, tuple) else [x])]


def regrouped(shape, values):
    values = iter(values)

    def fill(x):
        return tuple(map(fill, x)) if isinstance(x, tuple) else next(values)

    return fill(shape)


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


LAYERS = 40


def test_one_call_per_shape():
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(LAYERS)])
    weight_norm_model(net)
    weights = batched_weights(net)
    with Calls() as calls, weights:
        pass
    assert calls.names.count("aten::cat") == 2  # v and g
    assert len(calls.names) < LAYERS
    with Calls() as calls, weights:
        net(torch.randn(1, 3))
    assert not any("norm" in name for name in calls.names[LAYERS:])


def test_large_masked_and_torchs_weights_are_not_batched():
    net = nn.Sequential(
        nn.Linear(2, 2),
        weight_norm(nn.Linear(2, 2), mask=torch.tensor([[1.0, 0.0], [1.0, 1.0]])),
        weight_norm(nn.Linear(2, 2), dim=None),
        parametrizations.weight_norm(nn.Linear(2, 2)),
        weight_norm(nn.Linear(2, 2)),
        weight_norm(nn.Linear(2, MAX_ELEMENTS // 2 + 1)),
        weight_norm(nn.Linear(2, MAX_ELEMENTS // 2 + 1)),
    )
    parametrize.register_parametrization(net[4], "weight", nn.Tanh(), unsafe=True)
    weights = batched_weights(net)
    assert weights._batches == []
    expected = net[:5](torch.ones(1, 2))
    with weights:
        torch.testing.assert_close(net[:5](torch.ones(1, 2)), expected)


def test_tied_weights_stay_tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    weight_norm_model(net)
    x = torch.randn(2, 3)
    expected = gradients(net, x, unbatched())
    torch.testing.assert_close(gradients(net, x, batched_weights(net)), expected)
    with batched_weights(net):
        assert net[0].weight is net[1].weight


def test_reentering_after_every_step():
    net, x = model(), torch.randn(2, 4, 7, dtype=torch.float64)
    twin = copy.deepcopy(net)
    weights = batched_weights(net)
    for each, context in ((net, weights), (twin, unbatched())):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.001)
        for _ in range(3):
            optimizer.zero_grad()
            with context:
                loss = each(x).square().sum()
            loss.backward()
            optimizer.step()
    for mine, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=0)


def test_cache_is_empty_after_an_exception():
    net = model()
    weights = batched_weights(net)
    with pytest.raises(KeyError), weights, weights:
        raise KeyError
    assert net[0].weight is not net[0].weight


def test_cache_is_empty_after_failing_to_enter():
    net = model()
    weights = batched_weights(net)
    bad = nn.Parameter(torch.ones(3, dtype=torch.float64))
    net[3].parametrizations.weight.original0 = bad
    with pytest.raises(RuntimeError), weights:
        pass
    assert net[0].weight is not net[0].weight


def test_weights_loaded_or_removed_between_blocks():
    net, x = model(), torch.randn(2, 4, 7, dtype=torch.float64)
    weights = batched_weights(net)
    state = {key: 2 * value for key, value in net.state_dict().items()}
    net.load_state_dict(state, assign=True)
    expected = net(x)
    with weights:
        torch.testing.assert_close(net(x), expected)
    remove_weight_norm(net)
    with weights:
        torch.testing.assert_close(net(x), expected)


def test_second_derivatives():
    net, x = model(), torch.randn(2, 4, 7, dtype=torch.float64)
    penalties = []
    for context in (unbatched(), batched_weights(net)):
        net.zero_grad()
        with context:
            loss = net(x).square().sum()
        first = torch.autograd.grad(loss, [*net.parameters()], create_graph=True)
        sum(g.square().sum() for g in first).backward()
        penalties.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*penalties, rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_model():
    net, x = model(), torch.randn(2, 4, 7, dtype=torch.float64)
    compiled, weights = torch.compile(net, backend="eager"), batched_weights(net)
    for _ in range(3):
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.1)
        expected = net(x)
        with weights:
            torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(compiled(x), expected)


def test_gradients_do_not_cross_threads():
    net = model()
    x = [torch.randn(2, 4, 7, dtype=torch.float64) for _ in range(4)]
    weights = batched_weights(net)

    def gradients_of(output):
        return torch.autograd.grad(output.square().sum(), [*net.parameters()])

    expected = [gradients_of(net(each)) for each in x]

    def repeat(i):
        results = []
        for _ in range(10):
            with weights if i % 2 else unbatched():
                output = net(x[i])
            results.append(gradients_of(output))
        return results

    for results, value in zip(in_threads(4, repeat), expected, strict=True):
        for result in results:
            torch.testing.assert_close(result, value, rtol=1e-9, atol=1e-12)


def test_block_affects_only_its_thread():
    net = model()
    with batched_weights(net):
        assert net[0].weight is net[0].weight
        (first, second) = in_threads(2, lambda i: net[0].weight)
        assert first is not second
        assert first is not net[0].weight


CHANGES = {
    "removed and normalized again": lambda net: (remove_weight_norm(net), weight_norm_model(net)),
    "one layer removed and normalized again": lambda net: (
        remove_weight_norm(net[0]),
        weight_norm(net[0], scale="log"),
    ),
    "one layer removed": lambda net: remove_weight_norm(net[4]),
    "second parametrization": lambda net: parametrize.register_parametrization(
        net[0], "weight", nn.Tanh(), unsafe=True
    ),
    "frozen": lambda net: net[3].requires_grad_(False),
    "v and g replaced": lambda net: net.load_state_dict(
        copy.deepcopy(net.state_dict()), assign=True
    ),
    "to another dtype and back": lambda net: net[0].float().double(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_model_that_changed_between_blocks(change):
    net, x = model(), torch.randn(2, 4, 7, dtype=torch.float64)
    weights = batched_weights(net)
    with weights:
        net(x)
    change(net)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.1)
    expected = gradients(net, x, unbatched())
    torch.testing.assert_close(gradients(net, x, weights), expected, rtol=1e-9, atol=1e-12)


def test_layers_of_another_dtype_keep_it():
    net = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])
    weight_norm_model(net)
    weights = batched_weights(net)
    net[1].bfloat16()
    with weights:
        assert [layer.weight.dtype for layer in net] == [
            torch.float32,
            torch.bfloat16,
            torch.float32,
        ]


def test_weights_entered_without_gradients_receive_them_later():
    net, x = model(), torch.randn(2, 4, 7, dtype=torch.float64)
    expected = gradients(net, x, unbatched())
    net.zero_grad()
    with torch.no_grad():
        weights = batched_weights(net)
        with weights, torch.enable_grad():
            net(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], expected[1])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_model_is_not_recompiled_every_step():
    net, x, graphs = model(), torch.randn(2, 4, 7, dtype=torch.float64), []
    weights = batched_weights(net)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    for _ in range(4):
        with weights:
            loss = compiled(x).square().sum()
        loss.backward()
        optimizer.step()
    assert len(graphs) <= 2


def test_a_model_that_holds_its_batched_weights_can_be_copied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    weight_norm_model(model)
    model.batched = batched_weights(model)
    copied = copy.deepcopy(model)
    x = torch.randn(2, 3)
    with torch.no_grad():
        parts(model[0]).g.mul_(2)
    with copied.batched:
        y = copied(x)
    torch.testing.assert_close(y, copied(x))
    y.sum().backward()
    assert parts(copied[0]).v.grad is not None
    assert parts(model[0]).v.grad is None


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_weight_without_rows():
    model = nn.ModuleList([nn.Linear(4, 0), nn.Linear(4, 0), nn.Linear(4, 2), nn.Linear(4, 2)])
    weight_norm_model(model)
    with batched_weights(model):
        assert [layer(torch.ones(1, 4)).shape[1] for layer in model] == [0, 0, 2, 2]


def test_removal_inside_the_block_gives_every_weight_its_own_memory():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weight_norm_model(model)
    with batched_weights(model):
        remove_weight_norm(model)
    first, second = (layer.weight.untyped_storage() for layer in model)
    assert first.data_ptr() != second.data_ptr()
    assert first.nbytes() == 9 * 4


def test_a_pruned_weight_is_not_batched():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    weight_norm_model(model)
    batched = batched_weights(model)
    for layer in model[:2]:
        prune.l1_unstructured(layer.parametrizations.weight, "original1", 0.5)
        with batched, batched_weights(model):
            y = model(torch.ones(1, 3))
        torch.testing.assert_close(y, model(torch.ones(1, 3)))


def test_activation_checkpointing_with_the_backward_pass_inside():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    weight_norm_model(model)
    expected = copy.deepcopy(model)
    x = torch.randn(2, 3)
    with batched_weights(model):
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    expected(x).sum().backward()
    for got, want in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_the_smallest_weights_are_batched_wherever_they_are(monkeypatch):
    net = nn.Sequential(nn.Linear(4, 400), *[nn.Linear(4, 4) for _ in range(3)])
    weight_norm_model(net)
    monkeypatch.setattr(batching, "MAX_BYTES", 3 * 16 * 4)
    with kernels.assume_accelerator():
        (batch,) = batching._batches_of(net)
    assert [weight.path for weight in batch.weights] == ["1.weight", "2.weight", "3.weight"]


@pytest.mark.parametrize(("size", "count"), [(MAX_ELEMENTS // 2, 1), (MAX_ELEMENTS // 2 + 1, 0)])
def test_the_largest_weight_that_is_batched_on_a_cpu(size, count):
    net = nn.Sequential(*(weight_norm(nn.Linear(2, size)) for _ in range(2)))
    assert len(batched_weights(net)._batches) == count


@pytest.mark.parametrize("on_device", [False, True])
def test_layers_of_another_eps_or_g_of_another_type_are_computed_as_alone(on_device):
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    for layer in net[:4]:
        weight_norm(layer)
    for layer in net[4:]:
        weight_norm(layer, eps=100.0)  # all of its rows are zero rows
    for layer in net[2:4]:
        layer.parametrizations.weight.original0.data = parts(layer).g.detach().double()
    expected = [layer.weight.detach().clone() for layer in net]
    with kernels.assume_accelerator() if on_device else contextlib.nullcontext():
        weights = batched_weights(net)
        assert len(weights._batches) == 3
        with weights:
            torch.testing.assert_close([layer.weight.detach() for layer in net], expected)
    assert (expected[5] == 0).all()


def test_a_frozen_weight_needs_no_gradient_in_a_block():
    net = nn.Sequential(*(weight_norm(nn.Linear(3, 3)) for _ in range(4)))
    net[:2].requires_grad_(False)
    with batched_weights(net):
        assert [layer.weight.requires_grad for layer in net] == [False, False, True, True]
