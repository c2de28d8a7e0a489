"""Batched computation of weights: same weights, same gradients, per thread."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from weightnorm import batched_weights, remove_weight_norm, weight_norm, weight_norm_model
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


def test_one_call_per_shape():
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)])
    weight_norm_model(net)
    weights = batched_weights(net)
    with Calls() as calls, weights:
        pass
    assert calls.names.count("aten::cat") == 2  # v and g
    assert len(calls.names) < 20
    with Calls() as calls, weights:
        net(torch.randn(1, 3))
    assert not any("norm" in name for name in calls.names[20:])


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
