"""Rules of the verdicts, on numbers for which a statement is true, false and undecided."""

import math

import pytest

from weightnorm.lab.claims import (
    covariance,
    identities,
    learning_rates,
    norm_growth,
    q_learning,
)
from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    NOT_MEASURED,
    NOT_REPRODUCED,
    NOT_SHOWN,
    REPRODUCED,
    above,
    at_least,
    below,
    equivalent,
    paired,
    relative,
    weakest,
)
from weightnorm.lab.statistics import Interval, mean_interval

TRUE, FALSE, OPEN = REPRODUCED, NOT_REPRODUCED, NOT_SHOWN


def around(mean, half=0.01):
    return Interval(mean, mean - half, mean + half)


@pytest.mark.parametrize(
    ("rule", "interval", "limit", "verdict"),
    [
        (above, around(0.2), 0.0, TRUE),
        (above, around(0.0), 0.0, OPEN),
        (above, around(-0.2), 0.0, FALSE),
        (above, Interval(0.0, 0.0, 0.0), 0.0, FALSE),  # no effect
        (above, Interval(1.0, -math.inf, math.inf), 0.0, OPEN),  # one seed
        (below, around(-0.2), 0.0, TRUE),
        (below, around(0.2), 0.0, FALSE),
        (below, Interval(0.0, 0.0, 0.0), 0.0, FALSE),
        (at_least, Interval(0.5, 0.5, 0.5), 0.5, TRUE),
        (at_least, around(0.5), 0.5, OPEN),
        (at_least, around(0.4), 0.5, FALSE),
        (equivalent, around(0.02), 0.1, TRUE),
        (equivalent, Interval(0.0, -0.5, 0.5), 0.1, OPEN),  # a wide interval shows no equality
        (equivalent, around(0.1), 0.1, OPEN),
        (equivalent, around(0.2), 0.1, FALSE),
        (equivalent, around(-0.2), 0.1, FALSE),
    ],
)
def test_intervals(rule, interval, limit, verdict):
    assert rule(interval, limit) == verdict


def test_several_parts():
    assert weakest(TRUE, TRUE) == TRUE
    assert weakest(TRUE, OPEN) == OPEN
    assert weakest(OPEN, NOT_MEASURED) == NOT_MEASURED
    assert weakest(OPEN, NOT_MEASURED, FALSE) == FALSE
    assert paired([2.0, 6.0], [1.0, 2.0]) == mean_interval([1.0, 4.0])
    assert relative([2.0, 6.0], [1.0, 2.0]) == mean_interval([1.0, 2.0])
    for one in (paired([9.0], [1.0]), relative([9.0], [1.0]), paired([9.0, math.inf], [1.0, 1.0])):
        assert above(one, 0.0) == OPEN  # one seed, and a run that diverged, show nothing


def test_independence_of_the_batch():
    truth = {
        "standard": 0.0,
        "weight-norm": 0.0,
        "batch-norm": 1.0,
        "mean-only-batch-norm": 0.5,
        "weight-norm-mean-only": 0.5,
    }
    assert identities.independence_verdict(truth) == HOLDS
    assert identities.independence_verdict({**truth, "weight-norm": 0.1}) == FAILS
    assert identities.independence_verdict({**truth, "batch-norm": 0.0}) == FAILS


def test_memory():
    assert identities.memory_verdict([1000, 1000], weights=1000) == HOLDS
    assert identities.memory_verdict([1000, 2000], weights=1000) == FAILS
    assert identities.memory_verdict([9000, 9000], weights=1000) == FAILS


def test_growth_of_v():
    rule = norm_growth.growth_verdict
    assert rule({"momentum": [0.5, 0.51, 0.5], "Adam": [0.2, 0.2]}) == TRUE
    assert rule({"momentum": [0.5, 0.5], "Adam": [0.2, -0.2]}) == OPEN
    assert rule({"momentum": [0.5, 0.5], "Adam": [-0.2, -0.2]}) == FALSE


def test_growth_and_noise():
    rule = norm_growth.noise_verdict
    assert rule({128: [1.0, 1.1], 32: [1.2, 1.3], 8: [1.5, 1.6]}) == TRUE
    assert rule({128: [1.0, 1.1], 32: [1.2, 1.0], 8: [1.5, 1.6]}) == OPEN
    assert rule({128: [1.0, 1.1], 32: [1.2, 1.3], 8: [1.0, 1.1]}) == FALSE


def test_decades_of_learning_rates():
    errors = {
        "standard": [[0.9, 0.02, 0.04, 0.9], [0.9, 0.025, 0.06, 0.9]],
        "weight-norm": [[0.03, 0.02, 0.02, 0.02], [0.05, 0.02, 0.02, 0.035]],
    }
    found = learning_rates.decades(errors, factor=1.5)
    assert found == {"standard": [0.5, 0.5], "weight-norm": [2.0, 1.0]}
    assert learning_rates.decades(errors, factor=3.0)["standard"] == [1.0, 1.0]
    assert learning_rates.best_rate([0.3, 0.1, 0.2]) == 1


def test_figure_of_losses_ends_where_a_run_diverged():
    losses = {"a": [[1.0, 30.0, learning_rates.DIVERGED], [3.0, 50.0, 4.0]], "b": [[1e300] * 3]}
    (line,) = learning_rates.loss_figure("t", (0.1, 1.0, 10.0), losses, "")["series"]
    assert (line["name"], line["x"], line["y"]) == ("a", [0.1, 1.0], (2.0, 40.0))  # not capped
    assert (line["low"], line["high"]) == ((1.0, 30.0), (3.0, 50.0))


def test_nearer_the_identity():
    rule = covariance.nearer_verdict
    assert rule(around(0.2), around(0.1)) == TRUE
    assert rule(around(0.03), around(0.02)) == FALSE  # negligible
    assert rule(around(0.2), around(0.0)) == OPEN
    assert rule(around(0.2), around(-0.1)) == FALSE


def test_intervals_are_over_seeds():
    rows = [{"seed": s, "x": x, "y": 1.0} for s, x in [(1, 2.0), (1, 4.0), (2, 7.0), (2, 9.0)]]
    assert covariance.seed_means(rows, "x", less="y") == [2.0, 7.0]
    assert covariance.over_seeds(rows, "x", less="y") == mean_interval([2.0, 7.0])


def test_batch_norm_in_deep_q_learning():
    low, high = [0.1, 0.11, 0.1], [0.5, 0.5, 0.51]
    learned, not_learned = [0.5, 0.52, 0.5], [0.95, 1.0, 0.9]

    def rule(changed, unexplained):
        return q_learning.stability_verdicts(*(dict(enumerate(x)) for x in (changed, unexplained)))

    unstable = (low, low, high, low)
    assert rule(unstable, (learned, learned, not_learned, learned)) == (TRUE, TRUE)
    assert rule(unstable, (learned, learned, not_learned, not_learned)) == (TRUE, FALSE)
    assert rule((low, high, low, low), (learned,) * 4) == (FALSE, FALSE)
    assert (
        rule((low, low, [0.0, 0.5, 0.2], low), (learned, learned, not_learned, learned))[0] == OPEN
    )
    # Where nothing was learned, nothing can be destabilized.
    assert rule(unstable, (learned, not_learned, not_learned, learned)) == (OPEN, OPEN)
