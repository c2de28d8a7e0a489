"""Estimators, limits, rounds, noise, peak memory."""

import numpy as np
import pytest
import torch

from weightnorm.lab.bench.benchmark import (
    Case,
    Settings,
    Summary,
    added_at_most,
    at_most,
    estimate,
    extra_at_most,
    is_precise,
    measure,
    ratio_interval,
)
from weightnorm.lab.bench.memory import peak_bytes

CPU = torch.device("cpu")


def test_ratios_are_paired_by_round_and_outliers_trimmed():
    slow = [1.0, 1.0, 1.0, 9.0, 9.0, 9.0]  # a round that was slow for both
    ratio = ratio_interval({"a": slow, "b": [2 * x for x in slow]}, "b", "a")
    assert ratio == pytest.approx((2.0, 2.0, 2.0))
    outliers = [1.25] * 16 + [9.0, 9.0, 0.1, 0.1]
    ratio = ratio_interval({"a": [1.0] * 20, "b": outliers}, "b", "a")
    assert ratio.value == pytest.approx(1.25)
    assert ratio.half_width < 0.05


def test_estimator_is_unbiased_and_precise_on_noisy_rounds():
    """Heavy-tailed noise with drift of the machine's speed, a true ratio of 1.05."""
    rng = np.random.default_rng(0)
    speed = 1 + rng.exponential(0.5, 200)
    a, b = (x * speed * (1 + rng.exponential(0.05, 200)) for x in (1.0, 1.05))
    ratio = ratio_interval({"a": list(a), "b": list(b)}, "b", "a")
    assert ratio.low < 1.05 < ratio.high
    assert ratio.half_width < 0.02


def test_values_of_limits():
    def value(limit, **samples):
        repeated = {name: [x] * 3 for name, x in samples.items()}
        return estimate(repeated, limit.peers, limit.value).value

    assert value(at_most("a", 1.0, "b"), a=3.0, b=2.0) == pytest.approx(1.5)
    extra = extra_at_most("a", 0.5, "b", "base")
    assert value(extra, a=1.1, b=1.4, base=1.0) == pytest.approx(0.25)
    assert value(extra, a=1.1, b=1.0, base=1.0) > 10  # the other has no extra cost
    assert value(extra, a=1.0, b=0.9, base=1.0) == 0
    added = added_at_most("a", 1.0, "b", 100, "weights")
    assert value(added, a=350.0, b=200.0) == pytest.approx(1.5)


def measured(*ours, settings=None, limits=(1.01,)):
    """The record of a case in which the base takes 1 and ours what is given, round by round."""
    values = iter([ours[0], *ours])  # the first call is a warm-up
    case = Case(
        "name",
        {"plain": lambda: 1.0, "ours": lambda: next(values)},
        base="plain",
        limits=tuple(at_most("ours", limit, "plain") for limit in limits),
        summary=(Summary("work", "ours"),),
        at_least_base=("ours",),
    )
    return measure(case, settings or Settings(CPU, quick=True, rounds=len(ours)))


@pytest.mark.parametrize(
    ("rounds", "noise", "verdicts"),
    [
        ([0.88] * 4, True, ["within noise"] * 2),
        ([0.99] * 4, True, ["within noise"] * 2),  # the interval excludes 1
        ([0.7, 0.8, 0.9, 1.3], True, ["within noise"] * 2),  # it does not, but is far below
        ([1.0] * 4, False, ["met", "met"]),
        ([1.5] * 4, False, ["missed", "met"]),
    ],
)
def test_goals_are_judged_unless_faster_with_more_work(rounds, noise, verdicts):
    found = measured(*rounds, limits=(1.01, 2.0))
    assert found["results"]["ours"]["noise"] == noise
    assert [goal["verdict"] for goal in found["goals"]] == verdicts
    assert found["rounds"] == len(found["samples"]["ours"]) == 4


def test_rounds_are_added_until_ratios_are_precise():
    noisy = 1.1 + 0.1 * np.random.default_rng(0).standard_normal(1000)
    settings = Settings(CPU, rounds=5, seconds=60.0)
    found = measured(*noisy, settings=settings)
    assert 5 < found["rounds"] < settings.most
    assert is_precise(found["samples"], "plain", settings.precision)
    assert not is_precise({n: x[:5] for n, x in found["samples"].items()}, "plain", 0.02)


def test_peak_memory():
    def work():
        a = torch.empty(1000)
        b = a + 1
        del a
        return b + 1  # two are allocated at any time

    assert peak_bytes(work, CPU) == pytest.approx(8000, abs=300)
