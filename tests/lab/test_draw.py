"""DRAW: the network against its definition, its initial g, and a run."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Bernoulli, Normal, kl_divergence
from torch.func import functional_call
from torch.nn.utils import parametrize

from weightnorm import Parameterization, normalized_weights, weight_norm_model
from weightnorm.lab import draw
from weightnorm.lab.draw import DRAW, Attention

SMALL = {"hidden": 5, "latent": 3, "write_size": 3}
ATTENTION = pytest.mark.parametrize("attention", [True, False])
WEIGHTS = [
    "encoder.input.weight", "encoder.recurrent.weight", "code.weight",
    "decoder.input.weight", "decoder.recurrent.weight", "outputs.weight",
]  # fmt: skip


def build(*, large_weights=False, side=6, **options):
    """A small network; with large weights every part of it affects the output."""
    torch.manual_seed(0)
    model = DRAW(replace(draw.PAPER, **(SMALL | options)), side).double()
    if large_weights:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(0.4 * torch.randn_like(p))
    return model


def data(batch=4, steps=7, side=6, latent=3):
    x = torch.rand(batch, side**2, dtype=torch.float64).round()
    return x, torch.randn(steps, batch, latent, dtype=torch.float64)


# — the network —


def test_sizes_and_initialization_are_the_implementations():
    model = DRAW(draw.PAPER)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n.endswith("weight")}
    expected = (1024, 8 + 256), (1024, 256), (200, 256), (1024, 100), (1024, 256), (35, 256)
    assert shapes == dict(zip(WEIGHTS, expected, strict=True))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        else:
            assert p.std().item() == pytest.approx(0.01, rel=0.1)
    whole = DRAW(replace(draw.PAPER, attention=False))
    assert whole.encoder.input.weight.shape == (1024, 2 * 784 + 256)


def filters_by_definition(inputs, size, side):
    """F_y and F_x of one image, filter by filter and pixel by pixel."""
    stride = (side - 1) / (size - 1) * math.exp(inputs[2])
    found = []
    for p in inputs[:2].tolist():
        means = [(p + 1) / 2 * side + (i - size / 2 + 0.5) * stride for i in range(size)]
        rows = [
            [math.exp(-((pixel - mean) ** 2) / (2 * math.exp(inputs[3]))) for pixel in range(side)]
            for mean in means
        ]
        found.append(torch.tensor([[w / (sum(row) + 1e-4) for w in row] for row in rows]))
    return found


def lstm_by_definition(lstm, x, h, c):
    t = lstm.input.weight @ x + lstm.input.bias + lstm.recurrent.weight @ h
    (t_i, t_f, t_g, t_o), (p_i, p_f, p_o) = t.view(4, -1), lstm.peepholes
    c_new = torch.sigmoid(t_f + p_f * c) * c + torch.sigmoid(t_i + p_i * c) * torch.tanh(t_g)
    return torch.sigmoid(t_o + p_o * c_new) * torch.tanh(c_new), c_new


def bound_by_definition(model, x, noise, attention, side=6, read_size=2, write_size=3):
    """−log p(x | z) and KL of one image."""
    image = lambda pixels: pixels.view(side, side)  # noqa: E731
    outputs = lambda h: model.outputs.weight @ h + model.outputs.bias  # noqa: E731
    canvas, kl = torch.zeros(side**2), 0.0
    h_enc, c_enc, h_dec, c_dec = torch.zeros(4, 5)
    for u in noise:
        glimpse = x, x - torch.sigmoid(canvas)
        if attention:
            window = outputs(h_dec)[:5]
            y, x_filters = filters_by_definition(window, read_size, side)
            gamma = window[4].exp()
            glimpse = [(gamma * y @ image(seen) @ x_filters.T).flatten() for seen in glimpse]
        h_enc, c_enc = lstm_by_definition(model.encoder, torch.cat([*glimpse, h_dec]), h_enc, c_enc)
        mean, log_sigma = (model.code.weight @ h_enc + model.code.bias).view(2, -1)
        kl += kl_divergence(Normal(mean, log_sigma.exp()), Normal(0, 1)).sum()
        h_dec, c_dec = lstm_by_definition(model.decoder, mean + log_sigma.exp() * u, h_dec, c_dec)
        patch = outputs(h_dec)
        if attention:
            window, patch = patch[5:10], patch[10:].view(write_size, write_size)
            y, x_filters = filters_by_definition(window, write_size, side)
            patch = (y.T @ patch @ x_filters / window[4].exp()).flatten()
        canvas = canvas + patch
    return -Bernoulli(logits=canvas).log_prob(x).sum(), kl


@ATTENTION
def test_bound_matches_the_definition(attention):
    model, (x, noise) = build(large_weights=True, attention=attention), data(batch=3, steps=4)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            found = model(x, noise)
            for k in range(3):
                expected = bound_by_definition(model, x[k], noise[:, k], attention)
                torch.testing.assert_close((found.nll[k], found.kl[k]), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_grid_as_large_as_the_image_reproduces_it():
    image, grid = torch.rand(1, 28 * 28, dtype=torch.float64), Attention(28, 28).double()
    middle = 27 / 28 - 1  # the grid's centre is that of the image
    window = torch.tensor([[middle, middle, 0.0, -6.0, 1.5]], dtype=torch.float64)
    back = grid.write(grid.read((image,), window), window)
    torch.testing.assert_close(back, image, atol=1e-3, rtol=0)


def test_filter_outside_of_the_image_reads_zero():
    grid, far = Attention(2, 8), torch.tensor([[40.0, 0.0, -3.0, 0.0, 0.0]], requires_grad=True)
    seen = grid.read((torch.ones(1, 64),), far)
    assert seen.abs().max() == 0
    seen.sum().backward()
    assert far.grad.isfinite().all()


def test_gradients_through_many_steps_match_finite_differences():
    model = build(large_weights=True, side=4, hidden=2, latent=2, write_size=2)
    weight_norm_model(model)
    x, noise = data(batch=2, steps=20, side=4, latent=2)
    names = [name for name, _ in model.named_parameters()]

    def negative_elbo(*values):
        bound = functional_call(model, dict(zip(names, values, strict=True)), (x, noise))
        return bound.negative_elbo

    values = tuple(p.detach().requires_grad_() for p in model.parameters())
    assert torch.autograd.gradcheck(negative_elbo, values, fast_mode=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch reads .grad of non-leaf weights
def test_compiled_step_has_the_same_gradients():
    x, noise = data(steps=2)
    gradients = []
    for compiled in (False, True):
        model = build(large_weights=True)
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        weight_norm_model(model)
        with parametrize.cached():
            bound = model(x, noise)
        bound.negative_elbo.sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*gradients)


@ATTENTION
def test_generated_canvases_and_boxes_of_every_step(attention):
    model = build(large_weights=True, attention=attention)
    noise = torch.randn(5, 3, 3, dtype=torch.float64)
    canvases, boxes = model.generate(noise)
    assert canvases.shape == (5, 3, 6, 6)
    assert torch.equal(model.generate(noise[:2]).canvases, canvases[:2])
    if attention:
        state = model.decode(noise[0], model.initial_state(noise))
        p_y, p_x, log_delta = model.outputs(state.decoder.h)[:, 5:8].T
        expected = [(p_y + 1) / 2 * 6, (p_x + 1) / 2 * 6, 5 * log_delta.exp()]
        torch.testing.assert_close(boxes[0], torch.stack(expected, 1).detach())
    else:
        assert boxes.unique(dim=0).tolist() == [[[2.5, 2.5, 5.0]] * 3]


# — weight norm —


@ATTENTION
@pytest.mark.parametrize("initial_g", ["norm", "one", "one-except-windows"])
def test_initial_g_has_the_configured_value(initial_g, attention):
    plain, model = build(attention=attention), build(attention=attention)
    draw.normalize(model, initial_g)
    weights, drawn = normalized_weights(model), dict(plain.named_parameters())
    assert sorted(weights) == sorted(WEIGHTS)
    for name, (v, g) in weights.items():
        norm = drawn[name].norm(dim=1, keepdim=True)
        expected = norm.clone() if initial_g == "norm" else torch.ones_like(norm)
        if (initial_g, attention, name) == ("one-except-windows", True, "outputs.weight"):
            expected[:10] = norm[:10]
        torch.testing.assert_close(v, drawn[name])
        torch.testing.assert_close(g, expected)
    x, noise = data()
    found, expected = model(x, noise), plain(x, noise)
    assert torch.allclose(found.nll, expected.nll) == (initial_g == "norm")


def test_each_weight_is_computed_once_per_sequence(tmp_path, monkeypatch):
    """In training and, folded, in evaluation: six matrices for each of two training steps."""
    computed, step = [], DRAW.step

    def logged(model, *inputs):
        computed.append(model.outputs.weight)
        return step(model, *inputs)

    monkeypatch.setattr(DRAW, "step", logged)
    size = {"epochs": 1, "limit": 40, "batch_size": 20, "steps": 3, "hidden": 6, "latent": 2}
    draw.run(replace(draw.PRESETS["demo"], out=tmp_path, device="cpu", **size))
    weights = [computed[i : i + 3] for i in range(0, len(computed), 3)]
    assert len(weights) == 2 + 1  # training steps, and one batch of the test set
    assert all(len({id(w) for w in sequence}) == 1 for sequence in weights)
    assert len({id(w) for sequence in weights for w in sequence}) == 3


def test_run_stores_samples_of_half_and_all_of_the_epochs(tmp_path):
    size = {"epochs": 2, "limit": 40, "batch_size": 20, "steps": 3, "hidden": 6, "latent": 2}
    record = draw.run(replace(draw.PRESETS["demo"], out=tmp_path, device="cpu", **size))
    for row in record.metrics:
        assert 0 <= row["test_kl"] < row["test_negative_elbo"]
        assert row["train_gradient_norm"] > 0
    for epoch in (1, 2):
        with np.load(record.folder / f"epoch-{epoch}.npz") as arrays:
            kept = dict(arrays)
        shapes = {name: array.shape for name, array in kept.items()}
        assert shapes == {
            "samples": (100, 8, 8), "drawings": (3, 8, 8, 8), "boxes": (3, 8, 3)
        }  # fmt: skip
        assert (kept["drawings"][-1] == kept["samples"][:8]).all()
        assert kept["samples"].dtype == np.uint8


# — settings —


def test_presets_have_the_implementations_settings():
    paper = draw.PRESETS["paper"]
    assert (paper.steps, paper.hidden, paper.latent) == (64, 256, 100)
    assert (paper.read_size, paper.write_size, paper.attention) == (2, 5, True)
    assert (paper.batch_size, paper.epochs, paper.clip, paper.rate) == (100, 100, 10.0, 0.0003)


def test_without_weight_norm_the_initial_g_is_no_setting():
    plain = replace(draw.PRESETS["demo"], parameterization=Parameterization.STANDARD)
    assert replace(plain, initial_g="one") == plain
    normalized = replace(plain, parameterization=Parameterization.WEIGHT_NORM, initial_g="one")
    assert normalized.initial_g == "one"


def test_digits_are_binary():
    train, test = draw.load(draw.PRESETS["demo"])
    assert train.unique().tolist() == test.unique().tolist() == [0, 1]
    assert 0.1 < train.float().mean().item() < 0.5
    limited, same_test = draw.load(replace(draw.PRESETS["demo"], limit=30))
    assert torch.equal(limited, train[:30])
    assert torch.equal(same_test, test)
