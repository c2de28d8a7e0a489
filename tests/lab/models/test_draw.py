"""DRAW against torch's LSTM, against a layer-by-layer implementation, and its gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Bernoulli, Normal, kl_divergence
from torch.func import functional_call

from weightnorm import _kernels as kernels
from weightnorm import normalized_weights, weight_norm_model
from weightnorm.lab.models.draw import (
    DRAW,
    Bound,
    LSTMState,
    PeepholeLSTM,
    apply_gates,
    kl_from_standard_normal,
    lstm_step,
)


class LayerByLayer(DRAW):
    """DRAW as one would first write it: every layer is called at every time step."""

    def forward(self, x, noise):
        assert self.attention
        canvas, kl = torch.zeros_like(x), x.new_zeros(len(x))
        encoder = decoder = LSTMState(*x.new_zeros(2, len(x), self.hidden))
        for u in noise:
            window = self.reader.window(self.read_window(decoder.h))
            glimpse = self.reader.read((x, x - canvas.sigmoid()), window)
            t = self.encoder.input(torch.cat([glimpse, decoder.h], 1))
            t = t + self.encoder.recurrent(encoder.h)
            encoder = apply_gates(t, self.encoder.peepholes, encoder.c)
            mean, log_sigma = self.mean(encoder.h), self.log_sigma(encoder.h)
            kl = kl + kl_from_standard_normal(mean, log_sigma).sum(1)
            t = self.decoder.input(mean + log_sigma.exp() * u) + self.decoder.recurrent(decoder.h)
            decoder = apply_gates(t, self.decoder.peepholes, decoder.c)
            window = self.writer.window(self.write_window(decoder.h))
            canvas = canvas + self.writer.write(self.ink(decoder.h), window)
        return Bound(F.binary_cross_entropy_with_logits(canvas, x, reduction="none").sum(1), kl)


SMALL = {"side": 6, "hidden": 5, "latent": 3, "write_size": 3}


def build(kind=DRAW, *, normalize=False, large_weights=False, **options):
    """A small network; with large weights every part of it affects the output."""
    torch.manual_seed(0)
    model = kind(**(SMALL | options)).double()
    if large_weights:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(0.4 * torch.randn_like(p))
    if normalize:
        weight_norm_model(model)
    return model


def data(batch=4, steps=7, side=6, latent=3):
    x = torch.rand(batch, side**2, dtype=torch.float64).round()
    return x, torch.randn(steps, batch, latent, dtype=torch.float64)


def test_sizes_and_initialization_are_the_implementations():
    model = DRAW()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    weights = {name: shape for name, shape in shapes.items() if name.endswith("weight")}
    assert weights == {
        "encoder.input.weight": (1024, 8 + 256),
        "encoder.recurrent.weight": (1024, 256),
        "mean.weight": (100, 256),
        "log_sigma.weight": (100, 256),
        "decoder.input.weight": (1024, 100),
        "decoder.recurrent.weight": (1024, 256),
        "read_window.weight": (5, 256),
        "write_window.weight": (5, 256),
        "ink.weight": (25, 256),
    }
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        else:
            assert p.std().item() == pytest.approx(0.01, rel=0.1)
    assert DRAW(attention=False).encoder.input.weight.shape == (1024, 2 * 784 + 256)


def test_lstm_without_peepholes_matches_torch():
    ours, torchs = PeepholeLSTM(4, 3), nn.LSTMCell(4, 3)
    nn.init.zeros_(ours.peepholes)
    with torch.no_grad():
        ours.input.weight.copy_(torchs.weight_ih)
        ours.recurrent.weight.copy_(torchs.weight_hh)
        ours.input.bias.copy_(torchs.bias_ih + torchs.bias_hh)
    cell = LSTMState(*torch.zeros(2, 5, 3))
    h, c = cell
    for x in torch.randn(6, 5, 4):
        cell, (h, c) = lstm_step(ours.weights(), cell, x[:, :1], x[:, 1:]), torchs(x, (h, c))
        torch.testing.assert_close(cell, LSTMState(h, c))


def test_peepholes_match_the_definition():
    ours = PeepholeLSTM(1, 2)
    for p in ours.parameters():
        nn.init.normal_(p)
    cell = LSTMState(torch.zeros(1, 2), torch.randn(1, 2))
    with torch.no_grad():
        t = ours.input(torch.ones(1, 1)).view(4, 2)
        h, c = lstm_step(ours.weights(), cell, torch.ones(1, 1))
        for k in range(2):
            before, (p_i, p_f, p_o) = cell.c[0, k], ours.peepholes[:, k]
            i, f = torch.sigmoid(t[0, k] + p_i * before), torch.sigmoid(t[1, k] + p_f * before)
            after = f * before + i * torch.tanh(t[2, k])
            o = torch.sigmoid(t[3, k] + p_o * after)
            assert c[0, k].item() == pytest.approx(after.item())
            assert h[0, k].item() == pytest.approx((o * torch.tanh(after)).item())


def test_kl_matches_torch():
    mean, log_sigma = torch.randn(2, 3, 4, 5)
    expected = kl_divergence(Normal(mean, log_sigma.exp()), Normal(0, 1))
    torch.testing.assert_close(kl_from_standard_normal(mean, log_sigma), expected)


def test_matches_the_layer_by_layer_implementation():
    x, noise = data()
    ours, plain = build(large_weights=True), build(LayerByLayer, large_weights=True)
    bounds = [model(x, noise) for model in (ours, plain)]
    torch.testing.assert_close(*bounds)
    for bound in bounds:
        bound.negative_elbo.sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    torch.testing.assert_close({n: p.grad for n, p in ours.named_parameters()}, expected)
    assert all(grad.abs().max() > 1e-3 for grad in expected.values())


@pytest.mark.parametrize(("attention", "normalize"), [(True, False), (True, True), (False, False)])
def test_gradients_through_64_steps_match_finite_differences(attention, normalize):
    options = {"side": 4, "hidden": 2, "latent": 2, "write_size": 2, "attention": attention}
    model = build(normalize=normalize, large_weights=True, **options)
    x, noise = data(batch=2, steps=64, side=4, latent=2)
    names = [name for name, _ in model.named_parameters()]

    def negative_elbo(*values):
        bound = functional_call(model, dict(zip(names, values, strict=True)), (x, noise))
        return bound.negative_elbo

    values = tuple(p.detach().requires_grad_() for p in model.parameters())
    assert torch.autograd.gradcheck(negative_elbo, values, fast_mode=True)


@pytest.mark.parametrize("attention", [True, False])
def test_weight_norm_of_every_matrix_preserves_the_initial_function(attention):
    x, noise = data()
    standard, normed = (build(normalize=n, attention=attention) for n in (False, True))
    torch.testing.assert_close(standard(x, noise), normed(x, noise))
    plain = [n for n, p in normed.named_parameters() if "original" not in n and p.dim() > 1]
    assert plain == ["encoder.peepholes", "decoder.peepholes"]
    for v, g in normalized_weights(normed).values():
        assert g.shape == (v.shape[0], 1)


def test_each_weight_is_computed_once_per_sequence(monkeypatch):
    computed = []
    compose = kernels.compose

    def counted(*, v, **options):
        computed.append(v)
        return compose(v=v, **options)

    monkeypatch.setattr(kernels, "compose", counted)
    model = build(normalize=True)
    everything = [v for v, _ in normalized_weights(model).values()]
    x, noise = data(steps=20)

    def is_once():
        found = [*computed]
        computed.clear()
        return len(found) == len(everything) and {*map(id, found)} == {*map(id, everything)}

    model(x, noise).negative_elbo.sum().backward()
    assert is_once()
    with torch.no_grad():
        model(x, noise)
    assert is_once()
    model.generate(noise)
    assert is_once()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch reads .grad of non-leaf weights
def test_compiled_step_has_the_same_gradients():
    x, noise = data(steps=3)
    plain, compiled = (build(normalize=True, large_weights=True) for _ in range(2))
    compiled.compile(backend="aot_eager", fullgraph=True)
    for model in (plain, compiled):
        model(x, noise).negative_elbo.sum().backward()
    torch.testing.assert_close(
        {name: p.grad for name, p in compiled.named_parameters()},
        {name: p.grad for name, p in plain.named_parameters()},
    )


@pytest.mark.parametrize("attention", [True, False])
def test_generated_canvases_and_boxes_of_every_step(attention):
    model = build(large_weights=True, attention=attention)
    noise = torch.randn(5, 3, 3, dtype=torch.float64)
    canvases, boxes = model.generate(noise)
    assert canvases.shape == (5, 3, 6, 6)
    assert boxes.shape == (5, 3, 3)
    shorter = model.generate(noise[:2])
    assert torch.equal(shorter.canvases, canvases[:2])
    if attention:
        state = model.initial_state(3, model.weights())
        state = model.decode(noise[0], state, model.weights())
        window = model.writer.window(model.write_window(state.decoder.h))
        torch.testing.assert_close(boxes[0, :, :2], window.centre)
        torch.testing.assert_close(boxes[0, :, 2:], 2 * window.stride)
    else:
        assert boxes.unique(dim=0).tolist() == [[[2.5, 2.5, 5.0]] * 3]


def test_decoder_depends_on_the_image_only_through_latents():
    """With q fixed to the prior the image affects nothing but its own likelihood."""
    model = build(large_weights=True)
    with torch.no_grad():
        for layer in (model.mean, model.log_sigma):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    x, noise = data()
    bound, drawn = model(x, noise), model.generate(noise)
    p = drawn.canvases[-1].flatten(1)
    torch.testing.assert_close(bound.nll, -Bernoulli(p).log_prob(x).sum(1))
    assert not bound.kl.any()
