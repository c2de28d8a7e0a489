"""Verdict rules, on numbers for which a claim is true and for which it is false."""

import math

import pytest

from weightnorm.lab import vae
from weightnorm.lab.claims import (
    algebra,
    cost,
    covariance,
    from_records,
    initialization,
    learning_rates,
    noise,
    norm_growth,
    reinforcement,
    robustness,
)
from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    NOT_MEASURED,
    NOT_SHOWN,
    QUALITATIVELY,
    above,
    exactly,
    undecided,
    weakest,
)
from weightnorm.lab.statistics import Interval, mean_interval


def around(mean, half=0.01):
    return Interval(mean, mean - half, mean + half)


@pytest.mark.parametrize(
    ("deviation", "verdict"), [(1e-12, HOLDS), (1e-3, FAILS), (math.nan, FAILS), (math.inf, FAILS)]
)
def test_identities(deviation, verdict):
    assert exactly(deviation, 1e-9) == verdict


def test_weakest_and_above():
    assert weakest(HOLDS, HOLDS) == HOLDS
    assert weakest(HOLDS, QUALITATIVELY, FAILS) == FAILS
    assert above(around(0.6), 0.5) == HOLDS
    assert above(around(0.505), 0.5) == QUALITATIVELY
    assert above(Interval(0.6, -0.1, 1.3), 0.5) == NOT_SHOWN
    assert above(Interval(0.2, -0.1, 0.45), 0.5) == FAILS


def grown(shrinking=0.0, pythagoras=1e-15, momentum=1.5, adam=1.2):
    other = {"shrinking": [0.1, 0.1], "pythagoras": [0.3, 0.3]}
    exact = {"shrinking": [0.0, shrinking], "pythagoras": [1e-16, pythagoras]}
    return {
        "gradient descent": {**exact, "growth": [2.0, 2.0]},
        "momentum 0.9": {**other, "growth": [momentum, 1.5]},
        "Adam": {**other, "growth": [adam, 1.2]},
    }


def test_growth_of_v():
    assert norm_growth.growth_verdict(grown()) == HOLDS
    assert norm_growth.growth_verdict(grown(adam=0.9)) == QUALITATIVELY
    assert norm_growth.growth_verdict(grown(shrinking=0.001)) == FAILS
    assert norm_growth.growth_verdict(grown(pythagoras=1e-3)) == FAILS


def test_growth_and_noise():
    up, level, down = around(0.1), around(0.0), around(-0.1)
    assert norm_growth.noise_verdict([up, up], [up, up]) == HOLDS
    assert norm_growth.noise_verdict([up, up], [up, level]) == QUALITATIVELY
    assert norm_growth.noise_verdict([up, level], [up, up]) == NOT_SHOWN
    assert norm_growth.noise_verdict([down, down], [up, up]) == FAILS
    values = {128: [1.0, 1.1], 32: [1.2, 1.2], 8: [1.5, 1.6]}
    assert [step.value for step in norm_growth.differences(values)] == pytest.approx([0.15, 0.35])


def test_width_of_the_learning_rates():
    chance, rates = math.log(10), len(robustness.RATES)
    dip = [chance] * rates
    assert robustness.width(dip) == 0  # no rate works
    dip[4] = 0.1
    assert robustness.width(dip) == pytest.approx(0.5)
    dip[5] = 0.1 + 0.15 * (chance - 0.1)
    assert robustness.width(dip) == pytest.approx(0.5)
    assert robustness.width(dip, within=0.2) == pytest.approx(1)
    assert robustness.width([0.1] * rates) == pytest.approx(0.5 * rates)
    assert robustness.final_loss([1.0] * 5, 10) == chance
    assert robustness.final_loss([9.0] * 10, 10) == chance
    assert robustness.final_loss([2.0] * 8 + [0.5, 1.5], 10) == pytest.approx(1.0)


def test_best_rate_by_mean_over_seeds():
    assert robustness.best_rate([[1.0, 0.5, 2.0], [1.0, 0.9, 0.1]]) == 1


def test_log_scale():
    up, level, down = around(0.1), around(0.0), around(-0.1)
    assert robustness.log_verdict([up, up], [level, level]) == HOLDS
    assert robustness.log_verdict([level, up], [level, up]) == QUALITATIVELY
    assert robustness.log_verdict([up, down], [level, level]) == FAILS
    assert robustness.log_verdict([up, up], [level, down]) == FAILS


def test_dominant_direction():
    often, seldom, more, none = around(0.8), around(0.2), around(0.2), around(0.0)
    assert covariance.alignment_verdict(often, more, more) == HOLDS
    assert covariance.alignment_verdict(seldom, more, more) == QUALITATIVELY
    assert covariance.alignment_verdict(often, none, more) == NOT_SHOWN
    assert covariance.alignment_verdict(often, more, none) == NOT_SHOWN
    assert covariance.alignment_verdict(often, around(-0.2), more) == FAILS


def test_nearer_the_identity():
    assert covariance.nearer_verdict(around(0.2), around(0.1)) == HOLDS
    assert covariance.nearer_verdict(around(0.04), around(0.03)) == QUALITATIVELY
    assert covariance.nearer_verdict(around(0.2), around(0.0)) == NOT_SHOWN
    assert covariance.nearer_verdict(around(-0.2), around(0.1)) == FAILS


def test_intervals_are_over_seeds():
    rows = [{"seed": s, "x": x, "y": 1.0} for s, x in [(1, 2.0), (1, 4.0), (2, 7.0), (2, 9.0)]]
    assert covariance.seed_means(rows, "x", less="y") == [2.0, 7.0]
    assert covariance.over_seeds(rows, "x", less="y") == mean_interval([2.0, 7.0])


def test_noise_tails():
    def verdict(mean, small, large):
        means = {16: around(mean), 100: around(mean)}
        return noise.noise_verdict(means, {16: [around(small)] * 2, 100: [around(large)] * 2})

    assert verdict(0.0, 2.0, 0.8) == HOLDS
    assert verdict(0.0, 2.0, 0.2) == QUALITATIVELY
    assert verdict(1.0, 2.0, 0.8) == QUALITATIVELY
    assert verdict(0.0, 0.0, 0.8) == NOT_SHOWN
    assert verdict(0.0, -0.5, 0.8) == FAILS


def test_batch_norm_in_deep_q_learning():
    worse, same, better = around(0.5), around(0.0), around(-0.5)
    assert reinforcement.stability_verdict(worse, worse, worse) == HOLDS
    assert reinforcement.stability_verdict(worse, worse, same) == QUALITATIVELY
    assert reinforcement.stability_verdict(same, worse, worse) == QUALITATIVELY
    assert reinforcement.stability_verdict(better, worse, worse) == NOT_SHOWN
    assert reinforcement.stability_verdict(same, same, worse) == NOT_SHOWN
    assert reinforcement.stability_verdict(same, better, worse) == FAILS
    assert reinforcement.difference([2.0, 6.0], [1.0, 2.0]) == mean_interval([1.0, 4.0])


def test_independence_of_the_batch():
    truth = {
        "standard": 0.0,
        "weight-norm": 0.0,
        "batch-norm": 1.0,
        "mean-only-batch-norm": 0.5,
        "weight-norm-mean-only": 0.5,
    }
    assert algebra.independence_verdict(truth) == HOLDS
    assert algebra.independence_verdict({**truth, "weight-norm": 0.1}) == FAILS
    assert algebra.independence_verdict({**truth, "batch-norm": 0.0}) == FAILS


def test_initial_moments():
    def numbers(own, other):
        return {"init batch: largest |mean|": own, "other batch: mean |std − 1|": other}

    assert initialization.moments_verdict(numbers(1e-6, 0.05)) == HOLDS
    assert initialization.moments_verdict(numbers(1e-6, 0.5)) == QUALITATIVELY
    assert initialization.moments_verdict(numbers(0.1, 0.05)) == FAILS


def test_time_and_memory():
    assert cost.time_verdict(around(1.005), around(1.16)) == HOLDS
    assert cost.time_verdict(around(1.08), around(1.16)) == QUALITATIVELY
    assert cost.time_verdict(Interval(1.03, 0.9, 1.2), around(1.16)) == NOT_SHOWN
    assert cost.time_verdict(around(1.16), around(1.16)) == FAILS
    assert cost.time_verdict(around(1.0), around(1.0)) == FAILS
    assert cost.memory_verdict([1000, 1000], weights=1000) == HOLDS
    assert cost.memory_verdict([1000, 2000], weights=1000) == FAILS
    assert cost.memory_verdict([9000, 9000], weights=1000) == FAILS


def test_long_widths():
    losses = {"standard": [[1.0, 0.1, 0.4], [1.0, 0.2, 0.1]], "weight-norm": [[0.2, 0.1, 0.1]] * 2}
    assert learning_rates.widths(losses, factor=2.0) == {
        "standard": [0.5, 1.0],
        "weight-norm": [1.5, 1.5],
    }
    found = learning_rates.difference([1.5, 1.5], [0.5, 1.0])
    assert found == mean_interval([0.5, 1.0])


def test_outcome_of_paired_seeds():
    assert from_records.outcome([-1.0, -1.2, -0.9]) == "ahead"
    assert from_records.outcome([1.0, 1.2, 0.9]) == "behind"
    assert from_records.outcome([-1.0, -2.0, -0.5]) == "not shown"  # one sign, but not significant
    assert from_records.outcome([-1.0, 2.0]) == "not shown"
    assert from_records.outcome([-1.0]) == "not shown"
    assert from_records.outcome([-1.0, math.inf]) == "not shown"  # one seed diverged


def test_ordering_of_parameterizations():
    rule, ahead, behind, open_ = from_records.ordering_verdict, "ahead", "behind", "not shown"
    assert rule([ahead] * 4, [ahead] * 4, at_scale=True) == HOLDS
    assert rule([ahead] * 4, [ahead] * 4, at_scale=False) == QUALITATIVELY
    assert rule([ahead] * 4, [ahead, open_], at_scale=False) == QUALITATIVELY
    assert rule([ahead] * 4, [ahead, behind], at_scale=False) == FAILS
    assert rule([ahead, open_], [ahead, open_], at_scale=False) == NOT_SHOWN


def test_better_results():
    rule = from_records.better_verdict
    assert rule({"vae": ["ahead"], "draw": ["ahead"]}, at_scale=False) == QUALITATIVELY
    assert rule({"vae": ["ahead"], "draw": ["ahead"]}, at_scale=True) == HOLDS
    assert rule({"vae": ["ahead"], "draw": ["behind"]}, at_scale=False) == NOT_SHOWN
    assert rule({"vae": ["ahead"], "draw": []}, at_scale=False) == NOT_SHOWN
    assert rule({"vae": ["behind"], "draw": []}, at_scale=False) == FAILS
    assert rule({"vae": []}, at_scale=False) == NOT_MEASURED


def test_alternatives_and_single_seeds():
    rule = from_records.judged_outcomes
    assert rule({"a": [(3, "behind"), (3, "ahead")], "b": [(2, "behind")]}) == ["ahead", "behind"]
    assert rule({"a": [(3, "ahead")], "b": [(1, "not shown")]}) == ["ahead"]
    assert rule({"b": [(1, "not shown")]}) == ["not shown"]
    # A comparison of several seeds counts also if an alternative has one seed.
    assert rule({"a": [(3, "ahead"), (1, "behind")], "b": [(1, "behind")]}) == ["ahead"]
    assert rule({"a": [(3, "behind"), (3, "not shown")]}) == ["not shown"]


def test_an_effect_of_exactly_zero_is_no_effect():
    zero = Interval(0.0, 0.0, 0.0)
    assert above(zero, 0.5) == FAILS
    assert above(Interval(0.3, 0.0, 0.6), 0.5) == NOT_SHOWN
    assert undecided(around(0.1), zero) == FAILS
    assert norm_growth.noise_verdict([zero], [around(0.1)]) == FAILS
    assert from_records.outcome([0.0, 0.0]) == "not shown"


def test_a_part_that_was_not_measured_is_weaker_than_one_not_shown():
    assert weakest(HOLDS, NOT_SHOWN, NOT_MEASURED) == NOT_MEASURED


def test_a_mean_that_may_have_tails_is_not_shown_to_be_gaussian():
    heavy = {16: [around(2.0)] * 2}
    assert noise.noise_verdict({16: around(0.4)}, heavy) == HOLDS
    assert noise.noise_verdict({16: Interval(0.4, 0.2, 0.6)}, heavy) == QUALITATIVELY


def test_seeds_of_a_comparison_of_variances_are_those_of_the_smaller_sample():
    found = from_records.comparisons(vae, {1: 80.0, 2: 81.0, 3: 80.5}, {1: 90.0, 2: 95.0})
    assert {aspect: n for aspect, (n, _) in found.items()} == {"": 2, " in variance": 2}
