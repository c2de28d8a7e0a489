"""CIFAR-10 classification: the network, the schedule, the data, evaluation."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weightnorm import Parameterization, parameterize
from weightnorm.lab import classify
from weightnorm.lab.classify import ConvPoolCNN, GaussianNoise
from weightnorm.lab.report.tables import settings
from weightnorm.lab.run import Run


def build(how="standard", **options):
    return ConvPoolCNN(partial(parameterize, how=how), **options)


def test_layers_and_parameter_counts_are_the_papers():
    shapes, model = [], build()
    for module in model:
        if isinstance(module, (nn.Conv2d, nn.MaxPool2d, nn.Linear)):
            module.register_forward_hook(lambda m, i, o: shapes.append(tuple(o.shape[1:])))
    model(torch.randn(1, 3, 32, 32))
    first, second = [(96, 32, 32)] * 3 + [(96, 16, 16)], [(192, 16, 16)] * 3 + [(192, 8, 8)]
    assert shapes == [*first, *second, *[(192, 6, 6)] * 3, (10,)]
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    assert sum(p.numel() for p in weights) == 1_405_344
    assert all(0.045 < p.std().item() < 0.055 for p in weights)
    assert sum(p.numel() for p in model.parameters()) == 1_405_344 + 1_450
    normed = build("weight-norm")
    assert sum(p.numel() for p in normed.parameters()) == 1_405_344 + 1_450 + 1_450


@pytest.mark.parametrize("how", Parameterization)
def test_every_parameterization_has_finite_gradients(how):
    model = build(how, width=0.05, channels=1)
    model(torch.randn(4, 1, 16, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_noise_is_added_in_training_only():
    noise, x = GaussianNoise(0.15), torch.zeros(1000)
    assert noise(x).std().item() == pytest.approx(0.15, rel=0.1)
    assert torch.equal(noise.eval()(x), x)


def test_schedule_is_the_papers():
    optimizer = torch.optim.Adam([torch.zeros(1)], lr=1.0)
    rates, momenta = [], []
    for epoch in range(200):
        classify.set_schedule(optimizer, classify.PAPER, epoch)
        rates.append(optimizer.param_groups[0]["lr"])
        momenta.append(optimizer.param_groups[0]["betas"][0])
    assert rates[:101] == [0.003] * 101
    assert rates[150] == pytest.approx(0.0015)
    assert rates[199] == pytest.approx(0.003 / 100)
    assert momenta == [0.9] * 100 + [0.5] * 100


def test_presets_have_the_papers_settings():
    paper = classify.PRESETS["paper"]
    assert (paper.epochs, paper.batch_size, paper.width) == (200, 100, 1.0)
    assert (paper.noise, paper.dropout, paper.init_examples) == (0.15, 0.5, 500)


def test_digits_are_whitened_and_enlarged():
    data = classify.load(classify.PRESETS["demo"])
    assert data.train.shape[1:] == (1, 16, 16)
    small = data.train[:, :, ::2, ::2].flatten(1)
    covariance = torch.cov(small.T, correction=0).diag()
    assert covariance.median().item() == pytest.approx(1, abs=0.05)
    assert len(classify.load(replace(classify.PRESETS["demo"], limit=50)).train) == 50


def test_precisions_are_recorded_and_not_mixed_in_a_table(tmp_path):
    small = replace(
        classify.PRESETS["demo"], width=0.05, epochs=1, limit=20, batch_size=10, out=tmp_path
    )
    precisions = ("float32", "bfloat16")
    records = [classify.run(replace(small, precision=precision)) for precision in precisions]
    assert [record.config["precision"] for record in records] == ["float32", "bfloat16"]
    labels = [one.label.count("precision=bfloat16") for one in settings("classify", records)]
    assert sorted(labels) == [0, 1]


def test_evaluation_is_without_noise_and_dropout_and_over_all_images():
    model = build("weight-norm-mean-only", width=0.02, channels=1)
    images = torch.randn(classify.EVAL_BATCH + 7, 1, 16, 16)
    labels = torch.randint(10, (len(images),))
    model.train()(images)  # running means
    run = Run("classify", classify.PRESETS["demo"], classify.PRESETS)
    loss, error = classify.evaluate(model, images, labels, run.config, run)
    with torch.no_grad():
        logits = model.eval()(images)
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert error == pytest.approx((logits.argmax(1) != labels).double().mean().item())
    assert 0 < error < 1
