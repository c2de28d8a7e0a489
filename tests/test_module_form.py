"""Applying weight norm: same output, options, whole models, errors that change nothing.

What every layer type must do is tested by ``conformance``.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from weightnorm import (
    WeightNormOptimizer,
    _parametrize,
    init_,
    is_weight_normed,
    normalized_weights,
    parts,
    remove_weight_norm,
    unnormalized_weights,
    weight_norm,
    weight_norm_model,
)
from weightnorm._weight_norm import WeightNorm
from weightnorm.functional import Units, norm
from weightnorm.layers import weight_names
from zoo import every_layer


def names(model):
    return list(normalized_weights(model))


def snapshot(module):
    return {k: v.clone() for k, v in module.state_dict().items()}, str(module)


def assert_unchanged(module, before):
    state, text = snapshot(module)
    assert text == before[1]
    assert [*state] == [*before[0]]
    assert all(torch.equal(x, before[0][name]) for name, x in state.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_layer
def test_applying_and_removing_change_no_bit(case, dtype):
    plain = case.make().to(dtype)
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    layer = weight_norm(plain)
    assert layer is plain
    for name in weight_names(layer):
        assert torch.equal(getattr(layer, name), before[name])
    remove_weight_norm(layer)
    assert all(torch.equal(p, before[name]) for name, p in layer.named_parameters())


OPTIONS = [
    (torch.float16, "linear"),
    (torch.bfloat16, "log"),
    (torch.float32, "log"),
    (torch.float64, "linear"),
]


@pytest.mark.parametrize(("dtype", "scale"), OPTIONS)
@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, None, "auto"])
def test_every_dim(dtype, dim, scale):
    layer = nn.ConvTranspose2d(3, 5, 2).to(dtype)
    before = layer.weight.detach().clone()
    weight_norm(layer, dim=dim, scale=scale)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(layer.weight, before, rtol=4 * eps, atol=4 * eps)
    kept = 1 if dim == "auto" else dim
    expected = (
        () if kept is None else tuple(n if i == kept % 4 else 1 for i, n in enumerate(before.shape))
    )
    v, g = parts(layer)
    assert g.shape == expected
    assert v.dtype == g.dtype == layer.weight.dtype == dtype
    layer.weight.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parametrizations.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_half_precision(dim, dtype):
    """The weight is kept to one rounding; the norms of a large one are exact."""
    layer = nn.Linear(64, 64).to(dtype)
    before = layer.weight.detach().double()
    weight_norm(layer, dim=dim)
    error = (layer.weight.double() - before).abs() / before.abs()
    assert error.max() <= torch.finfo(dtype).eps
    w = torch.randn(1024, 1024).to(dtype)
    wide = w.double()
    exact = wide.norm() if dim is None else wide.norm(dim=1 - dim, keepdim=True)
    torch.testing.assert_close(norm(w, Units(dim)).double(), exact, rtol=5e-6, atol=0)


# — options —


def test_log_scale_stores_s_under_its_own_state_dict_key():
    layer = weight_norm(nn.Linear(3, 2), scale="log")
    s = layer.parametrizations.weight.original0
    torch.testing.assert_close(s.exp(), norm(layer.weight))
    torch.testing.assert_close(parts(layer).g, s.exp())
    assert "parametrizations.weight.0.log_scale" in layer.state_dict()


def test_frozen_g_stays_frozen_when_the_model_is_unfrozen():
    layer = weight_norm(nn.Linear(3, 2), train_g=False).requires_grad_(False).requires_grad_(True)
    assert not parts(layer).g.requires_grad
    assert [name for name, _ in layer.named_parameters()] == [
        "bias", "parametrizations.weight.original1"
    ]  # fmt: skip
    twin = weight_norm(nn.Linear(3, 2), train_g=False)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(copy.deepcopy(twin).weight, layer.weight)


def test_masked_weights_are_normalized_within_the_mask():
    mask = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 0]])
    given = mask.clone()
    layer = weight_norm(nn.Linear(3, 3), mask=given)
    given.zero_()  # it was copied
    torch.testing.assert_close(norm(layer.weight)[:2], parts(layer).g[:2])
    assert (layer.weight[mask == 0] == 0).all()
    layer.weight.sum().backward()
    assert (parts(layer).v.grad[mask == 0] == 0).all()
    assert all(p.grad.isfinite().all() for p in layer.parametrizations.parameters())
    assert set(layer.state_dict()) == set(weight_norm(nn.Linear(3, 3)).state_dict())
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)
    lazy = weight_norm(nn.LazyLinear(3), mask=torch.ones(3, 5))
    for _ in range(2):  # a lazy layer whose mask does not fit keeps raising
        with pytest.raises(RuntimeError, match="must match"):
            lazy(torch.ones(1, 2))


GIVEN = {
    "number": (2.0, torch.full((3, 1), 2.0)),
    "integer": (2, torch.full((3, 1), 2.0)),
    "scalar tensor": (torch.tensor(0.5), torch.full((3, 1), 0.5)),
    "tensor": (torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [2.0], [3.0]])),
    "function of the shape": (lambda shape: shape[1] ** -0.5, torch.full((3, 1), 0.5)),
}


@pytest.mark.parametrize(("scale", "train_g"), [("linear", True), ("log", True), ("log", False)])
@pytest.mark.parametrize(("g", "expected"), GIVEN.values(), ids=GIVEN.keys())
def test_initial_g(g, expected, scale, train_g):
    plain = nn.Linear(4, 3)
    layer = weight_norm(copy.deepcopy(plain), g=g, scale=scale, train_g=train_g)
    if isinstance(g, torch.Tensor):
        g.neg_().neg_()  # shares no memory with g
    torch.testing.assert_close(parts(layer).g, expected)
    torch.testing.assert_close(parts(layer).v, plain.weight)
    torch.testing.assert_close(norm(layer.weight), expected)
    s = layer.parametrizations.weight.original0
    assert isinstance(s, nn.Parameter) == train_g
    torch.testing.assert_close(s, expected.log() if scale == "log" else expected)


def test_initial_g_of_lazy_and_zero_weights():
    model = nn.Sequential(nn.LazyLinear(3))
    weight_norm_model(model, g=2)
    model(torch.randn(2, 4))
    assert (parts(model[0]).g == 2).all()
    zero = nn.Linear(4, 3)
    nn.init.zeros_(zero.weight)
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    g = torch.ones(3, 1)
    masked = weight_norm(zero, g=g, mask=mask)
    g.zero_()  # it was copied
    torch.testing.assert_close(norm(masked.weight), torch.tensor([[1.0], [1.0], [0.0]]))
    assert not masked.weight[mask == 0].any()
    plain = nn.Linear(4, 3)
    negative = weight_norm(copy.deepcopy(plain), g=-1.0)
    torch.testing.assert_close(negative.weight, -plain.weight / norm(plain.weight))


@pytest.mark.parametrize("options", [{"scale": "log"}, {"scale": "log", "g": 2.0}, {}])
def test_every_tensor_is_on_the_device_of_the_weight(options):
    """The meta device stands for an accelerator."""
    if "g" not in options:
        layer = weight_norm(nn.Linear(3, 2, device="meta"), **options)
        assert {t.device.type for t in layer.state_dict().values()} == {"meta"}
        assert {t.device.type for t in layer.buffers()} <= {"meta"}
    layer = weight_norm(nn.Linear(3, 2), **options).to("meta")
    assert {t.device.type for t in [*layer.parameters(), *layer.buffers()]} == {"meta"}


class Experts(nn.Module):
    """Stacked matrices that are not called ``weight``, and a fused projection."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, 4, 3)), nn.Parameter(torch.randn(2, 3, 4))
        self.qkv, self.scale = nn.Parameter(torch.randn(9, 3)), nn.Parameter(torch.ones(3))


def test_parameters_of_any_name_and_number_of_axes():
    module = weight_norm(Experts(), "up", dim=-2)
    assert parts(module, "up").g.shape == (1, 4, 1)
    weight_norm(module, "scale", dim=None)  # one g for a vector
    assert parts(module, "scale").g.shape == ()
    torch.testing.assert_close(module.scale, torch.ones(3))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "flavour", [weight_norm, parametrizations.weight_norm, nn.utils.weight_norm, nn.Identity()]
)
def test_init_sets_the_weight(flavour):
    layer, x = flavour(nn.Linear(4, 3)), torch.eye(4)
    assert init_(layer, nn.init.ones_) is layer
    torch.testing.assert_close(layer(x) - layer.bias, torch.ones(4, 3))
    init_(layer, lambda w: w.mul_(0.5))
    torch.testing.assert_close(layer(x) - layer.bias, torch.full((4, 3), 0.5))


def test_assigning_something_else_than_a_weight_is_refused():
    layer, other = weight_norm(nn.Linear(4, 3)), nn.Linear(4, 3)
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match=r"got a weight of shape \(4, 3\), expected \(3, 4\)"):
        layer.weight = torch.randn(4, 3)
    with pytest.raises(KeyError, match="attribute 'weight' already exists"):
        layer.weight = other.weight
    assert torch.equal(layer.weight, before)
    layer.bias = other.bias  # what is not normalized is a parameter as usual
    layer.register_parameter("scale", nn.Parameter(torch.ones(3)))
    assert {"bias", "scale"} <= dict(layer.named_parameters()).keys()
    remove_weight_norm(layer)
    layer.weight = other.weight
    assert (layer.weight, layer.bias) == (other.weight, other.bias)


# — models —


def test_weight_norm_model_normalizes_every_known_layer():
    model = nn.Sequential(
        nn.Embedding(9, 4), nn.LSTM(4, 4), nn.TransformerEncoderLayer(4, 2, 8), nn.LayerNorm(4)
    )
    assert weight_norm_model(model) is model
    chosen = names(model)
    assert chosen == [
        "1.weight_ih_l0",
        "1.weight_hh_l0",
        "2.self_attn.in_proj_weight",
        "2.self_attn.out_proj.weight",
        "2.linear1.weight",
        "2.linear2.weight",
    ]
    weight_norm_model(model, where=lambda name, module: name == "0.weight")
    assert names(model) == ["0.weight", *chosen]


@pytest.mark.parametrize("training", [True, False])
def test_transformer_layer_keeps_its_output(training):
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():  # in evaluation mode torch uses its fused implementation
        before = model(x)
        weight_norm_model(model)
        torch.testing.assert_close(model(x), before)


class TiedLanguageModel(nn.Module):
    """An embedding and an output layer that share a weight, and a custom module that uses it."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.shared = nn.Parameter(torch.empty(0))
        self.shared = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x)) + F.linear(self.embed(x), self.shared)


@pytest.mark.parametrize("where", [None, lambda name, module: name == "embed.weight"])
def test_tied_weights_stay_tied(where):
    model, x = TiedLanguageModel(), torch.tensor([1, 5])
    before, count = model(x), sum(p.numel() for p in model.parameters())
    assert names(weight_norm_model(model, where=where)) == ["shared", "embed.weight", "head.weight"]
    torch.testing.assert_close(model(x), before)
    assert parts(model.embed).v is parts(model.head).v is parts(model, "shared").v
    assert sum(p.numel() for p in model.parameters()) == count + 7  # one g for each unit
    twin = copy.deepcopy(model)
    assert parts(twin.embed).v is parts(twin.head).v is not parts(model.head).v
    model(x).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(model.embed.weight, model.head.weight)
    remove_weight_norm(model)
    assert model.embed.weight is model.head.weight is model.shared


def test_tied_weights_with_different_axes_are_refused():
    model = nn.Sequential(nn.LSTM(2, 3), nn.Linear(3, 4), nn.ConvTranspose1d(4, 3, 1))
    model[1].weight = model[2].weight = nn.Parameter(torch.randn(4, 3, 1))
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"along different axes; pass dim .* same axis for both"):
        weight_norm_model(model)
    assert_unchanged(model, before)
    assert model[1].weight is model[2].weight
    weight_norm_model(model, dim=0)
    assert parts(model[1]).g is parts(model[2]).g


def test_weights_of_unknown_modules_are_chosen_by_name_and_dim():
    class Transposed(nn.Module):
        """A layer whose weight has shape (inputs, outputs), as transformers' Conv1D."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

    gains = [nn.LayerNorm((2, 3)), nn.RMSNorm((2, 3))]
    model = nn.Sequential(nn.Embedding(5, 3), Transposed(), nn.Linear(4, 2), *gains)
    assert names(weight_norm_model(model)) == ["2.weight"]
    assert list(unnormalized_weights(model))[:2] == ["0.weight", "1.weight"]
    everything = lambda name, module: True  # noqa: E731
    with pytest.raises(ValueError, match=r"1.weight: the output axis of a parameter of Transposed"):
        weight_norm_model(model, where=everything)
    weight_norm_model(model, where=everything, dim=lambda name, module: int(name == "1.weight"))
    assert names(model) == ["0.weight", "1.weight", "2.weight"]  # no gain of a norm
    assert [g.shape for _, g in normalized_weights(model).values()] == [(5, 1), (1, 4), (2, 1)]
    with pytest.raises(ValueError, match="all 3 weights are normalized already"):
        weight_norm_model(model, where=everything, dim=0)
    torchs = nn.ModuleList([nn.LazyLinear(3), parametrizations.weight_norm(nn.Linear(2, 2))])
    assert unnormalized_weights(torchs) == {}


def test_parameters_are_chosen_by_name():
    model = nn.Sequential(Experts(), nn.Linear(3, 2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stacked = lambda name, module: name in ("0.up", "0.down")  # noqa: E731
    weight_norm_model(model, where=stacked, dim=(0, 1))
    weight_norm_model(model, where=lambda name, module: name.endswith("qkv"), dim=0)
    assert names(model) == ["0.up", "0.down", "0.qkv"]
    assert [g.shape for _, g in normalized_weights(model).values()] == [
        (2, 4, 1), (2, 3, 1), (9, 1)
    ]  # fmt: skip
    for name, tensor in remove_weight_norm(model).named_parameters():
        torch.testing.assert_close(tensor.detach(), before[name])


# — lazy layers —


def test_lazy_layers_are_normalized_when_materialized():
    model = nn.Sequential(nn.LazyConvTranspose2d(4, 3), nn.Flatten(), nn.LazyLinear(2))
    weight_norm_model(model)
    assert not is_weight_normed(model[0])
    with pytest.raises(ValueError, match="all 2 weights are normalized already"):
        weight_norm_model(model)
    with pytest.raises(ValueError, match="already; use remove_weight_norm"):
        weight_norm(model[0])
    for each in (copy.deepcopy(model), model):
        each(torch.randn(2, 3, 5, 5))
        assert parts(each[0]).g.shape == (1, 4, 1, 1)
        assert parts(each[2]).g.shape == (2, 1)
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    assert parts(model[2]).v.grad is not None


def test_failed_call_leaves_no_hooks_on_lazy_layers():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3, dtype=torch.complex64))
    pair = nn.Sequential(nn.LazyLinear(3), nn.Conv1d(3, 3, 2), nn.ConvTranspose1d(3, 3, 2))
    pair[2].weight = pair[1].weight
    for refused in (model, pair):
        before = [len(module._forward_pre_hooks) for module in refused.modules()]
        with pytest.raises((TypeError, ValueError)):
            weight_norm_model(refused)
        assert [len(module._forward_pre_hooks) for module in refused.modules()] == before
    model[0](torch.randn(2, 4))
    assert type(model[0]) is nn.Linear


def test_tied_lazy_layers_stay_tied():
    model = nn.Sequential(nn.LazyLinear(3, bias=False), nn.LazyLinear(3, bias=False))
    model[1].weight = model[0].weight
    weight_norm_model(model)
    x = torch.randn(1, 4)
    assert torch.equal(model[0](x), model[1](x))
    assert parts(model[0]).v is parts(model[1]).v


# — errors —


def with_weight(weight):
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    return layer


LINEAR = nn.Linear(3, 2)
AGAIN = "already; use remove_weight_norm"
COMPUTED = "another parametrization, pruning or a hook computes it; apply weight norm before"
BAD = {
    "container": (nn.Sequential(LINEAR), {}, ValueError, "none: normalize its layers"),
    "dim is a float": (LINEAR, {"dim": 1.5}, TypeError, "dim=1.5; expected an axis"),
    "dim unknown": (LINEAR, {"dim": "rows"}, TypeError, "dim='rows'; expected an axis"),
    "dim too large": (LINEAR, {"dim": 2}, IndexError, "dim=2 is out of range"),
    "no direction": (LINEAR, {"dim": (0, 1)}, ValueError, "keeps every axis"),
    "g of another shape": (LINEAR, {"g": torch.ones(3)}, ValueError, r"broadcast to \(2, 1"),
    "g not finite": (LINEAR, {"g": float("nan")}, ValueError, "g=nan must be finite"),
    "log of 0": (LINEAR, {"g": 0, "scale": "log"}, ValueError, "g=0 must be positive"),
    "fixed at 0": (
        LINEAR,
        {"g": lambda shape: 0, "train_g": False},
        ValueError,
        r"g=0 for Linear.weight of shape \(2, 3\) must be positive",
    ),
    "g on meta": (nn.Linear(3, 2, device="meta"), {"g": 1}, ValueError, "g would lose its values"),
    "scale unknown": (LINEAR, {"scale": "exp"}, ValueError, "scale='exp' .* or 'log', which"),
    "wrong mask": (LINEAR, {"mask": torch.ones(2)}, RuntimeError, "must match"),
    "fractional mask": (LINEAR, {"mask": torch.full((2, 3), 0.5)}, ValueError, "hold 0 and 1"),
    "no such parameter": (LINEAR, {"name": "wieght"}, ValueError, "parameters are weight, bias"),
    "unknown module": (nn.LayerNorm(3), {}, ValueError, "of a parameter of LayerNorm is unknown"),
    "complex": (with_weight(torch.ones(2, 2) * 1j), {}, TypeError, "complex64; .* two real"),
    "integers": (with_weight(torch.ones(2, 3).char()), {}, TypeError, "int8; .*floating-point"),
    "8 bits": (with_weight(torch.ones(2, 3).to(torch.float8_e5m2)), {}, TypeError, "16 bits or"),
    "sparse": (with_weight(torch.eye(2, 3).to_sparse()), {}, TypeError, "dense weight"),
    "twice": (weight_norm(nn.Linear(3, 2)), {}, ValueError, AGAIN),
    "twice, torch's": (parametrizations.weight_norm(nn.Linear(3, 2)), {}, ValueError, AGAIN),
    "parametrized": (parametrizations.spectral_norm(nn.Linear(3, 2)), {}, ValueError, COMPUTED),
    "sparse gradients": (nn.Embedding(4, 2, sparse=True), {}, ValueError, "gradients are sparse"),
    "max_norm": (nn.Embedding(4, 2, max_norm=1.0), {}, ValueError, "build it without"),
}


@pytest.mark.parametrize(("layer", "options", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_and_changes_nothing(layer, options, error, message):
    before, text = snapshot(layer)
    with pytest.raises(error, match=message):
        weight_norm(layer, **options)
    after, text_after = snapshot(layer)
    assert text_after == text
    torch.testing.assert_close(after, before)


def test_weights_of_8_bits_are_refused_by_the_optimizer():
    with pytest.raises(TypeError, match="16 bits or more"):
        WeightNormOptimizer(nn.Linear(2, 3).to(torch.float8_e4m3fn), torch.optim.SGD)


class BiasFirst(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.weight = nn.Parameter(self._parameters.pop("weight"))


@pytest.mark.parametrize("fails", ["register", "stored"])
def test_a_failure_leaves_plain_layers(monkeypatch, fails):
    """While the second weight is registered, and while its g is set."""
    model = nn.Sequential(BiasFirst(), BiasFirst())
    before, weights = snapshot(model), [layer.weight for layer in model]
    where, last = (_parametrize, 1) if fails == "register" else (WeightNorm, 3)
    original, calls = getattr(where, fails), []

    def failing(*args):
        calls.append(args)
        if len(calls) > last:
            raise MemoryError
        return original(*args)

    monkeypatch.setattr(where, fails, failing)
    with pytest.raises(MemoryError):
        weight_norm_model(model, g=2.0)
    assert_unchanged(model, before)
    assert [type(layer) for layer in model] == [BiasFirst, BiasFirst]
    assert all(layer.weight is weight for layer, weight in zip(model, weights, strict=True))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.ReLU()), {}, "it has no linear, convolutional, recurrent or attention"),
        (nn.Linear(2, 2), {"where": lambda name, module: False}, "selected none of its 1 layers"),
        (weight_norm(nn.Linear(2, 2)), {}, "all 1 weights are normalized already"),
    ],
)
def test_nothing_to_normalize_is_an_error(model, options, message):
    with pytest.raises(ValueError, match=message):
        weight_norm_model(model, **options)


def test_parts_of_a_plain_layer_is_an_error():
    with pytest.raises(ValueError, match="no weight-normalized tensor 'weight'; apply weight_norm"):
        parts(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="normalized here: weight_ih_l0, weight_hh_l0"):
        parts(weight_norm(nn.GRU(2, 2)))
