"""Applying weight norm: same output, same training as torch's, errors that change nothing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_map

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
from weightnorm.layers import units_of, weight_names
from zoo import LAYERS, every_layer

SCALES = ["linear", "log"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def names(model):
    return list(normalized_weights(model))


def snapshot(module):
    return {k: v.clone() for k, v in module.state_dict().items()}, str(module)


@pytest.mark.parametrize("scale", SCALES)
@every_layer
def test_applying_keeps_the_output(case, scale):
    layer, inputs = case.make(), case.inputs()
    before = case.run(layer, inputs)
    assert weight_norm(layer, scale=scale) is layer
    torch.testing.assert_close(case.run(layer, inputs), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_layer
def test_applying_and_removing_change_no_bit(case, dtype):
    plain = case.make().to(dtype)
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    layer = weight_norm(plain)
    for name in weight_names(layer):
        assert torch.equal(getattr(layer, name), before[name])
    remove_weight_norm(layer)
    assert all(torch.equal(p, before[name]) for name, p in layer.named_parameters())


@every_layer
def test_every_v_and_g_receives_a_gradient(case):
    layer, inputs = weight_norm(case.make()), case.inputs()
    (case.run(layer, inputs) * torch.randn_like(case.run(layer, inputs))).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        if "parametrizations" in name:
            assert parameter.grad.abs().sum() > 0, name


@every_layer
def test_one_g_for_each_output_unit(case):
    layer = weight_norm(case.make())
    for name in weight_names(layer):
        v, g = parts(layer, name)
        torch.testing.assert_close(g, norm(v, units_of(layer)))


def test_transposed_convolutions_have_one_g_for_each_output_channel():
    layer = weight_norm(nn.ConvTranspose2d(4, 6, 3, groups=2))
    assert parts(layer).g.shape == (2, 3, 1, 1)
    x = torch.randn(2, 4, 5, 5)
    before = layer(x) - layer.bias.view(-1, 1, 1)
    with torch.no_grad():
        parts(layer).g[1, 0] *= 2  # output channel 3 = group 1, channel 0
    after = layer(x) - layer.bias.view(-1, 1, 1)
    ratio = torch.ones(6)
    ratio[3] = 2
    torch.testing.assert_close(after, before * ratio.view(-1, 1, 1))


STEPPED = ["linear", "bilinear", "conv1d", "conv2d", "conv3d", "embedding", "lstm-cell", "gru-cell"]


@pytest.mark.parametrize("name", STEPPED)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_optimizer_steps_match_torchs_weight_norm(name, optimizer):
    ours, case = LAYERS[name].make().double(), LAYERS[name]
    inputs = case.inputs()
    inputs = tree_map(lambda x: x.double() if x.is_floating_point() else x, inputs)
    theirs = copy.deepcopy(ours)
    weight_norm(ours)
    for tensor in weight_names(theirs):
        parametrizations.weight_norm(theirs, tensor)
    losses = []
    for layer in (ours, theirs):
        step = optimizer(layer.parameters(), lr=0.1)
        for _ in range(3):
            step.zero_grad()
            loss = case.run(layer, inputs).square().sum()
            loss.backward()
            step.step()
        losses.append(loss)
    torch.testing.assert_close(*losses)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, None, "auto"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_every_dim_dtype_and_scale(dtype, dim, scale, kind):
    layer = kind(3, 5, 2).to(dtype)
    before = layer.weight.detach().clone()
    weight_norm(layer, dim=dim, scale=scale)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(layer.weight, before, rtol=4 * eps, atol=4 * eps)
    kept = {"auto": int(kind is nn.ConvTranspose2d)}.get(dim, dim)
    expected = (
        () if kept is None else tuple(n if i == kept % 4 else 1 for i, n in enumerate(before.shape))
    )
    v, g = parts(layer)
    assert g.shape == expected
    assert v.dtype == g.dtype == layer.weight.dtype == dtype
    layer.weight.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parametrizations.parameters())


def test_log_scale_stores_s_under_its_own_state_dict_key():
    layer = weight_norm(nn.Linear(3, 2), scale="log")
    s = layer.parametrizations.weight.original0
    torch.testing.assert_close(s.exp(), norm(layer.weight))
    torch.testing.assert_close(parts(layer).g, s.exp())
    assert "parametrizations.weight.0.log_scale" in layer.state_dict()


def test_frozen_g_does_not_change():
    layer = weight_norm(nn.Linear(3, 2), train_g=False)
    g = parts(layer).g.clone()
    layer(torch.randn(4, 3)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert torch.equal(parts(layer).g, g)
    assert parts(layer).v.grad.abs().sum() > 0


def test_frozen_g_stays_frozen_when_the_model_is_unfrozen():
    layer = weight_norm(nn.Linear(3, 2), train_g=False).requires_grad_(False).requires_grad_(True)
    assert not parts(layer).g.requires_grad
    assert [name for name, _ in layer.named_parameters()] == [
        "bias", "parametrizations.weight.original1"
    ]  # fmt: skip
    twin = weight_norm(nn.Linear(3, 2), train_g=False)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(copy.deepcopy(twin).weight, layer.weight)


def test_frozen_layer_stays_frozen():
    layer = weight_norm(nn.Linear(3, 2).requires_grad_(False))
    assert not any(p.requires_grad for p in layer.parameters())


def test_masked_weights_are_normalized_within_the_mask():
    mask = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 0]])
    layer = weight_norm(nn.Linear(3, 3), mask=mask)
    torch.testing.assert_close(norm(layer.weight)[:2], parts(layer).g[:2])
    assert (layer.weight[mask == 0] == 0).all()
    layer.weight.sum().backward()
    assert (parts(layer).v.grad[mask == 0] == 0).all()
    assert all(p.grad.isfinite().all() for p in layer.parametrizations.parameters())
    assert set(layer.state_dict()) == set(weight_norm(nn.Linear(3, 3)).state_dict())
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)


def test_zero_initialized_layer_can_train():
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)
    weight_norm(layer)
    assert (layer.weight == 0).all()
    step = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(32, 4)
    losses = []
    for _ in range(200):
        step.zero_grad()
        loss = (layer(x) - x[:, :3]).square().mean()
        loss.backward()
        step.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_autocast_normalizes_in_float32():
    layer = weight_norm(nn.Linear(8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.weight.dtype == torch.float32
        out = layer(torch.randn(2, 8))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert parts(layer).v.grad.dtype == torch.float32


def test_custom_module_with_name_and_dim():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(2, 3, 4))

    module = Scale()
    before = module.kernel.detach().clone()
    weight_norm(module, "kernel", dim=-2)
    assert parts(module, "kernel").g.shape == (1, 3, 1)
    torch.testing.assert_close(module.kernel, before)


def test_one_dimensional_weight_with_dim_none():
    layer = weight_norm(nn.LayerNorm(5), "weight", dim=None)
    torch.testing.assert_close(layer.weight, torch.ones(5))
    assert parts(layer).g.shape == ()


def test_init_sets_the_normalized_weight():
    layer = weight_norm(nn.Linear(4, 3))
    before = layer.weight.detach().clone()
    nn.init.ones_(layer.weight)
    assert torch.equal(layer.weight, before)  # it filled a temporary tensor
    init_(layer, lambda w: nn.init.normal_(w, std=0.05))
    assert layer.weight.std() < 0.1
    assert not torch.equal(layer.weight, before)
    plain = init_(nn.Linear(4, 3), nn.init.ones_)
    assert (plain.weight == 1).all()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_init_sets_weights_normalized_by_torch():
    for flavour in (nn.utils.weight_norm, parametrizations.weight_norm):
        layer = init_(flavour(nn.Linear(4, 3)), nn.init.ones_)
        torch.testing.assert_close(layer(torch.eye(4)) - layer.bias, torch.ones(4, 3))


def test_assigning_a_weight_copies_it():
    layer, other = weight_norm(nn.Linear(4, 3)), torch.randn(3, 4)
    layer.weight = other
    torch.testing.assert_close(layer.weight, other)
    other.zero_()
    assert (parts(layer).v != 0).any()
    with pytest.raises(ValueError, match=r"got a weight of shape \(4, 3\), expected \(3, 4\)"):
        layer.weight = torch.randn(4, 3)


def test_assigning_a_parameter_is_refused():
    layer, other = weight_norm(nn.Linear(4, 3)), nn.Linear(4, 3)
    before = layer.weight.detach().clone()
    with pytest.raises(TypeError, match=r"weight of this Linear is computed from v and g"):
        layer.weight = other.weight
    assert torch.equal(layer.weight, before)
    layer.bias = other.bias  # what is not normalized is a parameter as usual
    assert layer.bias is other.bias
    layer.register_parameter("scale", nn.Parameter(torch.ones(3)))
    assert {"bias", "scale"} <= dict(layer.named_parameters()).keys()
    remove_weight_norm(layer)
    layer.weight = other.weight
    assert layer.weight is other.weight


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


def test_tied_weights_stay_tied():
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "out": nn.Linear(3, 7, bias=False)})
    model["out"].weight = model["embed"].weight
    weight_norm_model(model, where=lambda name, module: isinstance(module, nn.Embedding))
    assert names(model) == ["embed.weight", "out.weight"]
    assert parts(model["embed"]).v is parts(model["out"]).v
    assert len(list(model.parameters())) == 2
    twin = copy.deepcopy(model)
    assert parts(twin["embed"]).v is parts(twin["out"]).v
    remove_weight_norm(model)
    assert model["out"].weight is model["embed"].weight


def test_tied_weights_with_different_axes_are_refused():
    model = nn.ModuleList([nn.Conv1d(3, 3, 2), nn.ConvTranspose1d(3, 3, 2)])
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"along different axes; pass dim .* same axis for both"):
        weight_norm_model(model)
    assert model[0].weight is model[1].weight
    assert type(model[0]) is nn.Conv1d
    weight_norm_model(model, dim=0)
    assert parts(model[0]).g is parts(model[1]).g


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


def test_tied_weights_of_which_one_is_chosen_by_default():
    model, x = TiedLanguageModel(), torch.tensor([1, 5])
    before, count = model(x), sum(p.numel() for p in model.parameters())
    assert names(weight_norm_model(model)) == ["shared", "embed.weight", "head.weight"]
    torch.testing.assert_close(model(x), before)
    assert parts(model.embed).v is parts(model.head).v is parts(model, "shared").v
    assert sum(p.numel() for p in model.parameters()) == count + 7  # one g for each unit
    model(x).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(model.embed.weight, model.head.weight)
    remove_weight_norm(model)
    assert model.embed.weight is model.head.weight is model.shared


class Transposed(nn.Module):
    """A layer whose weight has shape (inputs, outputs), as transformers' Conv1D."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x):
        return x @ self.weight


def test_weights_of_unknown_modules_are_listed():
    model = nn.Sequential(nn.Embedding(5, 3), Transposed(3, 4), nn.Linear(4, 2), nn.LayerNorm(2))
    assert names(weight_norm_model(model)) == ["2.weight"]
    assert list(unnormalized_weights(model)) == ["0.weight", "1.weight"]
    assert unnormalized_weights(model)["1.weight"] is model[1].weight
    weight_norm(model[1], dim=1)
    assert list(unnormalized_weights(model)) == ["0.weight"]


def test_unnormalized_weights_of_lazy_and_torchs_layers():
    model = nn.ModuleList([nn.LazyLinear(3), parametrizations.weight_norm(nn.Linear(2, 2))])
    assert unnormalized_weights(model) == {}


def test_where_selects_weights_of_unknown_modules_by_dim():
    model = nn.Sequential(Transposed(3, 4), nn.Linear(4, 2), nn.LayerNorm([2, 2]))
    everything = {"where": lambda name, module: True}
    with pytest.raises(ValueError, match=r"0.weight: the output axis of a parameter of Transposed"):
        weight_norm_model(model, **everything)
    assert names(weight_norm_model(model, dim=1, **everything)) == ["0.weight", "1.weight"]
    assert parts(model[0]).g.shape == (1, 4)
    with pytest.raises(ValueError, match="all 2 weights are normalized already"):
        weight_norm_model(model, **everything)


class Experts(nn.Module):
    """Stacked matrices that are not called ``weight``, and a fused projection."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, 4, 3)), nn.Parameter(torch.randn(2, 3, 4))
        self.qkv, self.scale = nn.Parameter(torch.randn(9, 3)), nn.Parameter(torch.ones(3))


def test_parameters_are_chosen_by_name():
    model = nn.Sequential(Experts(), nn.Linear(3, 2))
    before = [p.detach().clone() for p in model.parameters()]
    stacked = lambda name, module: name in ("0.up", "0.down")  # noqa: E731
    weight_norm_model(model, where=stacked, dim=(0, 1))
    weight_norm_model(model, where=lambda name, module: name.endswith("qkv"), dim=0)
    assert names(model) == ["0.up", "0.down", "0.qkv"]
    assert [g.shape for _, g in normalized_weights(model).values()] == [
        (2, 4, 1), (2, 3, 1), (9, 1)
    ]  # fmt: skip
    remove_weight_norm(model)
    after = {tuple(p.shape): p for p in model.parameters()}
    for tensor in before:
        torch.testing.assert_close(after[tuple(tensor.shape)].detach(), tensor)


def test_dim_may_be_a_function_of_name_and_module():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    weight_norm_model(model, dim=lambda name, module: 0 if name == "0.weight" else 1)
    assert [g.shape for _, g in normalized_weights(model).values()] == [(3, 1), (1, 3)]


def test_lazy_layers_are_normalized_when_materialized():
    model = nn.Sequential(nn.LazyConvTranspose2d(4, 3), nn.Flatten(), nn.LazyLinear(2))
    weight_norm_model(model)
    assert not is_weight_normed(model[0])
    model(torch.randn(2, 3, 5, 5))
    assert parts(model[0]).g.shape == (1, 4, 1, 1)
    assert parts(model[2]).g.shape == (2, 1)
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


def test_lazy_layers_are_not_normalized_twice():
    model = nn.Sequential(nn.LazyLinear(3))
    weight_norm_model(model)
    with pytest.raises(ValueError, match="all 1 weights are normalized already"):
        weight_norm_model(model)
    with pytest.raises(ValueError, match="already; use remove_weight_norm"):
        weight_norm(model[0])
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each(torch.randn(2, 4))
        assert parts(each[0]).g.shape == (3, 1)


GIVEN = {
    "number": (2.0, torch.full((3, 1), 2.0)),
    "integer": (2, torch.full((3, 1), 2.0)),
    "scalar tensor": (torch.tensor(0.5), torch.full((3, 1), 0.5)),
    "tensor": (torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [2.0], [3.0]])),
    "function of the shape": (lambda shape: shape[1] ** -0.5, torch.full((3, 1), 0.5)),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("train_g", [True, False])
@pytest.mark.parametrize(("g", "expected"), GIVEN.values(), ids=GIVEN.keys())
def test_initial_g(g, expected, scale, train_g):
    plain = nn.Linear(4, 3)
    layer = weight_norm(copy.deepcopy(plain), g=g, scale=scale, train_g=train_g)
    torch.testing.assert_close(parts(layer).g, expected)
    torch.testing.assert_close(parts(layer).v, plain.weight)
    torch.testing.assert_close(norm(layer.weight), expected)
    s = layer.parametrizations.weight.original0
    assert isinstance(s, nn.Parameter) == train_g
    torch.testing.assert_close(s, expected.log() if scale == "log" else expected)


@every_layer
def test_initial_g_of_every_layer(case):
    model = nn.Sequential(case.make())
    weight_norm_model(model, where=lambda name, module: name.count(".") == 1, g=0.5)
    for v, g in normalized_weights(model).values():
        assert (g == 0.5).all()
        assert v.isfinite().all()


def test_initial_g_of_lazy_and_zero_weights():
    model = nn.Sequential(nn.LazyLinear(3))
    weight_norm_model(model, g=2)
    model(torch.randn(2, 4))
    assert (parts(model[0]).g == 2).all()
    zero = nn.Linear(4, 3)
    nn.init.zeros_(zero.weight)
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    masked = weight_norm(zero, g=1.0, mask=mask).weight
    torch.testing.assert_close(norm(masked), torch.tensor([[1.0], [1.0], [0.0]]))
    assert not masked[mask == 0].any()


def test_initial_g_may_be_negative_on_a_linear_scale():
    plain = nn.Linear(4, 3)
    layer = weight_norm(copy.deepcopy(plain), g=-1.0)
    torch.testing.assert_close(layer.weight, -plain.weight / plain.weight.norm(dim=1, keepdim=True))


def test_initial_g_does_not_share_memory():
    g = torch.ones(3, 1)
    layer = weight_norm(nn.Linear(4, 3), g=g)
    g.zero_()
    assert (parts(layer).g == 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_half_precision_keeps_the_weight_to_one_rounding(dim, dtype):
    for seed in range(10):
        torch.manual_seed(seed)
        layer = nn.Linear(64, 64).to(dtype)
        before = layer.weight.detach().double()
        weight_norm(layer, dim=dim)
        error = (layer.weight.double() - before).abs() / before.abs()
        assert error.max() <= torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_norms_of_large_weights_are_exact_for_every_axis(dim, dtype):
    torch.manual_seed(0)
    w = torch.randn(2048, 2048).to(dtype)
    wide = w.double()
    exact = wide.norm() if dim is None else wide.norm(dim=1 - dim, keepdim=True)
    torch.testing.assert_close(norm(w, Units(dim)).double(), exact, rtol=5e-6, atol=0)


@pytest.mark.parametrize("options", [{"scale": "log"}, {"scale": "log", "g": 2.0}, {}])
def test_every_tensor_is_on_the_device_of_the_weight(options):
    """The meta device stands for an accelerator."""
    if "g" not in options:
        layer = weight_norm(nn.Linear(3, 2, device="meta"), **options)
        assert {t.device.type for t in layer.state_dict().values()} == {"meta"}
        assert {t.device.type for t in layer.buffers()} <= {"meta"}
    layer = weight_norm(nn.Linear(3, 2), **options).to("meta")
    assert {t.device.type for t in [*layer.parameters(), *layer.buffers()]} == {"meta"}


BAD = {
    "container": (nn.Sequential(nn.Linear(3, 2)), {}, ValueError, "none: normalize its layers"),
    "dim is a float": (nn.Linear(3, 2), {"dim": 1.5}, TypeError, "dim=1.5; expected an axis"),
    "dim is a bool": (nn.Linear(3, 2), {"dim": True}, TypeError, "dim=True; expected an axis"),
    "negative eps": (nn.Linear(3, 2), {"eps": -1.0}, ValueError, "eps=-1.0 must be a number"),
    "eps is NaN": (nn.Linear(3, 2), {"eps": float("nan")}, ValueError, "eps=nan must be"),
    "g of another shape": (
        nn.Linear(3, 2),
        {"g": torch.ones(3)},
        ValueError,
        r"broadcast to \(2, 1",
    ),
    "g not finite": (nn.Linear(3, 2), {"g": float("nan")}, ValueError, "g=nan must be finite"),
    "log of 0": (nn.Linear(3, 2), {"g": 0, "scale": "log"}, ValueError, "g=0 must be positive"),
    "fixed at 0": (nn.Linear(3, 2), {"g": 0, "train_g": False}, ValueError, "g=0 must be positive"),
    "g from a wrong function": (
        nn.Linear(3, 2),
        {"g": lambda shape: "1"},
        TypeError,
        r"g=1 for Linear.weight of shape \(2, 3\); expected a number or a tensor",
    ),
    "no direction": (nn.Linear(3, 2), {"dim": (0, 1)}, ValueError, "keeps every axis"),
    "g on meta": (nn.Linear(3, 2, device="meta"), {"g": 1}, ValueError, "g would lose its values"),
    "no such parameter": (
        nn.Linear(3, 2),
        {"name": "wieght"},
        ValueError,
        "the parameters are weight, bias",
    ),
    "no parameter at all": (
        nn.ReLU(),
        {},
        ValueError,
        "ReLU.weight does not exist; the parameters are none",
    ),
    "one-dimensional": (
        nn.LayerNorm(3),
        {},
        ValueError,
        "output axis of a parameter of LayerNorm is unknown",
    ),
    "dim too large": (nn.Linear(3, 2), {"dim": 2}, IndexError, "dim=2 is out of range"),
    "dim too small": (nn.Linear(3, 2), {"dim": -3}, IndexError, "dim=-3 is out of range"),
    "dim unknown": (nn.Linear(3, 2), {"dim": "rows"}, TypeError, "dim='rows'; expected an axis"),
    "complex": (nn.Linear(3, 2, dtype=torch.complex64), {}, TypeError, "complex64; .* two real"),
    "scale unknown": (
        nn.Linear(3, 2),
        {"scale": "lin"},
        ValueError,
        "'lin' is unknown; expected one of",
    ),
    "wrong mask": (nn.Linear(3, 2), {"mask": torch.ones(2)}, ValueError, "mask has shape"),
    "twice": (weight_norm(nn.Linear(3, 2)), {}, ValueError, "already; use remove_weight_norm"),
    "twice, torch's": (
        parametrizations.weight_norm(nn.Linear(3, 2)),
        {},
        ValueError,
        "already; use remove_weight_norm",
    ),
    "another parametrization": (
        parametrizations.spectral_norm(nn.Linear(3, 2)),
        {},
        ValueError,
        "another parametrization; apply weight norm before",
    ),
    "sparse gradients": (
        nn.Embedding(4, 2, sparse=True),
        {},
        ValueError,
        "its gradients are sparse",
    ),
    "max_norm": (nn.Embedding(4, 2, max_norm=1.0), {}, ValueError, "build it without"),
    "attention bias": (
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        {"name": "bias_k"},
        ValueError,
        "bias_k is appended",
    ),
    "attention in three": (
        nn.MultiheadAttention(4, 2, kdim=3),
        {"name": "in_proj_weight"},
        ValueError,
        "use q_proj_weight, k_proj_weight, v_proj_weight",
    ),
    "attention in one": (
        nn.MultiheadAttention(4, 2),
        {"name": "q_proj_weight"},
        ValueError,
        "a block of in_proj_weight",
    ),
}


@pytest.mark.parametrize(("layer", "options", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_and_changes_nothing(layer, options, error, message):
    before, text = snapshot(layer)
    with pytest.raises(error, match=message):
        weight_norm(layer, **options)
    after, text_after = snapshot(layer)
    assert text_after == text
    torch.testing.assert_close(after, before)


def test_integer_weights_are_refused():
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"torch.int8; .*floating-point"):
        weight_norm(layer)


def test_sparse_weights_are_refused():
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(torch.eye(2, 3).to_sparse())
    with pytest.raises(TypeError, match="dense weight"):
        weight_norm(layer)


def test_refused_model_is_unchanged():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.complex64))
    before, text = snapshot(model)
    with pytest.raises(TypeError):
        weight_norm_model(model)
    assert snapshot(model)[1] == text
    assert list(model.state_dict()) == list(before)


def test_failure_midway_is_rolled_back(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weights = [layer.weight for layer in model]
    register, calls = _parametrize.register, []

    def failing(*args):
        if calls:
            raise MemoryError
        calls.append(args)
        return register(*args)

    monkeypatch.setattr(_parametrize, "register", failing)
    with pytest.raises(MemoryError):
        weight_norm_model(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    assert all(layer.weight is weight for layer, weight in zip(model, weights, strict=True))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            nn.Sequential(nn.ReLU()),
            {},
            "it has no linear, convolutional, recurrent or attention layer",
        ),
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


def test_weights_partitioned_by_deepspeed_are_refused():
    layer = nn.Linear(2, 3)
    layer.weight.ds_id, layer.weight.data = 0, torch.empty(0)  # as ZeRO-3 leaves it
    with pytest.raises(ValueError, match=r"Linear.weight is empty here: .*GatheredParameters"):
        weight_norm(layer)


def test_init_may_change_a_weight_in_place():
    layer = weight_norm(nn.Linear(2, 3))
    before = layer.weight.detach().clone()
    init_(layer, lambda w: w.mul_(0.5))
    torch.testing.assert_close(layer.weight.detach(), before / 2)


def test_a_mask_of_other_numbers_is_refused():
    with pytest.raises(ValueError, match="mask must hold 0 and 1"):
        weight_norm(nn.Linear(2, 3), mask=torch.full((3, 2), 0.5))


def test_the_mask_is_copied():
    mask = torch.ones(3, 2)
    layer = weight_norm(nn.Linear(2, 3), mask=mask)
    mask.zero_()
    assert layer.weight.all()


def test_a_lazy_layer_whose_mask_does_not_fit_keeps_raising():
    layer = weight_norm(nn.LazyLinear(3), mask=torch.ones(3, 5))
    for _ in range(2):
        with pytest.raises(ValueError, match="mask"):
            layer(torch.ones(1, 2))


def test_a_failed_application_restores_the_order_of_parameters(monkeypatch):
    class BiasFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.weight = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 2))

    layer = BiasFirst()

    def out_of_memory(*_):
        raise MemoryError

    monkeypatch.setattr(WeightNorm, "stored", out_of_memory)
    with pytest.raises(MemoryError):
        weight_norm(layer, dim=0, g=2.0)
    assert not is_weight_normed(layer)
    assert [*layer.state_dict()] == ["bias", "weight"]


@pytest.mark.parametrize("apply", [weight_norm, lambda m: WeightNormOptimizer(m, torch.optim.SGD)])
def test_weights_of_8_bits_are_refused(apply):
    layer = nn.Linear(2, 3).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="16 bits or more"):
        apply(layer)


def test_a_recurrent_layer_with_another_forward_is_refused():
    layer = nn.LSTM(3, 4)
    layer.forward = layer.forward  # as accelerate's hooks assign it
    with pytest.raises(ValueError, match="the forward of this layer was replaced"):
        weight_norm(layer)
    with pytest.raises(ValueError, match="the forward of this layer was replaced"):
        weight_norm_model(nn.Sequential(layer))
    assert not is_weight_normed(layer)


def test_parameters_keep_their_order_when_a_later_layer_is_refused():
    model = nn.Sequential(nn.LSTM(2, 3), nn.Linear(3, 4), nn.ConvTranspose1d(4, 3, 1))
    model[1].weight = model[2].weight = nn.Parameter(torch.randn(4, 3, 1))
    order, before = [name for name, _ in model.named_parameters()], snapshot(model)
    with pytest.raises(ValueError, match="along different axes"):
        weight_norm_model(model)
    assert [name for name, _ in model.named_parameters()] == order
    assert str(model) == before[1]
    assert all(torch.equal(x, before[0][name]) for name, x in model.state_dict().items())


def test_a_failure_while_g_is_set_leaves_a_plain_layer(monkeypatch):
    stored, calls = WeightNorm.stored, []

    def fails_for_the_given_g(self, g):
        calls.append(g)
        if len(calls) > 1:
            raise MemoryError
        return stored(self, g)

    monkeypatch.setattr(WeightNorm, "stored", fails_for_the_given_g)
    layer = nn.Linear(2, 3)
    before = snapshot(layer)
    with pytest.raises(MemoryError):
        weight_norm(layer, g=2.0)
    assert type(layer) is nn.Linear
    assert str(layer) == before[1]
    assert all(torch.equal(x, before[0][name]) for name, x in layer.state_dict().items())


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_gains_of_a_norm_over_several_axes_are_no_matrix(make):
    model = nn.Sequential(nn.Linear(3, 3), make((2, 3)))
    weight_norm_model(model, where=lambda name, module: True, dim=0)
    assert names(model) == ["0.weight"]
