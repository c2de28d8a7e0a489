"""Initialization without data: norms through 50 layers, exact values, and what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weightnorm import (
    convert_state_dict,
    folded,
    mean_only_batch_norm,
    parts,
    robust_init,
    weight_norm,
    weight_norm_model,
)
from weightnorm.layers import units_of

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
    robust_init(model, gain=2.0)
    activations, gradients = norms(model, shape)
    # Kept in expectation; chance moves the norm by a factor of about exp(½√(3·50/width)).
    assert activations.max() / activations.min() < 4
    assert gradients.max() / gradients.min() < 4


@pytest.mark.parametrize(("make", "width", "shape"), CASES, ids=["linear", "conv"])
def test_norms_are_kept_through_50_residual_blocks(make, width, shape):
    torch.manual_seed(0)
    model = residual_network(make, width)
    weight_norm_model(model)
    robust_init(model, gain={"*.first": 2.0}, residual="*.second")
    activations, gradients = norms(model, shape)
    bound = math.sqrt(math.e)
    assert 1 < activations[-1] / activations[0] < 1.1 * bound
    assert 1 < gradients[0] / gradients[-1] < 1.1 * bound
    robust_init(model, gain={"*.first": 2.0})
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
    expected = math.sqrt(2 * fan_in / fan_out)
    assert robust_init(layer, gain=2.0) == {"": pytest.approx(expected)}
    rows = units_of(layer).rows(layer.weight.detach()) / expected
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
    assert (layer.bias == 0).all()
    rows = rows.unflatten(0, (getattr(layer, "groups", 1), -1))
    if rows.shape[1] <= rows.shape[2]:
        gram = rows @ rows.transpose(1, 2)
        torch.testing.assert_close(gram, torch.eye(rows.shape[1]).expand_as(gram))


def test_v_is_orthogonal_and_g_is_set_in_half_precision():
    layer = weight_norm(nn.Linear(8, 4).to(torch.bfloat16))
    robust_init(layer, gain=1.0)
    v, g = parts(layer)
    torch.testing.assert_close((v @ v.T).float(), torch.eye(4), atol=0.02, rtol=0)
    assert (g == torch.tensor(math.sqrt(2), dtype=torch.bfloat16)).all()


def test_gain_and_residual_by_pattern():
    model = nn.Sequential(*(Block(linear, 4) for _ in range(4)))
    found = robust_init(model, gain={"*.first": 3.0}, residual=["[01].second", "[23].second"])
    assert found["2.first"] == pytest.approx(math.sqrt(3))
    assert found["2.second"] == pytest.approx(math.sqrt(1 / 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gain": 1.0, "residual": "*.third"}, r"residual: no layer matches '\*.third'; there are"),
        ({"gain": {"1": 2.0}}, r"gain: no layer matches '1'; there are \['0'\]"),
        ({"gain": -1}, r"gain must be a positive number; got -1"),
        ({"gain": math.inf}, r"gain must be a positive number; got inf"),
    ],
)
def test_invalid_options_raise(options, message):
    model = nn.Sequential(nn.Linear(3, 3))
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        robust_init(model, **options)
    assert torch.equal(model[0].weight, before)


def test_shared_weights_are_set_once_and_not_those_of_embeddings():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Embedding(5, 4))
    model[2].weight = model[0].weight
    model.append(nn.Linear(4, 5, bias=False)).append(nn.Embedding(5, 4))
    model[4].weight = model[3].weight
    model.insert(0, nn.Linear(4, 5, bias=False))  # a head before its embedding
    model[0].weight = model[-1].weight
    embeddings = [model[i].weight.detach().clone() for i in (4, 6)]
    assert list(robust_init(model, gain=1.0)) == ["1"]
    assert torch.equal(model[4].weight, embeddings[0])
    assert torch.equal(model[6].weight, embeddings[1])


def test_other_and_frozen_layers_are_left_as_they_are():
    model = nn.ModuleDict(
        {
            "rnn": nn.LSTM(3, 3),
            "pair": nn.Bilinear(3, 3, 3),
            "centered": mean_only_batch_norm(nn.Bilinear(3, 3, 3)),
            "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
            "frozen": nn.Linear(3, 3).requires_grad_(False),
            "fixed-g": weight_norm(nn.Linear(3, 3), g=1.0, train_g=False),
        }
    )
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert robust_init(model, gain=1.0) == {}
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_layers_inside_mean_only_batch_norm_are_set():
    model = nn.Sequential(mean_only_batch_norm(weight_norm(nn.Linear(8, 4))))
    assert robust_init(model, gain=2.0) == {"0": 2.0}
    torch.testing.assert_close(parts(model[0].layer).g, torch.full((4, 1), 2.0))


def test_generator_makes_it_reproducible():
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    for layer in (first, second):
        robust_init(layer, gain=1.0, generator=torch.Generator().manual_seed(3))
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
        robust_init(make(), gain=1.0)


def test_folded_model_raises():
    layer = weight_norm(nn.Linear(4, 3))
    before = layer.weight.detach().clone()
    with folded(layer), pytest.raises(RuntimeError, match="cannot initialize the weights"):
        robust_init(layer, gain=1.0)
    assert torch.equal(layer.weight, before)


def test_masked_weights_are_stored_masked():
    layer = weight_norm(nn.Linear(4, 4), mask=torch.ones(4, 4).tril())
    robust_init(layer, gain=2.0)
    stored = convert_state_dict(layer.state_dict(), to="folded")["weight"]  # has no mask
    torch.testing.assert_close(stored, layer.weight.detach())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_attribute_of_torchs_hook_is_current():
    layer = nn.utils.weight_norm(nn.Linear(4, 3))
    robust_init(layer, gain=1.0)
    weight = layer.weight.detach().clone()
    layer(torch.ones(1, 4))
    torch.testing.assert_close(layer.weight.detach(), weight)
