"""Statistics over seeds, compared with numpy, also with missing values."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.aggregate import (
    best_rate,
    common_target,
    curve,
    epoch_seconds,
    final,
    finite_or_nan,
    stat,
)
from weightnorm.lab.reports.run_grid import by_setting, label, run_grids


def record(*errors, result=None, first_epoch=1, **config):
    rows = [{"epoch": first_epoch + i, "error": error} for i, error in enumerate(errors)]
    return RunRecord(Path("run"), "classify", "cpu", config, [], rows, result)


def done(error, **config):
    return record(error, result={"error": error}, **config)


def test_stat_equals_numpy():
    values = [0.3, 0.1, 0.8]
    found = stat(values)
    assert (found.mean, found.std) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert (found.n, found.runs, found.complete) == (3, 3, True)


@pytest.mark.parametrize("missing", [None, "0.3", True, math.nan, math.inf, 10**400, [1]])
def test_stat_ignores_values_that_are_not_finite(missing):
    assert math.isnan(finite_or_nan(missing))
    found = stat([0.25, missing])
    assert (found.mean, found.n, found.runs, found.complete) == (0.25, 1, 2, False)
    assert found.text() == "0.25 (n = 1 of 2)"


def test_stat_of_one_run_has_no_std():
    assert math.isnan(stat([0.5]).std)
    assert stat([0.5]).text(scale=100) == "50.00"
    assert curve([record(0.5)], "error").std == (0,)


def test_stat_of_no_runs():
    assert stat([]).text() == "—"
    assert not stat([]).complete
    assert curve([], "error").n == 0
    assert curve([record()], "error").n == 0


def test_a_curve_is_mean_and_std_at_each_epoch():
    found = curve([record(0.9, 0.4), record(0.7, 0.2)], "error")
    assert found.x == (1, 2)
    assert found.mean == pytest.approx((0.8, 0.3))
    assert found.std == pytest.approx((np.std([0.9, 0.7], ddof=1),) * 2)
    assert found.n == 2


def test_a_curve_has_a_gap_where_a_run_dropped_out():
    found = curve([record(0.9, 0.4, 0.2), record(0.7, None)], "error")
    assert found.mean[0] == pytest.approx(0.8)
    assert all(map(math.isnan, found.mean[1:]))


def test_a_curve_skips_epochs_that_no_run_has_and_runs_that_never_have_it():
    found = curve([record(0.9, None, 0.2), record(None, None, None)], "error")
    assert (found.x, found.mean, found.n) == ((1, 3), (0.9, 0.2), 1)


def test_curve_uses_the_epoch_not_the_row_number():
    found = curve([record(0.9, 0.4), record(0.2, first_epoch=2)], "error")
    assert math.isnan(found.mean[0])
    assert found.mean[1] == pytest.approx(0.3)


def test_final_prefers_the_result_to_the_last_row():
    assert final(record(0.9, 0.4, result={"error": 0.3}), "error") == 0.3
    assert final(record(0.9, 0.4, result={}), "error") == 0.4
    assert final(record(0.9, 0.4), "error") == 0.4
    assert math.isnan(final(record(0.9, result={"error": None}), "error"))
    assert math.isnan(final(record(), "error"))


def test_the_time_of_an_epoch_is_the_mean_of_those_recorded():
    rows = [{"seconds": 1.0}, {"seconds": None}, {"seconds": 3.0}]
    assert epoch_seconds(RunRecord(Path("run"), "classify", "cpu", {}, [], rows)) == 2.0
    assert math.isnan(epoch_seconds(record()))


def test_the_best_rate_has_the_lowest_mean_not_the_lowest_run():
    rates = {0.1: [done(0.1), done(0.9)], 0.2: [done(0.4), done(0.4)]}
    assert best_rate(rates, "error") == 0.2


def test_a_rate_at_which_a_run_diverged_is_not_the_best():
    assert best_rate({0.1: [done(0.1), done(None)], 0.2: [done(0.4)]}, "error") == 0.2


def test_unfinished_runs_do_not_decide_the_rate():
    rates = {0.1: [record(0.1)], 0.2: [done(0.4), record(0.9)]}
    assert best_rate(rates, "error") == 0.2


def test_best_rate_without_finished_runs_has_most_epochs():
    rates = {0.1: [record()], 0.2: [record(0.9, 0.8)], 0.3: [record(0.1)]}
    assert best_rate(rates, "error") == 0.2


def test_the_highest_may_be_the_best():
    rates = {0.1: [done(0.4)], 0.2: [done(0.9)], 0.3: [done(None)]}
    assert best_rate(rates, "error", highest=True) == 0.2


def test_best_rate_of_equal_ones_is_the_smaller():
    assert best_rate({0.2: [done(0.4)], 0.1: [done(0.4)]}, "error") == 0.1


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("runs/classify/cpu/weight-norm/lr-0.003/seed-1", "cpu"),
        ("runs/classify/cpu+epochs=3/weight-norm/lr-0.003/seed-1", "cpu+epochs=3"),
        ("classify/cpu+x=1/classify/cpu+x=2/weight-norm", "cpu+x=2"),
        ("classify/work/classify/cpu+x=1/weight-norm", "cpu+x=1"),
        ("elsewhere/seed-1", "cpu"),
        ("runs/classify/cpu2/weight-norm", "cpu"),
    ],
)
def test_the_label_is_the_folder_below_the_experiment(folder, expected):
    assert label(RunRecord(Path(folder), "classify", "cpu", {})) == expected


def test_run_grid_groups_by_parameterization_and_rate():
    runs = [
        done(0.3, parameterization=kind, learning_rate=rate, seed=seed)
        for kind in ("weight-norm", "own", "standard")
        for rate in (0.01, 0.001)
        for seed in (1, 2)
    ]
    (found,) = run_grids(runs, "error")
    assert list(found.grid) == ["standard", "weight-norm", "own"]
    assert all(list(rates) == [0.001, 0.01] for rates in found.grid.values())
    assert {len(runs) for rates in found.grid.values() for runs in rates.values()} == {2}
    assert {rate for rate, _ in found.best.values()} == {0.001}


def test_a_diverged_run_does_not_set_the_common_target():
    runs = [record(0.9, 0.4), record(0.8, 0.3), replace(record(0.95), diverged={"epoch": 2})]
    assert common_target(runs, "error") == 0.4


def test_a_diverged_run_has_no_final_value_and_wins_no_selection():
    whole = done(0.5, learning_rate=0.003, seed=1)
    diverged = replace(
        record(0.4, result={"error": 0.4, "loss": None}, learning_rate=0.01, seed=1),
        diverged={"epoch": 1, "step": 1, "message": "loss is inf"},
    )
    assert math.isnan(final(diverged, "error"))
    assert diverged.final("error") is None
    assert best_rate({0.003: [whole], 0.01: [diverged]}, "error") == 0.003


def test_runs_of_other_settings_are_other_grids():
    runs = [done(0.1 * i, epochs=i, seed=seed) for i, seed in ((1, 1), (6, 2), (6, 3))]
    found = by_setting(runs)  # their folders do not tell
    assert {name: len(group) for name, group in found.items()} == {
        "cpu+epochs=1": 1,
        "cpu+epochs=6": 2,
    }
    assert by_setting(runs, compared=("epochs",)) == {"cpu": runs}
    older = done(0.2, seed=4)  # from before the field existed
    assert by_setting([older, *runs[1:]]) == {"cpu": [older, *runs[1:]]}
    assert by_setting(runs[:1]) == {"cpu": runs[:1]}
