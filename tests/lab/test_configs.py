"""Configs of all experiments: invalid values raise ConfigError before any work."""

import dataclasses
import json
import math
import typing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
STRINGS = [
    "", "cpu", "digits", "mnist", "cifar10", "one", "norm", "pong", "../x", "a/b", "float16", "\0",
]  # fmt: skip
ANY_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 300),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63)]),
    st.floats(),
    st.floats(0, 2),
    st.sampled_from(STRINGS),
    st.text(max_size=5),
    st.sampled_from(Parameterization),
    st.just(Path("runs")),
)


def ranges(module):
    """Return field → its range, and whether it may be None, for every number of a config."""
    found = {}
    for name, hint in typing.get_type_hints(module.Config, include_extras=True).items():
        choices = (hint, *typing.get_args(hint))
        metadata = [x for choice in choices for x in getattr(choice, "__metadata__", ())]
        numbers = [x for x in metadata if isinstance(x, Range)]
        if numbers:
            found[name] = numbers[0], type(None) in choices
    return found


@ALL
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_values_make_a_config_or_raise_config_error(name, data):
    module = EXPERIMENTS[name]
    preset = data.draw(st.sampled_from([*module.PRESETS.values()]))
    names = [field.name for field in dataclasses.fields(preset)]
    chosen = data.draw(st.dictionaries(st.sampled_from(names), ANY_VALUE, min_size=1))
    try:
        config = replace(preset, **chosen)
    except ConfigError:
        return
    for field, (limits, _) in ranges(module).items():
        value = getattr(config, field)
        assert value is None or limits.low <= value <= limits.high
    assert config.rate > 0
    folder(name, config, module.PRESETS)
    torch.Generator().manual_seed(config.seed)
    json.dumps(dataclasses.asdict(config), default=str, allow_nan=True)


@ALL
def test_every_number_has_a_range_which_is_enforced(name):
    module = EXPERIMENTS[name]
    kinds, found = typing.get_type_hints(module.Config), ranges(module)
    assert found.keys() == {
        field.name
        for field in dataclasses.fields(module.Config)
        if kinds[field.name] in (int, float, int | None, float | None)
    }
    preset = next(iter(module.PRESETS.values()))
    for field, (limits, optional) in found.items():
        expected = f"{field.replace('_', '-')} is .*; expected"
        wrong = [float("nan"), "1", True, [1], limits.low - 1]
        wrong += [] if optional else [None]
        wrong += [] if math.isinf(limits.high) else [limits.high * 2]
        for value in wrong:
            with pytest.raises(ConfigError, match=expected):
                replace(preset, **{field: value})


@ALL
def test_other_parameterizations_are_refused(name):
    preset = next(iter(EXPERIMENTS[name].PRESETS.values()))
    for how in set(Parameterization) - set(preset.COMPARED):
        with pytest.raises(ConfigError, match=f"parameterization is {how}; expected standard"):
            replace(preset, parameterization=how)


@pytest.mark.parametrize("module", [classify, vae, dqn], ids=lambda module: module.NAME)
def test_smallest_width_has_a_unit_in_every_layer(module):
    width = ranges(module)["width"][0].low
    standard = partial(parameterize, how=Parameterization.STANDARD)
    if module is classify:
        models = [ConvPoolCNN(standard, width=width)]
    elif module is dqn:
        models = [QNetwork(4, width=width)]
    else:
        presets = (vae.PRESETS["cpu"], vae.PRESETS["cpu cifar10"])
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
        ({"data": "digits", "batch_size": 100_000}, False),
        ({"batch_size": 3, "limit": 10, "parameterization": Parameterization.WEIGHT_NORM}, False),
    ],
)
def test_last_batch_of_one_with_batch_norm_is_refused(changes, refused):
    config = {"parameterization": Parameterization.BATCH_NORM} | changes
    if refused:
        with pytest.raises(ConfigError, match=r"batch-size is .* 1 of .* for the last batch"):
            replace(classify.PAPER, **config)
    else:
        replace(classify.PAPER, **config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("preset", "big", "preset is 'big'; expected one of paper, cpu, demo"),
        ("precision", "float64", "precision is 'float64'; expected one of float32, bfloat16, flo"),
        ("parameterization", "none", "parameterization is 'none'; expected Parameterization"),
        ("limit", 2.5, "limit is 2.5; expected int or none"),
        ("out", None, "out is None; expected Path"),
        ("noise", float("inf"), "noise is inf; expected a finite number of 0 or more"),
        ("dropout", 1.0, "dropout is 1.0; expected at least 0 and below 1"),
        ("batch_size", 1, "batch-size is 1; expected from 2 to 100,000"),
        ("seed", 2**63, "expected from 0 to 9,223,372,036,854,775"),
        ("wait_seconds", 0, "wait-seconds is 0; expected above 0 and at most 1e+07"),
    ],
)
def test_messages(field, value, message):
    with pytest.raises(ConfigError) as error:
        replace(classify.PAPER, **{field: value})
    assert message in str(error.value)


def test_default_learning_rate_follows_preset_and_parameterization():
    """Also where a config is derived from a preset; an explicit rate stays."""
    cpu, how = classify.PRESETS["cpu"], Parameterization.STANDARD
    assert cpu.rate == 0.003
    assert replace(cpu, parameterization=how).rate == 0.0003
    assert classify.Config(parameterization=how).rate == 0.0003
    assert replace(classify.PRESETS["demo"], parameterization=how).rate == 0.003
    assert replace(cpu, learning_rate=0.1, parameterization=how).rate == 0.1
    assert scientific_fields(replace(cpu, parameterization=how))["learning_rate"] == 0.0003


def test_every_published_record_has_a_config_of_its_experiment():
    """Old records have fewer fields; those they have are still fields, with valid values."""
    found = find_records(Path(__file__).parents[2] / "docs" / "results")[0]
    records = [record for record in found if record.experiment in EXPERIMENTS]
    assert len(records) > 100
    for record in records:
        kind = EXPERIMENTS[record.experiment].Config
        fields = completed(record.config, kind)
        how = Parameterization(fields["parameterization"])
        config = kind(**{**fields, "parameterization": how})
        assert scientific_fields(config).keys() == fields.keys()
        assert config.rate == record.config["learning_rate"]


@pytest.mark.parametrize("module", [classify, vae, draw, language, dqn])
def test_the_metric_that_selects_a_learning_rate_is_not_of_the_test_set(module):
    """But for DQN, whose evaluation games are no held-out data."""
    assert module.METRIC in module.RESULTS
    assert module.METRIC.startswith("train_") or module is dqn
