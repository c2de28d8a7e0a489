"""The snippets of docs/descendants.md, each compared with a formula written from its paper."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

PAGE = Path(__file__).parents[1] / "docs" / "descendants.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
NAMES = ["setup", "muown", "adam hyperball", "muon hyperball", "ngpt", "edm2", "fixed norm"]
STEPS = 20


def build(name):
    """(model in float64, optimizer) as the page makes them."""
    torch.manual_seed(0)
    scope = {}
    exec(BLOCKS[0], scope)
    scope["model"] = model = scope["model"].double()
    for block in BLOCKS[2:4] if "hyperball" in name else [BLOCKS[NAMES.index(name)]]:
        exec(compile(block, PAGE.name, "exec"), scope)
        if name == "adam hyperball":
            break
    return model, scope["optimizer"]


def slope(w, i):
    """∇w of a loss that changes from step to step."""
    return torch.cos(3 * w + i)


def train(model, optimizer):
    for i in range(STEPS):
        for p in model.parameters():
            p.grad = slope(p.detach(), i)
        optimizer.step()
        optimizer.zero_grad()


class Adam:
    """Adam's update m̂/(√v̂ + ε), from its paper."""

    def __init__(self, beta1=0.9, beta2=0.999):
        self.betas, self.m, self.s, self.t = (beta1, beta2), 0, 0, 0

    def update(self, grad):
        beta1, beta2 = self.betas
        self.t += 1
        self.m = beta1 * self.m + (1 - beta1) * grad
        self.s = beta2 * self.s + (1 - beta2) * grad**2
        mean, square = self.m / (1 - beta1**self.t), self.s / (1 - beta2**self.t)
        return mean / (square.sqrt() + 1e-8)


class Muon:
    """Muon's update: Nesterov momentum, made orthogonal by five Newton-Schulz steps in bfloat16.

    The momentum is an exponential average, as in torch: proportional to the paper's sum, and the
    length of what is made orthogonal has no effect.
    """

    def __init__(self, momentum=0.95):
        self.momentum, self.m = momentum, 0

    def update(self, grad):
        mu = self.momentum
        self.m = torch.lerp(torch.zeros_like(grad) + self.m, grad, 1 - mu)
        x = torch.lerp(grad, self.m, mu).bfloat16()
        x = x.T if grad.shape[0] > grad.shape[1] else x
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            poly = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
            x = torch.addmm(x, poly, x, beta=3.4445)
        return x.T if grad.shape[0] > grad.shape[1] else x


def length(w, axis=1):
    return w.norm(dim=axis, keepdim=True)


def muown(w):
    v, g, muon, adam = w.clone(), length(w), Muon(), Adam(0.9, 0.95)
    scale = 0.2 * math.sqrt(max(w.shape))
    for i in range(STEPS):
        grad, u = slope(w, i), v / length(v)
        grad_g = (grad * u).sum(1, keepdim=True)
        grad_v = g / length(v) * (grad - grad_g * u)
        v = v - 0.001 * scale * muon.update(grad_v).to(v.dtype)
        g = g - 0.001 * adam.update(grad_g)
        w = g * v / length(v)
    return w


def hyperball(w, inner):
    radius = w.norm()
    for i in range(STEPS):
        u = inner.update(slope(w, i)).to(w.dtype)
        moved = w - 0.01 * radius * u / u.norm()
        w = radius * moved / moved.norm()
    return w


def ngpt(w, axis):
    adam = Adam()
    for i in range(STEPS):
        w = w - 0.001 * adam.update(slope(w, i))
        w = w / length(w, axis)
    return w


def edm2(w):
    adam, fan_in = Adam(), w.shape[1]
    stored = w * math.sqrt(fan_in)  # RMS 1 in every row
    for i in range(STEPS):
        v = stored.clone().requires_grad_()
        used = v / (length(v) / math.sqrt(fan_in)) / math.sqrt(fan_in)
        used.backward(slope(used.detach(), i))
        stored = stored - 0.01 * adam.update(v.grad)
        stored = stored / (length(stored) / math.sqrt(fan_in))
    return stored / math.sqrt(fan_in)


def fixed_norm(w):
    radius, momentum = length(w), 0
    for i in range(STEPS):
        grad, u = slope(w, i), w / radius
        momentum = 0.9 * momentum + grad - (grad * u).sum(1, keepdim=True) * u
        w = w - 0.1 * momentum
        w = radius * w / length(w)
    return w


FORMULAS = {
    "muown": lambda w, layer: muown(w),
    "adam hyperball": lambda w, layer: hyperball(w, Adam()),
    "muon hyperball": lambda w, layer: hyperball(w, Muon()),
    "ngpt": lambda w, layer: ngpt(w, {"0": 1, "2": 0}[layer]),
    "edm2": lambda w, layer: edm2(w),
    "fixed norm": lambda w, layer: fixed_norm(w),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_20_steps_equal_the_formula(name):
    model, optimizer = build(name)
    layers = {n: m for n, m in model.named_children() if isinstance(m, nn.Linear)}
    expected = {n: FORMULAS[name](m.weight.detach().clone(), n) for n, m in layers.items()}
    before = {n: m.weight.detach().clone() for n, m in layers.items()}
    train(model, optimizer)
    for n, layer in layers.items():
        torch.testing.assert_close(layer.weight.detach(), expected[n], atol=1e-12, rtol=1e-10)
        assert (layer.weight - before[n]).norm() > 0.001 * before[n].norm()


def test_every_snippet_is_short():
    assert len(BLOCKS) == len(NAMES)
    assert all(len(block.splitlines()) <= 10 for block in BLOCKS)
