"""Configs of all experiments: invalid values raise ConfigError before any work."""

import dataclasses
import json
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
from weightnorm.lab.dqn import QNetwork
from weightnorm.lab.errors import ConfigError
from weightnorm.lab.models.conv_pool_cnn import ConvPoolCNN
from weightnorm.lab.runs.config import RunConfig, folder
from weightnorm.lab.runs.validation import Limits, validate

EXPERIMENTS = {module.NAME: module for module in (classify, vae, draw, dqn)}
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


def fields(module):
    return [field.name for field in dataclasses.fields(module.Config)]


@ALL
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_values_make_a_config_or_raise_config_error(name, data):
    module = EXPERIMENTS[name]
    preset = module.PRESETS[data.draw(st.sampled_from(["paper", "cpu", "demo"]))]
    chosen = data.draw(st.dictionaries(st.sampled_from(fields(module)), ANY_VALUE, min_size=1))
    try:
        config = replace(preset, **chosen)
    except ConfigError:
        return
    for field, limits in config.LIMITS.items():
        value = getattr(config, field)
        assert value is None or limits.low <= value <= limits.high
    folder(name, config, module.PRESETS)
    torch.Generator().manual_seed(config.seed)
    json.dumps(dataclasses.asdict(config), default=str, allow_nan=True)


@ALL
def test_every_number_has_limits(name):
    module = EXPERIMENTS[name]
    hints = typing.get_type_hints(module.Config)
    numbers = {
        field for field in fields(module) if hints[field] in (int, float, int | None, float | None)
    }
    assert numbers == set(module.Config.LIMITS)


@ALL
@pytest.mark.parametrize("wrong", [float("nan"), "1", None, True, [1]], ids=repr)
def test_numbers_of_the_wrong_kind_are_refused(name, wrong):
    module = EXPERIMENTS[name]
    hints = typing.get_type_hints(module.Config)
    for field in module.Config.LIMITS:
        if wrong is None and hints[field] == int | None:
            continue
        with pytest.raises(ConfigError, match=f"{field.replace('_', '-')} is .*; expected"):
            replace(module.PAPER, **{field: wrong})


@ALL
@pytest.mark.parametrize("seed", [-1, 2**63, -(2**63), 10**30])
def test_seeds_out_of_range_are_refused(name, seed):
    with pytest.raises(ConfigError, match=r"seed is .*; expected from 0 to 9,223,372,036,854,775"):
        replace(EXPERIMENTS[name].PAPER, seed=seed)
    replace(EXPERIMENTS[name].PAPER, seed=2**63 - 1)


def test_largest_seed_runs(tmp_path):
    config = replace(
        classify.PRESETS["demo"], seed=2**63 - 1, epochs=1, limit=20, batch_size=10, width=0.05,
        runs=tmp_path, device="cpu",
    )  # fmt: skip
    assert classify.run(config).finished


@pytest.mark.parametrize("module", [classify, vae, dqn], ids=lambda module: module.NAME)
def test_smallest_width_has_a_unit_in_every_layer(module):
    width = module.Config.LIMITS["width"].low
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
    with pytest.raises(ConfigError, match=r"width is .*; expected from"):
        replace(module.PAPER, width=0.99 * width)


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


def test_sizes_of_the_training_sets():
    assert len(classify.load(classify.PRESETS["demo"]).train) == classify.TRAIN_EXAMPLES["digits"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("preset", "big", "preset is 'big'; expected one of paper, cpu, demo"),
        ("precision", "float64", "precision is 'float64'; expected one of float32, bfloat16, flo"),
        ("parameterization", "none", "parameterization is 'none'; expected Parameterization"),
        ("limit", 2.5, "limit is 2.5; expected int or none"),
        ("runs", None, "runs is None; expected Path"),
        ("noise", float("inf"), "noise is inf; expected a finite number of 0 or more"),
        ("dropout", 1.0, "dropout is 1.0; expected at least 0 and below 1"),
        ("batch_size", 1, "batch-size is 1; expected from 2 to 100,000"),
        ("wait_seconds", 0, "wait-seconds is 0; expected above 0 and at most 1e+07"),
    ],
)
def test_messages(field, value, message):
    with pytest.raises(ConfigError) as error:
        replace(classify.PAPER, **{field: value})
    assert message in str(error.value)


def test_unlimited_fields_are_not_checked():
    validate(RunConfig(), {"learning_rate": Limits(0, 1)})
    with pytest.raises(ConfigError):
        validate(RunConfig(), {"learning_rate": Limits(1, 2)})


@pytest.mark.parametrize("module", [classify, vae, draw, language, dqn])
def test_the_metric_that_selects_a_learning_rate_is_not_of_the_test_set(module):
    """But for DQN, whose evaluation games are no held-out data."""
    assert module.METRIC in module.RESULTS
    assert module.METRIC.startswith("train_") or module is dqn
