"""Identities of sections 2.1, 2.2 and 4, tested on real layers."""

import pytest
import torch
from torch import nn

from weightnorm import mean_only_batch_norm, normalized_weights, parts, weight_norm
from weightnorm.functional import norm
from weightnorm.layers import units_of, weight_names
from zoo import LAYERS

NAMES = [n for n in LAYERS if not n.startswith("attention")]


def parts_and_units(layer):
    for name in weight_names(layer):
        yield (*parts(layer, name), units_of(layer))


def after_backward(name):
    """Return a normalized layer in float64 after one backward pass."""
    case = LAYERS[name]
    layer = weight_norm(case.make().double())
    inputs = torch.utils._pytree.tree_map(
        lambda t: t.double() if t.is_floating_point() else t, case.inputs()
    )
    case.run(layer, inputs).sin().sum().backward()
    return layer


@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_v_is_orthogonal_to_v(name):
    for v, _, units in parts_and_units(after_backward(name)):
        dot = units.rows(v * v.grad).sum(1)
        assert dot.abs().max() < 1e-12
        assert v.grad.abs().max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_gradient_descent_grows_v_by_pythagoras(name):
    layer, lr = after_backward(name), 0.3
    before = [
        (norm(v, units).detach(), norm(v.grad, units)) for v, _, units in parts_and_units(layer)
    ]
    torch.optim.SGD(layer.parameters(), lr=lr).step()
    for (length, step), (v, _, units) in zip(before, parts_and_units(layer), strict=True):
        c = lr * step / length  # ‖Δv‖/‖v‖
        torch.testing.assert_close(norm(v, units), (1 + c**2).sqrt() * length)


def test_norm_of_w_is_g_throughout_training():
    model = nn.Sequential(weight_norm(nn.Linear(4, 8)), nn.Tanh(), weight_norm(nn.Linear(8, 1)))
    step = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(16, 4)
    for _ in range(20):
        step.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        step.step()
        for layer in (model[0], model[2]):
            torch.testing.assert_close(norm(layer.weight), parts(layer).g.abs())
    assert len(normalized_weights(model)) == 2


def whitened(n, k):
    """Draw a batch with mean exactly 0 and covariance exactly 1."""
    x = torch.randn(n, k, dtype=torch.float64)
    x = x - x.mean(0)
    return x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / n)).T


def test_batch_norm_equals_weight_norm_on_whitened_inputs():
    x = whitened(64, 5).requires_grad_()
    wn = weight_norm(nn.Linear(5, 3, bias=False).double())
    v, g = parts(wn)
    nn.init.normal_(g)
    linear = nn.Linear(5, 3, bias=False).double()
    bn = nn.BatchNorm1d(3, eps=1e-300, affine=False).double()
    with torch.no_grad():
        linear.weight.copy_(v)
    normalized = wn(x)
    batch_normed = bn(linear(x)) * g.detach().T
    torch.testing.assert_close(normalized, batch_normed)
    grad = torch.randn_like(normalized)
    (grad_v,) = torch.autograd.grad(normalized, v, grad)
    (grad_linear,) = torch.autograd.grad(batch_normed, linear.weight, grad)
    torch.testing.assert_close(grad_v, grad_linear)


def test_mean_only_batch_norm_centers_the_gradient():
    layer = mean_only_batch_norm(weight_norm(nn.Conv2d(3, 4, 3)).double())
    x = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    grad = torch.randn(6, 4, 3, 3, dtype=torch.float64)
    layer(x).backward(grad)
    v, g = parts(layer.layer)
    through_norm = v.grad.clone(), g.grad.clone()
    v.grad = g.grad = None
    layer.layer(x).backward(grad - grad.mean((0, 2, 3), keepdim=True))  # eq. 8
    torch.testing.assert_close(through_norm, (v.grad, g.grad))
