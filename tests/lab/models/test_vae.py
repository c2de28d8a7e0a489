"""Both auto-encoders: shapes, initialization, and the bound against importance sampling."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from weightnorm import data_dependent_init, normalized_weights
from weightnorm.lab.vae import (
    VAE,
    Cifar10VAE,
    Gaussian,
    MnistVAE,
    center_pixels,
    gaussian_kl,
    log_importance_weights,
)

SMALL = {
    "mnist": lambda **more: MnistVAE(**{"width": 0.2, "depth": 1, "latents": 4, "side": 8} | more),
    "cifar10": lambda **more: Cifar10VAE(**{"width": 0.1, "depth": 1, "latents": 3} | more),
}
NETWORKS = pytest.mark.parametrize("data", SMALL)


def images(data, count=6):
    if data == "mnist":
        return torch.rand(count, 1, 8, 8).round()
    return torch.randint(0, 256, (count, 3, 32, 32)).float()


def small(data, normalize=True, **more):
    """A small network, initialized on data."""
    model = SMALL[data](normalize=normalize, **more)
    data_dependent_init(model, images(data, 60), target_std=model.target_std)
    return model


# — the networks —


def layer_shapes(model, x):
    shapes = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
            module.register_forward_hook(
                lambda m, i, o, name=name: shapes.update({name: tuple(o.shape[1:])})
            )
    model(x)
    return shapes


def test_mnist_network_is_the_papers():
    model = MnistVAE(normalize=True)
    shapes = layer_shapes(model, torch.zeros(1, 1, 28, 28))
    encoder = [shape for name, shape in shapes.items() if name.startswith("encoder")]
    assert encoder == [
        *[(16, 28, 28)] * 5,
        *[(32, 14, 14)] * 5,
        *[(32, 7, 7)] * 5,
        (450,),
    ]
    decoder = [shape for name, shape in shapes.items() if name.startswith("decoder")]
    assert decoder == [
        (450,),
        (1568,),
        *[(32, 7, 7)] * 4,
        *[(32, 14, 14)] * 5,
        *[(16, 28, 28)] * 5,
        (1, 28, 28),
    ]
    assert shapes["posterior_base"] == (64,)
    assert shapes["context"] == (320,)
    flow = [shape for name, shape in shapes.items() if name.startswith("posterior.")]
    assert flow == 2 * [(320,), (320,), (64,)]
    assert len(normalized_weights(model)) == len(shapes)


def test_cifar10_network_is_the_authors():
    model = Cifar10VAE(normalize=True)
    shapes = layer_shapes(model, torch.zeros(1, 3, 32, 32))
    assert shapes["enter"] == (64, 16, 16)
    assert shapes["leave"] == (3, 32, 32)
    sides = [16, 16, 8, 8, 4, 4]
    for i, side in enumerate(sides):
        up = 64 * (i < 5)  # the top layer has no output upwards
        assert shapes[f"layers.{i}.up1"] == (up + 2 * 32 + 64, side, side)
        assert shapes[f"layers.{i}.down1"] == (64 + 4 * 32 + 64, side, side)
        assert shapes[f"layers.{i}.posterior.steps.0.layers.0"] == (64, side, side)
        assert shapes[f"layers.{i}.posterior.steps.0.layers.1"] == (64, side, side)
        below = [16, *sides][i]
        assert shapes[f"layers.{i}.down2"] == (64, below, below)
    assert model(torch.zeros(2, 3, 32, 32)).kl.shape == (2, 6, 32)
    assert len(normalized_weights(model)) == len(shapes)


def test_pixels_are_centered():
    assert center_pixels(torch.tensor([0.0, 127.0, 255.0])).tolist() == [
        -0.5 + 0.5 / 256,
        -0.5 / 256,
        0.5 - 0.5 / 256,
    ]


@NETWORKS
@pytest.mark.parametrize("flow_steps", [0, 1])
def test_terms_images_and_gradients(data, flow_steps):
    model, x = small(data, flow_steps=flow_steps), images(data)
    terms = model(x)
    layers, maps = (1, 4) if data == "mnist" else (3, 3)
    assert terms.log_likelihood.shape == (6,)
    assert terms.kl.shape == (6, layers, maps)
    torch.testing.assert_close(terms.elbo, terms.log_likelihood - terms.kl.sum((1, 2)))
    for pictures in (model.reconstruct(x), model.sample(6)):
        assert pictures.shape == x.shape
        assert pictures.min() >= 0
        assert pictures.max() <= 1
    optimizer = torch.optim.Adamax(model.parameters())
    for _ in range(
        2
    ):  # the input of the top-down pass is initially 0, so only it has a gradient at first
        optimizer.zero_grad()
        (-model(x).elbo.mean()).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert (p.grad != 0).any(), name


@NETWORKS
def test_both_parameterizations_have_the_same_initial_function(data):
    torch.manual_seed(1)
    standard = small(data, normalize=False)
    torch.manual_seed(1)
    normed = small(data, normalize=True)
    assert not normalized_weights(standard)
    x, terms = images(data), []
    for model in (standard, normed):
        torch.manual_seed(2)
        terms.append(model(x))
    for ours, theirs in zip(*terms, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)


@NETWORKS
def test_initial_posterior_is_near_the_prior(data):
    kl = small(data)(images(data, 50)).kl
    assert kl.sum((1, 2)).mean() < 0.1 * images(data)[0].numel()


# — the bound —


def trained(data, flow_steps):
    """A network after a few training steps, so that its bound is neither tight nor very loose."""
    model, x = small(data, flow_steps=flow_steps), images(data, 10)
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        (-model(x).elbo.mean()).backward()
        optimizer.step()
    return model, x


@NETWORKS
@pytest.mark.parametrize("flow_steps", [0, 1])
@torch.no_grad()
def test_bound_is_below_the_importance_sampled_likelihood(data, flow_steps):
    with torch.enable_grad():
        model, x = trained(data, flow_steps)
    logs = log_importance_weights(model, x, 64)
    assert logs.shape == (10, 64)
    bound = torch.stack([model(x).elbo for _ in range(16)]).mean()
    estimates = [
        (logs.view(10, -1, k).logsumexp(2) - math.log(k)).mean().item() for k in (1, 4, 16, 64)
    ]
    assert estimates == sorted(estimates)
    assert estimates[-1] - estimates[0] > 0.1
    assert bound.item() == pytest.approx(estimates[0], rel=0.02)


class Line(VAE):
    """z ~ N(0, 1), x|z ~ N(z, 1), so x ~ N(0, 2); with an approximate posterior."""

    def __init__(self):
        super().__init__()
        self.decoded = []

    def encode(self, x):
        return (x,)

    def decode(self, code, *, at_sample=False):
        assert at_sample
        self.decoded.append(len(code[0]))
        q = Gaussian(0.3 * code[0], torch.full_like(code[0], -0.2))
        prior = Gaussian(torch.zeros(1), torch.zeros(1))
        z = q.sample()
        return z, (q.log_density(z) - prior.log_density(z)).unsqueeze(1)

    def log_likelihood(self, x, output):
        return Gaussian(output, torch.zeros(1)).log_density(x).sum(1)

    generate = image = None


def test_importance_sampling_converges_to_the_true_likelihood():
    x = torch.linspace(-2, 2, 5)[:, None]
    logs = log_importance_weights(Line(), x, 20_000)
    estimate = logs.logsumexp(1) - math.log(20_000)
    truth = Normal(0, math.sqrt(2)).log_prob(x[:, 0])
    torch.testing.assert_close(estimate, truth, atol=0.02, rtol=0)
    q = Gaussian(0.3 * x, torch.tensor(-0.2))
    gap = gaussian_kl(q, Gaussian(x / 2, torch.tensor(-math.log(2) / 2)))[:, 0]
    torch.testing.assert_close(logs.mean(1), truth - gap, atol=0.03, rtol=0)


def test_importance_sampling_has_bounded_memory():
    model = Line()
    assert log_importance_weights(model, torch.zeros(7, 1), 50, max_rows=30).shape == (7, 50)
    assert max(model.decoded) <= 30
    assert sum(model.decoded) == 7 * 50
    log_importance_weights(many := Line(), torch.zeros(40, 1), 3, max_rows=30)
    assert many.decoded == [40, 40, 40]


@pytest.mark.parametrize(("data", "normalize"), [("mnist", False), ("cifar10", True)])
def test_hundreds_of_steps_at_the_papers_rate_stay_finite(data, normalize):
    model = small(data, normalize, width=0.05, latents=1)
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.002)
    x = images(data, 2)
    first = -model(x).elbo.mean()
    for _ in range(400):
        optimizer.zero_grad()
        loss = -model(x).elbo.mean()
        loss.backward()
        optimizer.step()
        assert loss.isfinite()
    assert loss < first
