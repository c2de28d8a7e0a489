"""Initialization without data: norms through 50 layers, exact values, and what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weightnorm import (
    MeanOnlyBatchNorm1d,
    MeanOnlyBatchNorm2d,
    convert_state_dict,
    folded,
    mean_only_batch_norm,
    parts,
    robust_init,
    weight_norm,
    weight_norm_model,
)
from weightnorm.functional import norm, unit_rows
from weightnorm.layers import unit_axis

DEPTH = 50


def linear(width):
    return nn.Linear(width, width)


def conv(width):
    # Circular padding: zeros at the border would take away a part of the norm.
    return nn.Conv2d(width, width, 3, padding=1, padding_mode="circular")


class Block(nn.Module):
    def __init__(self, make, width):
        super().__init__()
        self.first, self.second = make(width), make(width)

    def forward(self, x):
        return x + self.second(F.relu(self.first(x)))


def plain_network(make, width):
    return nn.Sequential(*(nn.Sequential(make(width), nn.ReLU()) for _ in range(DEPTH)))


def residual_network(make, width):
    return nn.Sequential(*(Block(make, width) for _ in range(DEPTH)))


def norms(model, shape):
    """Mean norms of the activations after each child, and of the loss gradients there."""
    x = torch.randn(shape)
    activations = [x / x.flatten(1).norm(dim=1).view(-1, *[1] * (x.ndim - 1))]
    for block in model:
        activations.append(block(activations[-1]))
        activations[-1].retain_grad()
    activations[-1].backward(torch.randn_like(activations[-1]))
    sizes = [a.detach().flatten(1).norm(dim=1).mean() for a in activations]
    gradients = [a.grad.flatten(1).norm(dim=1).mean() for a in activations[1:]]
    return torch.stack(sizes), torch.stack(gradients)


CASES = [(linear, 256, (16, 256)), (conv, 128, (4, 128, 4, 4))]


@pytest.mark.parametrize("normed", [True, False], ids=["weight-norm", "plain"])
@pytest.mark.parametrize(("make", "width", "shape"), CASES, ids=["linear", "conv"])
def test_norms_are_kept_through_50_layers(make, width, shape, normed):
    torch.manual_seed(0)
    model = plain_network(make, width)
    if normed:
        weight_norm_model(model)
    _, gradients = norms(model, shape)
    assert gradients[0] < 1e-3 * gradients[-1]  # torch's default initialization
    robust_init(model)
    activations, gradients = norms(model, shape)
    # Kept in expectation; chance moves the norm by a factor of about exp(½√(3·50/width)).
    assert activations.max() / activations.min() < 4
    assert gradients.max() / gradients.min() < 4


@pytest.mark.parametrize(("make", "width", "shape"), CASES, ids=["linear", "conv"])
def test_norms_are_kept_through_50_residual_blocks(make, width, shape):
    torch.manual_seed(0)
    model = residual_network(make, width)
    weight_norm_model(model)
    robust_init(model, residual="*.second")
    activations, gradients = norms(model, shape)
    bound = math.sqrt(math.e)
    assert 1 < activations[-1] / activations[0] < 1.1 * bound
    assert 1 < gradients[0] / gradients[-1] < 1.1 * bound
    robust_init(model)
    activations, _ = norms(model, shape)
    assert activations[-1] / activations[0] > 1e3


LAYERS = {
    "linear": lambda: nn.Linear(12, 6),
    "wide-linear": lambda: nn.Linear(6, 12),
    "conv": lambda: nn.Conv2d(4, 6, 3),
    "grouped": lambda: nn.Conv1d(4, 8, 3, groups=2),
    "depthwise": lambda: nn.Conv1d(4, 4, 3, groups=4),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3),
    "grouped-transposed": lambda: nn.ConvTranspose1d(4, 8, 3, groups=2),
}
NORMALIZE = {
    "plain": lambda layer: layer,
    "weight-norm": weight_norm,
    "log": lambda layer: weight_norm(layer, scale="log"),
    "one-g": lambda layer: weight_norm(layer, dim=None),
    "torch": nn.utils.parametrizations.weight_norm,
}


@pytest.mark.parametrize("normalize", NORMALIZE.values(), ids=NORMALIZE)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_every_unit_has_length_g_and_directions_are_orthogonal(make, normalize):
    layer = normalize(make())
    fan_in, fan_out = (
        (layer.in_features, layer.out_features)
        if isinstance(layer, nn.Linear)
        else (layer.in_channels, layer.out_channels)
    )
    assert robust_init(layer, gain=2.0) == {"": pytest.approx(math.sqrt(2 * fan_in / fan_out))}
    dim, groups = unit_axis(layer, "weight")
    length = norm(layer.weight, dim, groups=groups)
    torch.testing.assert_close(length, torch.full_like(length, math.sqrt(2 * fan_in / fan_out)))
    assert (layer.bias == 0).all()
    rows = unit_rows(layer.weight, dim, groups).unflatten(0, (getattr(layer, "groups", 1), -1))
    if rows.shape[1] <= rows.shape[2]:
        rows = rows / length.max()
        gram = rows @ rows.transpose(1, 2)
        torch.testing.assert_close(gram, torch.eye(rows.shape[1]).expand_as(gram))


def test_v_is_orthogonal_and_g_is_set_in_half_precision():
    layer = weight_norm(nn.Linear(8, 4).to(torch.bfloat16))
    robust_init(layer, gain=1.0)
    v, g = parts(layer)
    torch.testing.assert_close((v @ v.T).float(), torch.eye(4), atol=0.02, rtol=0)
    assert (g == torch.tensor(math.sqrt(2), dtype=torch.bfloat16)).all()


class Activations(nn.Module):
    """Layers followed by different activations, as modules, functions and methods."""

    def __init__(self):
        super().__init__()
        for name in ("module", "function", "method", "leaky", "tanh", "both", "head"):
            setattr(self, name, nn.Linear(4, 4))
        self.behind = mean_only_batch_norm(nn.Linear(4, 4))
        self.norm, self.relu = MeanOnlyBatchNorm1d(4), nn.ReLU()

    def forward(self, x, scale=1.0):
        x = self.relu(self.norm(self.module(x)))
        x = F.relu(F.dropout(self.function(x), 0.5, self.training))
        x = self.method(x).relu()
        x = F.leaky_relu(self.leaky(x), 0.5)
        x = torch.tanh(self.tanh(x))
        both = self.both(x)
        x = both + torch.relu(both)
        x = self.relu(self.behind(x))
        return scale * self.head(x)


@pytest.mark.parametrize("normed", [True, False])
def test_gain_follows_the_activation_after_a_layer(normed):
    model = Activations()
    if normed:
        weight_norm_model(model)
    expected = {
        "module": 2, "function": 2, "method": 2, "leaky": 1.6, "tanh": 1, "both": 1, "head": 1,
        "behind": 2,
    }  # fmt: skip
    found = robust_init(model)
    assert {name: g**2 for name, g in found.items()} == pytest.approx(expected)


def test_gain_and_residual_by_pattern():
    model = nn.Sequential(*(Block(linear, 4) for _ in range(4)))
    found = robust_init(model, gain={"*.first": 3.0}, residual=["[01].second", "[23].second"])
    assert found["2.first"] == pytest.approx(math.sqrt(3))
    assert found["2.second"] == pytest.approx(math.sqrt(1 / 2))
    with pytest.raises(ValueError, match=r"residual: no layer matches '\*.third'; there are"):
        robust_init(model, residual="*.third")
    with pytest.raises(ValueError, match=r"gain must be a positive number; got -1"):
        robust_init(model, gain=-1)


def test_model_that_cannot_be_traced_needs_gain():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer1 = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer1(x) if x.sum() > 0 else x

    model = Branches()
    before = model.layer1.weight.detach().clone()
    with pytest.raises(ValueError, match=r"could not trace Branches .* gain=\{"):
        robust_init(model)
    assert torch.equal(model.layer1.weight, before)
    assert robust_init(model, gain=2.0) == {"layer1": pytest.approx(math.sqrt(2))}


def test_shared_weights_are_set_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Embedding(5, 4))
    model[2].weight = model[0].weight
    model.append(nn.Linear(4, 5, bias=False))
    model[4].weight = model[3].weight
    embedding = model[3].weight.detach().clone()
    assert list(robust_init(model)) == ["0"]
    assert torch.equal(model[3].weight, embedding)


def test_other_layers_keep_their_initialization():
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    model = nn.ModuleDict(
        {
            "rnn": nn.LSTM(3, 3),
            "pair": nn.Bilinear(3, 3, 3),
            "centered": mean_only_batch_norm(nn.Bilinear(3, 3, 3)),
            "spectral": spectral,
        }
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert robust_init(model, gain=1.0) == {}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_folded_model_raises():
    layer = weight_norm(nn.Linear(4, 3))
    before = layer.weight.detach().clone()
    with folded(layer), pytest.raises(RuntimeError, match="cannot initialize the weights"):
        robust_init(layer)
    assert torch.equal(layer.weight, before)


def test_generator_makes_it_reproducible():
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    for layer in (first, second):
        robust_init(layer, generator=torch.Generator().manual_seed(3))
    assert torch.equal(first.weight, second.weight)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(3, 3, device="meta"), "meta device"),
        (lambda: nn.LazyLinear(3), "lazy layers"),
    ],
)
def test_models_without_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        robust_init(make())


def test_a_module_is_recognized_by_its_class_not_its_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
            self.relu, self.view = nn.Tanh(), nn.Sigmoid()

        def forward(self, x):
            return self.c(torch.relu(self.view(self.b(self.relu(self.a(x))))))

    model = Named()
    weight_norm_model(model)
    lengths = robust_init(model)
    assert set(map(float, lengths.values())) == {1.0}


def test_frozen_layers_and_fixed_g_are_left_as_they_are():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    weight_norm(model[1], g=1.0, train_g=False)
    assert list(robust_init(model)) == ["2"]
    assert parts(model[1]).g.eq(1).all()


def test_masked_weights_are_stored_masked():
    layer = weight_norm(nn.Linear(4, 4), mask=torch.ones(4, 4).tril())
    robust_init(nn.Sequential(layer, nn.ReLU()))
    stored = convert_state_dict(layer.state_dict(), to="folded")["weight"]  # has no mask
    torch.testing.assert_close(stored, layer.weight.detach())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_attribute_of_torchs_hook_is_current():
    layer = nn.utils.weight_norm(nn.Linear(4, 3))
    robust_init(layer, gain=1.0)
    weight = layer.weight.detach().clone()
    layer(torch.ones(1, 4))
    torch.testing.assert_close(layer.weight.detach(), weight)


def test_layers_inside_untraced_modules_are_refused():
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    expected = robust_init(network)
    wrapped = robust_init(nn.DataParallel(network))
    assert wrapped == {f"module.{name}": length for name, length in expected.items()}
    with pytest.raises(
        ValueError, match=r'which activation follows 0\.module\.0, .* gain=\{"0\.mod'
    ):
        robust_init(nn.Sequential(nn.DataParallel(network)))
    encoder = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16))
    with pytest.raises(ValueError, match=r"follows 0\.linear1, 0\.linear2, inside"):
        robust_init(encoder)
    assert robust_init(encoder, gain={"*.linear1": 2.0})["0.linear1"] == 1.0
    assert robust_init(nn.Sequential(Attention()))  # its projection has no activation after it


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.attention(x, x, x)[0]


BETWEEN = {
    "identity": nn.Identity(),
    "dropout": nn.Dropout(),
    "batch norm": nn.BatchNorm2d(4),
    "mean-only batch norm": MeanOnlyBatchNorm2d(4),
    "max pooling": nn.MaxPool2d(2),
    "flatten": nn.Flatten(),
    "unflatten": nn.Unflatten(1, (2, 2)),
    "torch.flatten": torch.flatten,
    "F.dropout": F.dropout,
    "F.max_pool2d": lambda x: F.max_pool2d(x, 2),
    "method flatten": lambda x: x.flatten(1),
    "method view": lambda x: x.view(-1),
    "method reshape": lambda x: x.reshape(-1),
}


class Between(nn.Module):
    """A convolution, something, and an activation."""

    def __init__(self, between, activation):
        super().__init__()
        self.conv, self.between, self.activation = nn.Conv2d(4, 4, 1), between, activation

    def forward(self, x):
        return self.activation(self.between(self.conv(x)))


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_relu_is_found_behind_layers_that_are_no_activation(between):
    assert robust_init(Between(between, nn.ReLU())) == {"conv": pytest.approx(math.sqrt(2))}
    assert robust_init(Between(between, nn.Tanh())) == {"conv": 1.0}


ACTIVATIONS = {
    "F.relu_": (F.relu_, 2),
    "torch.relu_": (torch.relu_, 2),
    "method relu_": (lambda x: x.relu_(), 2),
    "LeakyReLU": (nn.LeakyReLU(0.5), 1.6),
    "F.leaky_relu": (F.leaky_relu, 2 / (1 + 0.01**2)),
    "F.leaky_relu_ by name": (lambda x: F.leaky_relu_(x, negative_slope=0.5), 1.6),
}


@pytest.mark.parametrize(("activation", "gain"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_gain_of_an_activation(activation, gain):
    found = robust_init(Between(nn.Identity(), activation))
    assert found == {"conv": pytest.approx(math.sqrt(gain), rel=1e-9)}


def test_infinite_gain_is_refused():
    with pytest.raises(ValueError, match="gain must be a positive number; got inf"):
        robust_init(nn.Linear(3, 3), gain=math.inf)


def test_head_before_its_embedding_is_left_as_it_is():
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Embedding(5, 4))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    assert robust_init(model, gain=1.0) == {}
    assert torch.equal(model[0].weight, before)
