"""Intervals of means over seeds and of resampled statistics."""

import math

import numpy as np
import pytest
import scipy.stats

from weightnorm.lab.statistics import (
    Interval,
    bootstrap,
    mean_interval,
    variance_ratio_interval,
)


def test_the_interval_is_that_of_a_t_test():
    values = [1.0, 4.0, 2.5, 3.0]
    found = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert mean_interval(values)[1:] == pytest.approx((found.low, found.high))


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_coverage(n):
    rng = np.random.default_rng(1)
    intervals = [mean_interval(x) for x in rng.normal(size=(2000, n))]
    assert 0.93 < np.mean([x.low < 0 < x.high for x in intervals]) < 0.97


def test_an_infinite_value_leaves_the_mean_unbounded():
    assert mean_interval([1.0, math.inf]) == Interval(math.inf, -math.inf, math.inf)


def test_coverage_of_resampling():
    """Percentile intervals of 20 normal values cover the mean in about 93 % of cases."""
    rng = np.random.default_rng(1)
    intervals = [bootstrap(lambda x: x.mean(-1), x) for x in rng.normal(size=(150, 20))]
    assert 0.86 < np.mean([x.low < 0 < x.high for x in intervals]) < 0.99


def test_samples_are_resampled_in_pairs():
    a = [1.0, 10.0, 100.0, 1000.0]
    ratio = bootstrap(lambda a, b: a.mean(-1) / b.mean(-1), a, [2 * x for x in a])
    assert ratio == Interval(0.5, 0.5, 0.5)


def test_resampling_is_reproducible():
    values = np.random.default_rng(1).normal(size=20)
    first, second = (bootstrap(lambda x: x.mean(-1), values) for _ in range(2))
    assert first == second


def test_the_ratio_of_variances_has_the_interval_of_an_f_test():
    a, b = [1.0, 2.0, 4.0], [1.0, 3.0, 5.0, 11.0, 2.0, 8.0]
    ratio, low, high = variance_ratio_interval(a, b)
    assert ratio == pytest.approx(np.var(a, ddof=1) / np.var(b, ddof=1))
    tails = scipy.stats.f(len(a) - 1, len(b) - 1).cdf([ratio / high, ratio / low])
    assert tails == pytest.approx([0.025, 0.975])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1.0], [1.0, 2.0]),
        ([1.0, 2.0], [1.0]),
        ([1.0, math.inf], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.inf]),
    ],
)
def test_a_variance_that_is_not_finite_leaves_the_ratio_unbounded(a, b):
    ratio, low, high = variance_ratio_interval(a, b)
    assert math.isnan(ratio)
    assert (low, high) == (-math.inf, math.inf)
