"""The weight"""

import copy
from itertools import product

import torch
from torch import nn
from torch.testing import assert_close

from conformance.feature import feature
from conformance.subject import Subject, compose, flat, units


@feature()
def applying(subject: Subject):
    """Applying it keeps the output of the layer (flax#4138)."""
    layer = subject.case.make()
    before = subject.run(layer)
    assert_close(subject.run(subject.normalized(layer)), before)


@feature()
def one_g_for_each_output_unit(subject: Subject):
    """‖w‖ of each output unit is |g|, also for transposed and grouped convolutions and gates
    (pytorch#7865)."""
    layer = subject.trained()
    for w, _, g in subject.weights(layer):
        assert_close(units(layer, w).norm(dim=1), g.abs().flatten())


@feature()
def negative_dim(subject: Subject):
    """dim=-1 keeps the last axis (pytorch#28618)."""
    layer = subject.trained(dim=-1)
    for w, v, g in subject.weights(layer):
        assert g.numel() == v.shape[-1]
        assert_close(w.flatten(0, -2).norm(dim=0), g.abs().flatten())


@feature()
def one_g_for_the_whole_tensor(subject: Subject):
    """dim=None takes one norm over the whole tensor (pytorch#11660)."""
    layer = subject.trained(dim=None)
    for w, _, g in subject.weights(layer):
        assert_close(w.norm(), g.abs().squeeze())


@feature()
def zero_weight(subject: Subject):
    """A zero weight stays zero, with finite gradients (pytorch#19126, flax#1671)."""
    layer = _zeroed(subject)
    before = subject.run(layer)
    layer = subject.normalized(layer)
    out = subject.run(layer)
    assert_close(out, before)
    out.sum().backward()
    assert all(part.grad.isfinite().all() for part in flat(subject.parts(layer)))


@feature()
def training_a_zero_weight(subject: Subject):
    """A zero weight can be trained if the plain one can."""
    plain = _zeroed(subject)
    layer = subject.normalized(copy.deepcopy(plain))
    cotangent = torch.randn_like(subject.run(plain))
    for module in (plain, layer):
        (subject.run(module) * cotangent).sum().backward()
    for name, (v, g) in zip(subject.names, subject.parts(layer), strict=True):
        if plain.get_parameter(name).grad.any():
            assert any(part.grad.nan_to_num(0).any() for part in (v, g))


@feature()
def half_precision(subject: Subject):
    """In float16 and bfloat16 weight and gradients are correct to rounding, for large and small
    weights (pytorch#80599, pytorch#107914)."""
    for dtype, size in product((torch.float16, torch.bfloat16), (0.03, 1, 300)):
        layer = subject.case.make().to(dtype)
        for name in subject.names:
            nn.init.normal_(layer.get_parameter(name), std=size)  # 300² overflows float16
        layer = subject.normalized(layer)
        for w, *parts in subject.weights(layer):
            wide = [part.detach().double().requires_grad_() for part in parts]
            exact = compose(*wide)
            assert w.dtype == dtype
            grad = torch.randn_like(w)
            got = [w, *torch.autograd.grad(w, parts, grad)]
            expected = [exact, *torch.autograd.grad(exact, wide, grad.double())]
            for a, b in zip(got, expected, strict=True):
                rounding = 4 * torch.finfo(dtype).eps * b.abs().max().item()
                assert_close(a.double(), b, rtol=0, atol=rounding)


@feature()
def autocast(subject: Subject):
    """Under autocast to bfloat16 the norm is computed in float32."""
    layer = subject.trained()
    with torch.autocast("cpu", torch.bfloat16):
        weights = subject.weights(layer)
    for w, v, g in weights:
        assert_close(w, compose(v, g))


def _zeroed(subject: Subject):
    layer = subject.case.make()
    for name in subject.names:
        nn.init.zeros_(layer.get_parameter(name))
    return layer
