"""The best learning rate: one rule for sweeps, reports and claims."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.aggregate import best_rate
from weightnorm.lab.runs.selection import best_learning_rate
from weightnorm.lab.sweeps.summary import summarize


@pytest.mark.parametrize(
    ("results", "best"),
    [
        ({}, None),
        ({0.1: []}, None),
        ({0.1: [None]}, None),
        ({0.1: [0.4], 0.01: [0.3]}, 0.01),
        ({0.1: [0.1, 0.9], 0.01: [0.4, 0.4]}, 0.01),  # the lowest mean, not the lowest run
        ({0.1: [0.1, None], 0.01: [0.4, 0.5]}, 0.01),  # a seed diverged
        ({0.1: [0.1, None], 0.01: [None, None]}, 0.1),
        ({0.1: [0.1, None], 0.01: [0.2, None]}, 0.1),  # at every rate
        ({0.1: [0.3], 0.01: [0.3]}, 0.01),  # equal: the smaller rate
        ({0.1: [0.3, 0.3], 0.01: [0.3]}, 0.1),  # equal: more runs
        ({0.1: [0.2, 0.3, 0.3], 0.01: [0.25]}, 0.1),  # by the seed that both have
    ],
)
def test_lowest_mean_without_divergence(results, best):
    grid = {rate: dict(enumerate(values)) for rate, values in results.items()}
    assert best_learning_rate(grid) == best
    mirrored = {rate: {s: x and -x for s, x in row.items()} for rate, row in grid.items()}
    assert best_learning_rate(mirrored, highest=True) == best


def test_a_diverged_rate_does_not_narrow_the_comparison_of_the_others():
    grid = {0.1: {1: 0.2, 2: 0.6}, 0.3: {1: 0.3, 2: 0.3}, 1.0: {1: 5.0, 2: None}}
    assert best_learning_rate(grid) == 0.3


def test_rates_without_a_common_seed_are_compared_by_their_means():
    assert best_learning_rate({0.1: {1: 0.2}, 0.01: {2: 0.1}}) == 0.01


rates = st.sampled_from([0.001, 0.003, 0.01])
values = st.lists(st.none() | st.integers(0, 8).map(lambda x: x / 8), max_size=3)
grids = st.dictionaries(rates, values, min_size=1)


def record(rate, seed, value, experiment="classify"):
    config = {"parameterization": "weight-norm", "learning_rate": rate, "seed": seed}
    if value is None:
        diverged = {"epoch": 1, "step": 3, "message": "diverged"}
        return RunRecord(
            Path("x"), experiment, "cpu", config, result={"train_error": None}, diverged=diverged
        )
    result = {"train_error": value, "test_error": value, "seconds": 1.0}
    return RunRecord(Path("x"), experiment, "cpu", config, result=result)


@given(grids)
def test_sweeps_and_reports_agree(grid):
    """Also with diverged seeds, for which their rules used to differ."""
    expected = best_learning_rate({rate: dict(enumerate(row)) for rate, row in grid.items()})
    groups = {r: [record(r, i, x) for i, x in enumerate(grid[r])] for r in grid if grid[r]}
    records = [x for group in groups.values() for x in group]
    assert [c.learning_rate for c in summarize(records, "train_error") if c.best] == (
        [] if expected is None else [expected]
    )
    if expected is not None:
        assert best_rate(groups, "train_error") == expected
