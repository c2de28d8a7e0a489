"""The rule of each verdict, on numbers for which the claim is true and for which it is false."""

import math

import pytest

from weightnorm.lab.claims import (
    algebra,
    cost,
    covariance,
    from_records,
    initialization,
    noise,
    norm_growth,
    reinforcement,
    robustness,
)
from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    NEEDS_SCALE,
    NOT_MEASURED,
    QUALITATIVELY,
    Interval,
    above,
    bootstrap,
    exactly,
    weakest,
)


def around(mean, half=0.01):
    return Interval(mean, mean - half, mean + half)


def test_the_bootstrap_covers_the_mean_and_widens_with_the_spread():
    narrow, wide = bootstrap([1.0, 1.1, 0.9, 1.0]), bootstrap([0.0, 2.0, -1.0, 3.0])
    for interval in (narrow, wide):
        assert interval.mean == pytest.approx(1)
        assert interval.low < 1 < interval.high
    assert narrow.high - narrow.low < wide.high - wide.low
    assert bootstrap([1.0, 2.0, 4.0]) == bootstrap([1.0, 2.0, 4.0])


@pytest.mark.parametrize(
    ("deviation", "verdict"), [(1e-12, HOLDS), (1e-3, FAILS), (math.nan, FAILS), (math.inf, FAILS)]
)
def test_an_identity_holds_to_rounding_or_not(deviation, verdict):
    assert exactly(deviation, 1e-9) == verdict


def test_a_claim_is_as_true_as_its_weakest_part():
    assert weakest(HOLDS, HOLDS) == HOLDS
    assert weakest(HOLDS, QUALITATIVELY, FAILS) == FAILS
    assert above(around(0.6), 0.5) == HOLDS
    assert above(around(0.505), 0.5) == QUALITATIVELY
    assert above(Interval(0.6, -0.1, 1.3), 0.5) == FAILS


def grown(shrinking=0.0, pythagoras=1e-15, momentum=1.5, adam=1.2):
    other = {"shrinking": [0.1, 0.1], "pythagoras": [0.3, 0.3]}
    exact = {"shrinking": [0.0, shrinking], "pythagoras": [1e-16, pythagoras]}
    return {
        "gradient descent": {**exact, "growth": [2.0, 2.0]},
        "momentum 0.9": {**other, "growth": [momentum, 1.5]},
        "Adam": {**other, "growth": [adam, 1.2]},
    }


def test_growth():
    assert norm_growth.growth_verdict(grown()) == HOLDS
    assert norm_growth.growth_verdict(grown(adam=0.9)) == QUALITATIVELY
    assert norm_growth.growth_verdict(grown(shrinking=0.001)) == FAILS
    assert norm_growth.growth_verdict(grown(pythagoras=1e-3)) == FAILS


def test_noise_and_growth():
    up, level, down = around(0.1), around(0.0), around(-0.1)
    assert norm_growth.noise_verdict([up, up], [up, up]) == HOLDS
    assert norm_growth.noise_verdict([up, up], [up, level]) == QUALITATIVELY
    assert norm_growth.noise_verdict([up, level], [up, up]) == FAILS
    assert norm_growth.noise_verdict([down, down], [up, up]) == FAILS
    values = {128: [1.0, 1.1], 32: [1.2, 1.2], 8: [1.5, 1.6]}
    assert [step.mean for step in norm_growth.steps_up(values)] == pytest.approx([0.15, 0.35])


def test_widths_and_losses_at_the_end():
    chance, rates = math.log(10), len(robustness.RATES)
    dip = [chance] * rates
    assert robustness.width(dip) == 0  # nothing learned anywhere
    dip[4] = 0.1
    assert robustness.width(dip) == pytest.approx(0.5)
    dip[5] = 0.1 + 0.15 * (chance - 0.1)
    assert robustness.width(dip) == pytest.approx(0.5)
    assert robustness.width(dip, within=0.2) == pytest.approx(1)
    assert robustness.width([0.1] * rates) == pytest.approx(0.5 * rates)
    assert robustness.at_the_end([1.0] * 5, 10) == chance
    assert robustness.at_the_end([9.0] * 10, 10) == chance
    assert robustness.at_the_end([2.0] * 8 + [0.5, 1.5], 10) == pytest.approx(1.0)


def test_the_best_rate_is_that_of_the_mean_over_seeds():
    assert robustness.best_rate([[1.0, 0.5, 2.0], [1.0, 0.9, 0.1]]) == 1


def test_the_log_scale():
    up, level, down = around(0.1), around(0.0), around(-0.1)
    assert robustness.log_verdict([up, up], [level, level]) == HOLDS
    assert robustness.log_verdict([level, up], [level, up]) == QUALITATIVELY
    assert robustness.log_verdict([up, down], [level, level]) == FAILS
    assert robustness.log_verdict([up, up], [level, down]) == FAILS


def test_the_dominant_direction():
    often, seldom, more, none = around(0.8), around(0.2), around(0.2), around(0.0)
    assert covariance.alignment_verdict(often, more, more) == HOLDS
    assert covariance.alignment_verdict(seldom, more, more) == QUALITATIVELY
    assert covariance.alignment_verdict(often, none, more) == FAILS
    assert covariance.alignment_verdict(often, more, none) == FAILS


def test_nearer_the_identity():
    assert covariance.nearer_verdict(around(0.2), around(0.1)) == HOLDS
    assert covariance.nearer_verdict(around(0.04), around(0.03)) == QUALITATIVELY
    assert covariance.nearer_verdict(around(0.2), around(0.0)) == FAILS
    assert covariance.nearer_verdict(around(-0.2), around(0.1)) == FAILS


def test_networks_are_counted_not_their_layers():
    rows = [{"seed": s, "x": x, "y": 1.0} for s, x in [(1, 2.0), (1, 4.0), (2, 7.0), (2, 9.0)]]
    interval = covariance.over_seeds(rows, "x", less="y")
    assert interval == Interval(4.5, 2.0, 7.0)


def test_tails():
    def verdict(mean, small, large):
        means = {16: around(mean), 100: around(mean)}
        return noise.noise_verdict(means, {16: [around(small)] * 2, 100: [around(large)] * 2})

    assert verdict(0.0, 2.0, 0.8) == HOLDS
    assert verdict(0.0, 2.0, 0.2) == QUALITATIVELY
    assert verdict(1.0, 2.0, 0.8) == QUALITATIVELY
    assert verdict(0.0, 0.0, 0.8) == FAILS


def test_batch_norm_in_deep_q_learning():
    worse, same, better = around(0.5), around(0.0), around(-0.5)
    assert reinforcement.stability_verdict(worse, worse, worse) == HOLDS
    assert reinforcement.stability_verdict(worse, worse, same) == QUALITATIVELY
    assert reinforcement.stability_verdict(better, worse, worse) == QUALITATIVELY
    assert reinforcement.stability_verdict(same, better, worse) == FAILS
    assert reinforcement.better([[2.0, 2.0], [1.0, 2.0]]) == [1.0, 2.0]
    assert reinforcement.difference([2.0, 6.0], [1.0, 2.0]) == Interval(2.5, 1.0, 4.0)


def test_independence():
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


def test_moments():
    def numbers(own, other):
        return {"init batch: largest |mean|": own, "other batch: mean |std − 1|": other}

    assert initialization.moments_verdict(numbers(1e-6, 0.05)) == HOLDS
    assert initialization.moments_verdict(numbers(1e-6, 0.5)) == QUALITATIVELY
    assert initialization.moments_verdict(numbers(0.1, 0.05)) == FAILS


def test_time_and_memory():
    assert cost.time_verdict(around(1.005), around(1.16)) == HOLDS
    assert cost.time_verdict(around(1.08), around(1.16)) == QUALITATIVELY
    assert cost.time_verdict(Interval(1.03, 0.9, 1.2), around(1.16)) == FAILS  # too noisy to say
    assert cost.time_verdict(around(1.16), around(1.16)) == FAILS
    assert cost.memory_verdict([1000, 1000], weights=1000) == HOLDS
    assert cost.memory_verdict([1000, 2000], weights=1000) == FAILS
    assert cost.memory_verdict([9000, 9000], weights=1000) == FAILS


TRAIN = {
    "standard": 0.3,
    "batch-norm": 0.1,
    "weight-norm": 0.2,
    "mean-only-batch-norm": 0.2,
    "weight-norm-mean-only": 0.15,
}
TEST = {**TRAIN, "weight-norm-mean-only": 0.05}


def test_orderings_of_the_records():
    assert from_records.orderings_verdict(TRAIN, TEST, at_scale=True) == HOLDS
    assert from_records.orderings_verdict(TRAIN, TEST, at_scale=False) == QUALITATIVELY
    assert from_records.orderings_verdict(TRAIN, TRAIN, at_scale=True) == FAILS
    assert (
        from_records.orderings_verdict({**TRAIN, "standard": 0.0}, TRAIN, at_scale=False) == FAILS
    )
    assert (
        from_records.orderings_verdict({"standard": 0.3}, {"standard": 0.3}, False) == NOT_MEASURED
    )


def test_the_other_experiments():
    ahead = {"standard": 90.0, "weight-norm": 88.0}
    behind = {"standard": 88.0, "weight-norm": 90.0}
    assert from_records.better_verdict({"vae": ahead, "draw": ahead}) == QUALITATIVELY
    assert from_records.better_verdict({"vae": ahead, "draw": behind}) == NEEDS_SCALE
    assert from_records.better_verdict({"vae": ahead, "draw": {}}) == NEEDS_SCALE
    assert from_records.better_verdict({"vae": behind}) == FAILS
    assert from_records.better_verdict({"vae": {}}) == NOT_MEASURED
