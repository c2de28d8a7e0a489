"""The linter finds each common mistake; a correct model has no findings."""

from functools import partial

import pytest
import torch
from torch import nn

from weightnorm import (
    WeightNormOptimizer,
    normalized_weights,
    parts,
    remove_weight_norm,
    weight_norm,
    weight_norm_model,
)
from weightnorm.diagnostics import check


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    weight_norm_model(model)
    return model


def kinds(findings):
    return [(*finding.weights, finding.kind) for finding in findings]


def test_correct_model_and_optimizer_have_no_findings(model):
    lengths = [p.g for p in normalized_weights(model).values()]
    others = [p for p in model.parameters() if not any(p is g for g in lengths)]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": lengths, "weight_decay": 0}]
    assert check(model, torch.optim.SGD(groups, lr=0.1)) == []


def test_model_without_normalized_weights():
    (finding,) = check(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1)))
    assert str(finding) == (
        "the model: no weight is normalized; apply weight_norm_model to it, or train it with a "
        "WeightNormOptimizer"
    )


def test_equal_findings_are_one_line():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    weight_norm_model(model)
    with torch.no_grad():
        for i in (0, 3, 5):
            parts(model[i]).v[: 1 + i % 2] = 0
    (dead, decayed) = check(model, torch.optim.AdamW(model.parameters(), weight_decay=0.01))
    assert str(dead) == (
        "0.weight (1 of 4), 3.weight (2 of 4), 5.weight (2 of 4): dead units: v or g is zero; "
        "reinitialize them, or remove them"
    )
    assert len(decayed.weights) == 12
    names = "0.weight, 1.weight, 2.weight, 3.weight and 8 more: weight decay on g"
    assert str(decayed).startswith(names)


def test_layers_that_are_not_normalized(model):
    model.append(nn.Linear(2, 2)).append(nn.Embedding(3, 3))
    assert kinds(check(model)) == [("3.weight", "not normalized, unlike other layers")]


def test_optimizer_built_before_weight_norm():
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    weight_norm(layer)
    found = kinds(check(layer, optimizer))
    assert found == [("weight", "v and g not in the optimizer, so not trained")]
    optimizer.add_param_group({"params": [parts(layer).v]})
    assert kinds(check(layer, optimizer)) == [("weight", "g not in the optimizer, so not trained")]


def test_frozen_g_need_not_be_in_the_optimizer():
    layer = weight_norm(nn.Linear(3, 2), train_g=False)
    trained = [p for p in layer.parameters() if p.requires_grad]
    assert check(layer, torch.optim.SGD(trained, lr=0.1)) == []


@pytest.mark.parametrize("which", ["v", "g"])
def test_dead_units(model, which):
    with torch.no_grad():
        getattr(parts(model[0]), which)[:3] = 0
    (finding,) = check(model)
    assert (finding.weights, finding.details) == (("0.weight",), ("3 of 8",))
    assert "dead" in finding.kind


def test_long_and_non_finite_v(model):
    with torch.no_grad():
        parts(model[2]).v.mul_(1e5)
    (finding,) = check(model)
    assert finding.weights == ("2.weight",)
    assert "many times |g|" in finding.kind
    assert "apply it again" in finding.advice
    with torch.no_grad():
        parts(model[2]).v[0, 0] = float("nan")
    assert kinds(check(model)) == [("2.weight", "not finite")]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_stale_writes_under_torchs_hook():
    layer = nn.utils.weight_norm(nn.Linear(3, 2))
    assert check(layer) == []
    with torch.no_grad():
        layer.weight.fill_(7)
    (finding,) = check(layer)
    assert "stale" in finding.kind
    assert "init_" in str(finding)
    layer(torch.randn(1, 3))
    assert check(layer) == []


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_optimizer_step_is_not_a_stale_write():
    layer = nn.utils.weight_norm(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert check(layer, optimizer) == []


def test_optimizer_form(model):
    remove_weight_norm(model)
    model.append(nn.Embedding(3, 3))
    sgd = torch.optim.SGD
    assert check(nn.Sequential(model), WeightNormOptimizer(model, sgd, lr=0.1)) == []
    first = WeightNormOptimizer(model, sgd, where=lambda name, _: name == "0.weight", lr=0.1)
    assert kinds(check(model, first)) == [("2.weight", "not normalized, unlike other layers")]
    with torch.no_grad():
        model[2].weight[1] = 0
    dead = WeightNormOptimizer(model, sgd, lr=0.1)
    assert kinds(check(model, dead)) == [("2.weight", "dead units: v or g is zero")]


def test_remedies_are_those_of_the_form_in_use(model):
    normalized = check(model.append(nn.Linear(2, 2)))
    assert "use weight_norm_model" in str(*normalized)
    remove_weight_norm(model)
    first = WeightNormOptimizer(
        model, torch.optim.SGD, where=lambda name, _: name == "0.weight", lr=0.1
    )
    (finding,) = check(model, first)
    assert finding.weights == ("2.weight", "3.weight")
    assert "choose it with `where` of WeightNormOptimizer" in finding.advice


@pytest.mark.parametrize(
    ("on", "found"),
    [("parts", ["0.weight", "2.weight"]), ("w", []), ("g", []), (None, []), ("auto", [])],
)
def test_weight_decay_in_the_optimizer_form(model, on, found):
    remove_weight_norm(model)
    adam = torch.optim.AdamW
    optimizer = WeightNormOptimizer(model, adam, lr=0.1, weight_decay=0.1, weight_decay_on=on)
    findings = check(model, optimizer)
    assert [name for finding in findings for name in finding.weights] == found
    assert all("weight decay on g" in finding.kind for finding in findings)


@pytest.mark.parametrize(
    ("directions", "lengths", "options", "found"),
    [
        (0.1, 0.0, {}, []),
        (0.0, 0.1, {}, ["0.weight", "2.weight"]),
        (0.1, None, {"train_g": False}, []),
    ],
    ids=["on v alone", "on g alone", "g is not trained"],
)
def test_weight_decay_of_the_optimizer_of_g(model, directions, lengths, options, found):
    remove_weight_norm(model)
    adam = torch.optim.AdamW
    own = None if lengths is None else partial(adam, weight_decay=lengths)
    optimizer = WeightNormOptimizer(model, adam, weight_decay=directions, lengths=own, **options)
    findings = check(model, optimizer)
    assert [name for finding in findings for name in finding.weights] == found


def test_weight_decay_of_a_log_scale():
    layer = weight_norm(nn.Linear(3, 2), scale="log")
    (finding,) = check(layer, torch.optim.AdamW(layer.parameters()))
    assert "towards 1" in finding.kind


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_writes_through_data_under_torchs_hook_are_found():
    model = nn.Sequential(nn.utils.weight_norm(nn.Conv1d(4, 4, 3)))
    assert not check(model)
    model[0].weight.data.normal_(0, 0.01)  # as HiFi-GAN's init_weights does
    (finding,) = check(model)
    assert finding.kind.startswith("stale")
    model(torch.ones(1, 4, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # out of date, but nobody wrote to it
    assert not check(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_models_without_readable_attributes_are_checked():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))
    with torch.inference_mode():
        model(torch.ones(1, 4))
    assert not check(model)
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))
    nn.init.normal_(model[0].weight)
    assert [finding.weights for finding in check(model.double())] == [("0.weight",)]
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.utils.weight_norm(nn.Linear(4, 4)))
    weight_norm_model(model)
    assert not check(model)


def test_a_frozen_g_is_not_decayed():
    model = nn.Sequential(nn.Linear(4, 4))
    weight_norm_model(model, g=1.0, train_g=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    assert not check(model, optimizer)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert (parts(model[0]).g == 1).all()


def test_lazy_layers_count_as_normalized():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    weight_norm_model(model)
    assert not check(model)
    model(torch.randn(3, 5))
    assert not check(model)
