"""Configs of all experiments: defaults, valid values, and records of earlier versions."""

import math
import typing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from weightnorm import Parameterization, parameterize
from weightnorm.lab import classify, dqn, draw, language, vae
from weightnorm.lab.classify import ConvPoolCNN
from weightnorm.lab.config import Range, completed, folder, scientific_fields
from weightnorm.lab.dqn import QNetwork
from weightnorm.lab.errors import ConfigError
from weightnorm.lab.records import find_records

EXPERIMENTS = {module.NAME: module for module in (classify, vae, draw, dqn, language)}
ALL = pytest.mark.parametrize("name", EXPERIMENTS)
BATCH_NORM, STANDARD = Parameterization.BATCH_NORM, Parameterization.STANDARD


def ranges(module):
    """Return field → its range, for every number of a config."""
    found = {}
    for name, hint in typing.get_type_hints(module.Config, include_extras=True).items():
        extras = [x for part in (hint, *typing.get_args(hint))
                  for x in getattr(part, "__metadata__", ()) if isinstance(x, Range)]  # fmt: skip
        if extras:
            found[name] = extras[0]
    return found


@ALL
def test_defaults_are_the_papers_preset(name):
    presets = EXPERIMENTS[name].PRESETS
    default, paper = EXPERIMENTS[name].Config(), presets.get("paper", presets["cpu"])
    assert default == paper
    assert default.rate == paper.rate


@ALL
def test_every_number_has_a_range_which_is_enforced(name):
    module, found = EXPERIMENTS[name], ranges(EXPERIMENTS[name])
    kinds = typing.get_type_hints(module.Config)
    numbers = (int, float, int | None, float | None)
    assert set(found) == {x.name for x in fields(module.Config) if kinds[x.name] in numbers}
    for field, limits in found.items():
        wrong = [math.nan, limits.low - 1, *([limits.high * 2] if limits.high < math.inf else [])]
        for value in wrong:
            with pytest.raises(ConfigError, match=f"{field.replace('_', '-')} is .*; expected"):
                module.Config(**{field: value})


@ALL
def test_other_parameterizations_are_refused(name):
    for how in set(Parameterization) - set(EXPERIMENTS[name].Config.COMPARED):
        with pytest.raises(ConfigError, match=f"parameterization is {how}; expected standard"):
            EXPERIMENTS[name].Config(parameterization=how)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("preset", "big", "preset is 'big'; expected one of paper, cpu, demo"),
        ("noise", math.inf, "noise is inf; expected a finite number of 0 or more"),
        ("dropout", 1.0, "dropout is 1.0; expected at least 0 and below 1"),
        ("batch_size", 1, "batch-size is 1; expected from 2 to 100,000"),
    ],
)
def test_messages(field, value, message):
    with pytest.raises(ConfigError) as error:
        replace(classify.PAPER, **{field: value})
    assert message in str(error.value)


def test_a_parameterization_may_be_given_by_its_name():
    assert classify.Config(parameterization="standard").parameterization is STANDARD


@pytest.mark.parametrize("module", [classify, vae, dqn], ids=lambda module: module.NAME)
def test_smallest_width_has_a_unit_in_every_layer(module):
    width = ranges(module)["width"].low
    if module is classify:
        models = [ConvPoolCNN(partial(parameterize, how=STANDARD), width=width)]
    elif module is dqn:
        models = [QNetwork(4, width=width)]
    else:
        presets = vae.PRESETS["cpu"], vae.PRESETS["cpu cifar10"]
        models = [vae.build(replace(preset, width=width), 28) for preset in presets]
    for model in models:
        layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))]
        assert layers
        assert all(min(layer.weight.shape) >= 1 for layer in layers)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"batch_size": 3, "limit": 10}, True),
        ({"batch_size": 49_999}, True),
        ({"batch_size": 3, "limit": 11}, False),
        ({"data": "digits", "batch_size": 4}, True),  # 1,437 examples
        ({"batch_size": 3, "limit": 10, "parameterization": Parameterization.WEIGHT_NORM}, False),
    ],
)
def test_last_batch_of_one_with_batch_norm_is_refused(changes, refused):
    config = {"parameterization": BATCH_NORM} | changes
    if refused:
        with pytest.raises(ConfigError, match=r"batch-size is .* 1 of .* for the last batch"):
            replace(classify.PAPER, **config)
    else:
        replace(classify.PAPER, **config)


def test_default_learning_rate_follows_preset_and_parameterization():
    """Also where a config is derived from a preset; an explicit rate stays."""
    cpu = classify.PRESETS["cpu"]
    assert cpu.rate == 0.003
    assert replace(cpu, parameterization=STANDARD).rate == 0.0003
    assert replace(classify.PRESETS["demo"], parameterization=STANDARD).rate == 0.003
    assert replace(cpu, learning_rate=0.1, parameterization=STANDARD).rate == 0.1
    recorded = scientific_fields(replace(cpu, parameterization=STANDARD))
    assert recorded["learning_rate"] == 0.0003


def test_folder_names_changed_settings():
    def where(preset, **changes):
        return str(folder("vae", replace(vae.PRESETS[preset], **changes), vae.PRESETS))

    assert where("demo") == "runs/vae/demo/digits/weight-norm/lr-0.002/seed-1"
    assert where("cpu cifar10", seed=2, learning_rate=0.01) == (
        "runs/vae/cpu/cifar10/weight-norm/lr-0.01/seed-2"
    )
    assert where("demo", epochs=3, width=0.2).startswith("runs/vae/demo+width=0.2,epochs=3/")
    assert where("demo", device="cpu", compile=True, out=Path("runs")) == where("demo")


def test_every_published_record_has_a_config_of_its_experiment():
    """Old records have fewer fields; those they have are still fields, with valid values."""
    found = find_records(Path(__file__).parents[2] / "docs" / "results")[0]
    records = [record for record in found if record.experiment in EXPERIMENTS]
    assert len(records) > 100
    for record in records:
        kind = EXPERIMENTS[record.experiment].Config
        config = kind(**completed(record.config, kind))
        assert scientific_fields(config).keys() == completed(record.config, kind).keys()
        assert config.rate == record.config["learning_rate"]


@ALL
def test_the_metric_that_selects_a_learning_rate_is_not_of_the_test_set(name):
    """But for DQN, whose evaluation games are no held-out data."""
    module = EXPERIMENTS[name]
    assert module.METRIC in module.RESULTS
    assert module.METRIC.startswith("train_") or module is dqn
