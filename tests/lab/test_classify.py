"""CIFAR-10 classification: schedule, data, settings, folder."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from weightnorm import parameterize
from weightnorm.lab import classify
from weightnorm.lab.classify import ConvPoolCNN
from weightnorm.lab.config import folder
from weightnorm.lab.environment import Ranks
from weightnorm.lab.report.tables import settings


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
    for name, preset in classify.PRESETS.items():
        assert preset.preset == name
        same = ("batch_size", "noise", "dropout", "init_examples", "learning_rate")
        assert all(getattr(preset, field) == getattr(paper, field) for field in same)


def test_digits_are_whitened_and_enlarged():
    data = classify.load(classify.PRESETS["demo"])
    assert data.train.shape[1:] == (1, 16, 16)
    small = data.train[:, :, ::2, ::2].flatten(1)
    covariance = torch.cov(small.T, correction=0).diag()
    assert covariance.median().item() == pytest.approx(1, abs=0.05)
    assert len(classify.load(replace(classify.PRESETS["demo"], limit=50)).train) == 50


def test_folder_names_changed_settings():
    def where(**changes):
        config = replace(classify.PRESETS["demo"], **changes)
        return str(folder("classify", config, classify.PRESETS))

    assert where() == "runs/classify/demo/weight-norm/lr-0.003/seed-1"
    assert where(seed=2, learning_rate=0.01).endswith("demo/weight-norm/lr-0.01/seed-2")
    assert where(epochs=3, width=0.5).endswith(
        "demo+epochs=3,width=0.5/weight-norm/lr-0.003/seed-1"
    )
    assert where(device="cpu", compile=True, out=Path("runs")) == where()


def test_precisions_are_recorded_and_not_mixed_in_a_table(tmp_path):
    small = replace(
        classify.PRESETS["demo"], width=0.05, epochs=1, limit=20, batch_size=10, out=tmp_path
    )
    precisions = ("float32", "bfloat16")
    records = [classify.run(replace(small, precision=precision)) for precision in precisions]
    assert [record.config["precision"] for record in records] == ["float32", "bfloat16"]
    assert "precision=bfloat16" in str(records[1].folder)
    labels = [one.label.count("precision=bfloat16") for one in settings("classify", records)]
    assert sorted(labels) == [0, 1]


def test_evaluation_is_without_noise_and_dropout_and_over_all_images():
    wrap = partial(parameterize, how="weight-norm-mean-only")
    model = ConvPoolCNN(wrap, width=0.02, channels=1, noise=0.5, dropout=0.5)
    images = torch.randn(classify.EVAL_BATCH + 7, 1, 16, 16)
    labels = torch.randint(10, (len(images),))
    model.train()(images)  # running means
    run = SimpleNamespace(ranks=Ranks(), device=torch.device("cpu"))
    config = classify.PRESETS["demo"]
    loss, error = classify.evaluate(model.train(), images, labels, config, run)
    with torch.no_grad():
        logits = model.eval()(images)
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    assert error == pytest.approx((logits.argmax(1) != labels).double().mean().item())
    assert 0 < error < 1
